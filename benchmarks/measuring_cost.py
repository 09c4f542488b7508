"""What measuring adds to a step of 10 ms: the worker's loop against the same steps with nothing written down.

Both sides train one small layer. Ours is the worker's own loader, loop, recorder and channel to the batch, with progress
sent; the bare one is torch's loader and the four calls that train. They take turns in one process, on one thread; of
each the fastest round counts, the one that nothing else disturbed. CPU time is taken from steps that do not wait, and
compared with 10 ms; for wall time the forward pass lasts until 10 ms of the clock have gone by, so that all else that a
step does is seen beside it. Marks on an accelerator are not in these figures.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.report import Row
from pytest_mlhpc.node.protocol.channel import RankChannel
from pytest_mlhpc.node.worker import loop
from pytest_mlhpc.node.worker.base import Task, TensorSpec, open_device
from pytest_mlhpc.node.worker.data.source import MemoryDataset, ShardedSampler
from pytest_mlhpc.node.worker.loop import Trainer, run_steps
from pytest_mlhpc.node.worker.prepare import Shape, batches_of

STEP_S = 0.010
BATCH = 8
#: Steps of one round, rounds of each side. Short rounds find a moment in which the machine does nothing else.
WAITING = (20, 60)
BUSY = (500, 20)

Progress = Callable[[int, int, float], None]


class Slow(nn.Module):
    """A layer whose forward pass takes *seconds* at least."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.seconds = seconds

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return (N, 2) for (N, 4)."""
        end = time.perf_counter() + self.seconds
        output: torch.Tensor = self.layer(inputs)
        while time.perf_counter() < end:
            pass
        return output


@dataclass(frozen=True)
class Side:
    """One side's ``steps`` of training, all set up; returns when they are done."""

    name: str
    prepare: Callable[[int], Callable[[], None]]


def trainer(seconds: float) -> Trainer:
    """Return the worker's trainer of a model that takes *seconds*."""
    task = Task(
        name="slow",
        model=lambda: Slow(seconds),
        prepare=lambda inputs, targets: (inputs, targets),
        loss=nn.functional.mse_loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        input=TensorSpec((4,), torch.float32),
        target=TensorSpec((2,), torch.float32),
    )
    model = task.model()
    return Trainer(task, model, task.optimizer(model), open_device("cpu", 0))


def measured(trained: Trainer, dataset: MemoryDataset, progress: Progress) -> Side:
    """Return steps as the worker does them."""

    def prepare(steps: int) -> Callable[[], None]:
        sampler = ShardedSampler(len(dataset), 0, 1, 0, repeat=True)
        batches = batches_of(dataset, sampler, Shape(BATCH, 0, pin=False))
        recorder = loop.Recorder()
        recorder.start(trained.accelerator)

        def tell(step: int, samples: int) -> None:
            progress(step, steps, samples / ((recorder.clock.perf() - recorder.start_ns) / 1e9))

        return lambda: run_steps(trained, batches, steps, recorder, tell)

    return Side("measured", prepare)


def bare(trained: Trainer, dataset: TensorDataset) -> Side:
    """Return steps of the same model by nothing but what training needs."""
    task, model, optimizer = trained.task, trained.model, trained.optimizer

    def forever() -> Iterator[Any]:
        while True:
            yield from DataLoader(dataset, batch_size=BATCH, shuffle=True, drop_last=True)

    def prepare(steps: int) -> Callable[[], None]:
        source = forever()

        def go() -> None:
            losses = []
            for _ in range(steps):
                inputs, targets = next(source)
                ready, wanted = task.prepare(inputs, targets)
                loss = task.loss(model(ready), wanted)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                losses.append(loss.detach())

        return go

    return Side("bare", prepare)


def channel() -> tuple[RankChannel, Callable[[], None]]:
    """Return the rank's end of a channel, and what closes it; its other end is read as a batch reads it."""
    ours, theirs = socket.socketpair()

    def read() -> None:
        while theirs.recv(1 << 16):
            pass

    thread = threading.Thread(target=read)
    thread.start()
    opened = RankChannel(ours, 0)

    def close() -> None:
        opened.close()
        ours.shutdown(socket.SHUT_RDWR)
        thread.join()
        ours.close()
        theirs.close()

    return opened, close


def fastest(
    seconds: float, size: tuple[int, int], clock: Callable[[], float], progress: Progress
) -> list[float]:
    """Return the seconds of *clock* that one step takes, measured and bare, in the fastest round of each."""
    inputs, targets = torch.randn(BATCH * 100, 4), torch.randn(BATCH * 100, 2)
    trained = trainer(seconds)
    sides = (
        measured(trained, MemoryDataset(inputs, targets, len(inputs)), progress),
        bare(trained, TensorDataset(inputs, targets)),
    )
    steps, rounds = size
    times: dict[str, list[float]] = {side.name: [] for side in sides}
    for turn in range(rounds):
        for side in sides if turn % 2 else reversed(sides):
            go = side.prepare(steps)
            begin = clock()
            go()
            times[side.name].append((clock() - begin) / steps)
    return [min(times[side.name]) for side in sides]


def run() -> list[Row]:
    """Let the two take turns, on CPU time and on wall time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    opened, close = channel()
    try:
        busy = fastest(0.0, BUSY, time.process_time, opened.progress)
        waiting = fastest(STEP_S, WAITING, time.perf_counter, opened.progress)
    finally:
        close()
        torch.set_num_threads(threads)
    return [row("CPU time", *busy), row("wall time", *waiting)]


def row(what: str, ours: float, without: float) -> Row:
    """Return what measuring added to a step as a share of 10 ms."""
    added = ours - without
    text = (
        f"{100 * added / STEP_S:+.2f} % ({1e6 * added:+.1f} us: {1e6 * ours:.1f} against {1e6 * without:.1f})"
    )
    return Row(f"cost of measuring at 10 ms a step, {what}", "<= 1 %", text, added / STEP_S <= 0.01)
