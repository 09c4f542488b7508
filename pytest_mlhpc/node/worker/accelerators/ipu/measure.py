"""PAYLOAD. What one rank on IPUs does: have its model compiled, warm up, measure calls of it, report.

One call of the compiled model does ``device_iterations`` steps: forward, backward and update are one program on the IPUs, and
have no times of their own. A step's time is its share of its call. What of a call is input and output is told by
poptorch's latencies: the share that transfers from and to the host have in a round trip.
"""

from __future__ import annotations

import functools
import gc
import importlib
import itertools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, List

import torch
from torch import Tensor, nn

from pytest_mlhpc.node.protocol.plan import RunPlan
from pytest_mlhpc.node.protocol.schema import RankReport
from pytest_mlhpc.node.telemetry import contention
from pytest_mlhpc.node.worker import distributed, prepare, reporting, scratch, timing
from pytest_mlhpc.node.worker.accelerators.base import Accelerator
from pytest_mlhpc.node.worker.accelerators.ipu import options, pipeline
from pytest_mlhpc.node.worker.accelerators.ipu.calls import (
    Call,
    Compiled,
    figures,
    losses_of,
    next_batch,
    step_times,
    stored,
    train,
)
from pytest_mlhpc.node.worker.distributed import Group
from pytest_mlhpc.node.worker.failure import WorkerFailure
from pytest_mlhpc.node.worker.loop import Batch, Trainer
from pytest_mlhpc.node.worker.workloads.base import Task


