"""PAYLOAD. One training epoch after the other at the rates of a schedule, with what each cost."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Iterable, Iterator, List, Tuple

import torch

from pytest_mlhpc.node.worker import distributed, timing
from pytest_mlhpc.node.worker.distributed import Group
from pytest_mlhpc.node.worker.loop import Batch, Trainer, resolve_losses, run_steps
from pytest_mlhpc.node.worker.quality.schedule import Schedule

#: Steps of a run whose own times and losses are kept; of a longer run they are spread evenly over it.
MOST_STEPS = 4096


@dataclass
class Spent:
    """Sums over all training epochs so far, in seconds unless said. All ranks have equally many ``step_times_s``."""

    epochs_s: List[float] = field(default_factory=list)
    samples: int = 0
    wait_s: float = 0.0
    first_s: float = 0.0  #: the run's first batch, with the start of loader processes
    copy_s: float = 0.0
    exposed_copy_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0
    read_s: float = 0.0
    step_times_s: List[float] = field(default_factory=list)
    losses: List[float] = field(default_factory=list)
    last_batch: Any = None

    @property
    def steps(self) -> int:
        """Steps done."""
        return len(self.step_times_s)

    def add(
        self, times: timing.WindowTimes, recorder: timing.Recorder, epoch_s: float, start_s: float
    ) -> None:
        """Add one training epoch; starting its loader took *start_s*, in which training stood still as well."""
        if not self.epochs_s:
            self.first_s = start_s + times.first_wait_s
            self.wait_s -= self.first_s
        self.epochs_s.append(epoch_s)
        self.samples += recorder.samples
        self.read_s += recorder.read_s
        self.wait_s += times.wait_s + start_s
        self.copy_s += times.copy_s
        self.exposed_copy_s += times.exposed_copy_s
        self.forward_s += times.forward_s
        self.backward_s += times.backward_s
        self.optimizer_s += times.optimizer_s
        self.step_times_s += times.step_times_s
        self.losses += resolve_losses(recorder.losses, len(self.losses))
        self.last_batch = recorder.last_batch


def train_epoch(
    trainer: Trainer,
    loader: Iterable[Batch],
    group: Group,
    spent: Spent,
    *,
    schedule: Schedule,
    steps: int,
    progress: Callable[[int, float], None],
) -> None:
    """Train one epoch of so many *steps* at the rates of *schedule*, and add what it cost to *spent*.

    Raises:
        WorkerFailure: the loader ended early, the loss is no number, or a clock went back.
    """
    first = spent.steps
    accelerator, recorder = trainer.accelerator, timing.Recorder()
    distributed.barrier(group, accelerator)
    recorder.start(accelerator)
    started_ns = time.perf_counter_ns()
    batches = iter(loader)
    start_s = (time.perf_counter_ns() - started_ns) / 1e9
    for count, rate in stretches(schedule, first, steps):
        set_rate(trainer.optimizer, rate)
        tell = functools.partial(_tell, progress, recorder, first + len(recorder.losses))
        run_steps(trainer, batches, count, recorder, tell)
    accelerator.synchronize()
    epoch_s = (recorder.clock.perf() - recorder.start_ns) / 1e9
    distributed.barrier(group, accelerator)
    spent.add(timing.resolve(recorder, accelerator, trainer.accumulate), recorder, epoch_s, start_s)


def _tell(
    progress: Callable[[int, float], None], recorder: timing.Recorder, before: int, step: int, samples: int
) -> None:
    progress(before + step, samples / ((recorder.clock.perf() - recorder.start_ns) / 1e9))


def stretches(schedule: Schedule, first: int, steps: int) -> Iterator[Tuple[int, float]]:
    """Yield (number of steps, their rate) for the training epoch that begins at step *first* of the run."""
    count, rate = 0, schedule.at(first, steps)
    for step in range(first, first + steps):
        now = schedule.at(step, steps)
        if now != rate:
            yield count, rate
            count, rate = 0, now
        count += 1
    yield count, rate


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate; one that lies on the device (captured graphs) is changed in place."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