class WithLoss(nn.Module):
    """A model with its task's preparation and loss: what poptorch wants of a model that is trained."""

    def __init__(self, network: nn.Module, task: Task, mark: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.network = network
        self._task, self._mark = task, mark

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of one micro-batch of stored samples, a scalar."""
        ready, wanted = self._task.prepare(inputs, targets)
        return self._mark(self._task.loss(self.network(ready), wanted))


def measure(
    run: RunPlan, group: Group, accelerator: Accelerator, directory: Path, progress: Callable[..., None]
) -> RankReport:
    """Train the run's steps on this rank's IPUs and return what was measured.

    Raises:
        WorkerFailure: the run is broken; the name says how.
    """
    poptorch: Any = importlib.import_module("poptorch")
    settings = options.Settings.of(run.parameters, run.data_source)
    sizes = shares(run, settings, group.world)
    seed = int(run.parameters.get("seed") or 0)
    cache = scratch.of_run(directory) / f"ipu-{run.run_id}" if group.world > 1 else None
    chosen = options.make(poptorch, settings, seed=seed + group.rank, world=group.world, cache=cache)
    torch.manual_seed(seed)
    task = prepare.load_task(run)
    cost = reporting.cost(run, task, accelerator)
    network = task.model().train()
    trainer = Trainer(task, network, task.optimizer(network), accelerator)
    if settings.ipus_per_replica > 1:
        pipeline.spread(poptorch, network, task, settings.ipus_per_replica)
    torch.manual_seed(seed + group.rank)  # as without IPUs: what is drawn on the host differs between ranks
    before = reporting.calibrated(run, group, accelerator)
    data = prepare.open_data(run, trainer, group, sizes, directory)
    asked_ns = time.perf_counter_ns()
    first = next_batch(data.batches, 0)
    first_s = (time.perf_counter_ns() - asked_ns) / 1e9
    compiled = _compile(poptorch, with_loss(poptorch, network, task), chosen, trainer, first)
    batches = itertools.chain([first], data.batches)
    warm_ns = time.perf_counter_ns()
    warm = train(compiled, batches, run.warmup_steps, lambda _step, _samples: None)
    warm_s = (time.perf_counter_ns() - warm_ns) / 1e9
    meet = functools.partial(distributed.barrier, group, accelerator)
    window = _window(run, compiled, batches, meet, progress)
    after = reporting.calibrated(run, group, accelerator)
    compiled.model.destroy()
    calls = window.calls
    return RankReport(
        **reporting.who(run, group, accelerator),
        **cost,
        environment=reporting.surroundings(run, group, accelerator),
        steps=len(calls) * compiled.iterations,
        samples=sum(call.samples for call in calls),
        started_ns=window.started_ns,
        ended_ns=window.ended_ns,
        epoch_s=window.epoch_s,
        wait_s=sum(call.wait_s for call in calls),
        copy_s=sum(call.copy_s for call in calls),
        warmup_s=compiled.seconds + warm_s,
        step_times_s=step_times(window.start_ns, calls, compiled.iterations),
        losses=(*losses_of(warm), *losses_of(calls, run.warmup_steps)),
        read_s=None if run.data_source == "device" else sum(call.read_s for call in calls),
        calibration_before=before,
        calibration_after=after,
        data_kind=data.source.kind,
        cache=data.source.cache,
        contention=window.contention,
        loader_start_s=data.start_s + first_s,
        figures=figures(compiled, calls, settings),
    )


def shares(run: RunPlan, settings: options.Settings, world: int) -> prepare.Batches:
    """Return what one call takes from a rank as its batch, and the samples of one step on all ranks.

    Raises:
        WorkerFailure: ``worker_exit``, batch or steps cannot be shared evenly.
    """
    sizes = prepare.split_batch(run, world)
    micro, rest = divmod(sizes.micro, settings.replicas)
    iterations = settings.device_iterations
    if rest or not micro:
        text = f"{sizes.micro} samples of a micro-batch do not divide over ipu_replicas={settings.replicas}"
        raise WorkerFailure("worker_exit", text)
    if run.steps % iterations or run.warmup_steps % iterations:
        text = (
            f"{run.warmup_steps} steps of warm-up and {run.steps} timed ones are no multiples of "
            f"device_iterations={iterations}"
        )
        raise WorkerFailure("worker_exit", text)
    # The no-I/O twin holds a few whole batches, which then are those of calls.
    held = iterations if run.data_source == "device" else 1
    return prepare.Batches(micro * settings.micro_batches, 1, sizes.step_samples * held)


def with_loss(poptorch: Any, network: nn.Module, task: Task) -> WithLoss:
    """Return what poptorch trains. It is told which tensor is the loss: one that is put together is not found by itself."""

    def mark(loss: Tensor) -> Tensor:
        marked: Tensor = poptorch.identity_loss(loss, reduction="none")
        return marked

    return WithLoss(network, task, mark)


def _compile(poptorch: Any, model: WithLoss, chosen: Any, trainer: Trainer, batch: Batch) -> Compiled:
    executor = poptorch.trainingModel(model, options=chosen, optimizer=trainer.optimizer)
    started = time.perf_counter_ns()
    executor.compile(*stored(batch))
    seconds = (time.perf_counter_ns() - started) / 1e9
    return Compiled(executor, int(chosen.device_iterations), seconds)


@dataclass(frozen=True)
class Window:
    """The timed window: its calls, and what the node did meanwhile."""

    calls: List[Call]
    start_ns: int
    started_ns: int
    ended_ns: int
    epoch_s: float
    contention: Any


def _window(
    run: RunPlan,
    compiled: Compiled,
    batches: Iterator[Batch],
    meet: Callable[[], None],
    progress: Callable[..., None],
) -> Window:
    def tell(step: int, samples: int) -> None:
        progress(step, run.steps, samples / ((time.perf_counter_ns() - start_ns) / 1e9))

    progress(0, run.steps, 0.0)
    gc.collect()
    gc.freeze()  # what exists now lives on: later collections need not walk it
    before = contention.snapshot()
    meet()
    started_ns, start_ns = time.time_ns(), time.perf_counter_ns()
    calls = train(compiled, batches, run.steps, tell)
    epoch_s = (time.perf_counter_ns() - start_ns) / 1e9
    ended_ns = time.time_ns()
    during = contention.difference(before, contention.snapshot())
    meet()
    gc.unfreeze()
    timing.check_wall(started_ns, ended_ns, epoch_s)
    return Window(calls, start_ns, started_ns, ended_ns, epoch_s, during)
