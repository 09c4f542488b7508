"""What one rank on IPUs does: have its model compiled, warm up, measure calls of it, report."""

from __future__ import annotations

import functools
import gc
import importlib
import itertools
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, List, Sequence, Tuple

import torch
from torch import Tensor, nn

from pytest_mlhpc.node.protocol.plan import RunPlan
from pytest_mlhpc.node.protocol.schema import Figure, RankReport
from pytest_mlhpc.node.telemetry import contention
from pytest_mlhpc.node.worker import distributed, environment, loop, prepare, reporting
from pytest_mlhpc.node.worker.accelerators.base import Accelerator
from pytest_mlhpc.node.worker.accelerators.ipu import options
from pytest_mlhpc.node.worker.accelerators.ipu.options import IpuSettings
from pytest_mlhpc.node.worker.distributed import Group
from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.node.worker.loop import PROGRESS_NS, Batch, Trainer, resolve_losses
from pytest_mlhpc.node.worker.workloads.base import Task

#: Types that the IPU's exchange lacks, and the one in which they travel (poptorch narrows 64 bits to 32 itself).
_TRAVELS = {torch.int16: torch.int32, torch.int64: torch.int32}

#: Methods of a compiled model, and the figures that they become.
_LATENCIES = (
    ("getLatency", "ipu_latency"),
    ("getHostIpuLatency", "host_ipu_latency"),
    ("getComputeLatency", "ipu_compute_latency"),
    ("getIpuHostLatency", "ipu_host_latency"),
)


@dataclass(frozen=True)
class Compiled:
    """A compiled model with its steps of one call, and the seconds that compiling took."""

    model: Any  #: poptorch.PoplarExecutor
    iterations: int
    seconds: float


@dataclass(frozen=True)
class Call:
    """One call: nanoseconds of the host's clock before the batch was asked for, when it was there, and when the call was over.

    ``latencies`` are seconds, means over the call's iterations, in the order of ``_LATENCIES``.
    """

    stamps: Tuple[int, int, int]
    latencies: Tuple[float, ...]
    losses: Tuple[Tensor, ...]  #: of each step
    samples: int
    read_s: float

    @property
    def seconds(self) -> float:
        """Return how long the call itself took."""
        return (self.stamps[2] - self.stamps[1]) / 1e9

    @property
    def wait_s(self) -> float:
        """Return how long the host waited for the batch."""
        return (self.stamps[1] - self.stamps[0]) / 1e9

    @property
    def copy_s(self) -> float:
        """Return the call's share that transfers have in a round trip; nothing where poptorch tells no latency."""
        whole, up, _, down = self.latencies
        return self.seconds * min(1.0, (up + down) / whole) if whole > 0 else 0.0


def stored(batch: Batch) -> Tuple[Tensor, Tensor]:
    """Return inputs and targets of a batch in types that can travel to an IPU."""
    inputs, targets = (tensor.to(_TRAVELS.get(tensor.dtype, tensor.dtype)) for tensor in batch[:2])
    return inputs, targets


def next_batch(batches: Iterator[Batch], done: int) -> Batch:
    """Return the next batch, of which *done* steps were made before.

    Raises:
        WorkerFailure: ``data_exhausted``.
    """
    batch = next(batches, None)
    if batch is None:
        text = (
            f"the loader ended after {done} steps of this rank; use more data, fewer steps or a smaller batch"
        )
        raise WorkerFailure("data_exhausted", text)
    return batch


def train(
    compiled: Compiled, batches: Iterator[Batch], steps: int, tell: Callable[[int, int], None]
) -> List[Call]:
    """Train *steps* steps. ``tell(steps done, samples done)`` is called at most once a second."""
    now, calls, reported_ns = time.perf_counter_ns, [], time.perf_counter_ns()
    samples = 0
    for done in range(0, steps, compiled.iterations):
        before = now()
        batch = next_batch(batches, done)
        there = now()
        output: Tensor = compiled.model(*stored(batch))
        over = now()
        latencies = tuple(float(getattr(compiled.model, name)()[2]) for name, _ in _LATENCIES)
        # All losses of a call: iterations are the outermost, micro-batches and replicas of each step within.
        losses = tuple(output.reshape(compiled.iterations, -1).float().mean(dim=1).unbind())
        calls.append(Call((before, there, over), latencies, losses, len(batch[0]), batch[2]))
        samples += len(batch[0])
        if over - reported_ns >= PROGRESS_NS:
            reported_ns = over
            tell(done + compiled.iterations, samples)
    return calls


def step_times(start_ns: int, calls: Sequence[Call], iterations: int) -> Tuple[float, ...]:
    """Return the seconds of each step: its share of the time from the end of the call before to the end of its own."""
    ends = [start_ns, *(call.stamps[2] for call in calls)]
    return tuple(
        (end - begin) / 1e9 / iterations for begin, end in zip(ends, ends[1:]) for _ in range(iterations)
    )


def losses_of(calls: Sequence[Call], first_step: int = 0) -> Tuple[float, ...]:
    """Return the loss of each step.

    Raises:
        WorkerFailure: ``loss_nan``.
    """
    return resolve_losses([loss for call in calls for loss in call.losses], first_step)


def figures(compiled: Compiled, calls: Sequence[Call], settings: IpuSettings) -> Tuple[Figure, ...]:
    """Return what compiling took, how many IPUs this rank had, and the median of each latency in the window."""
    ipus = settings.replicas * settings.ipus_per_replica
    found = [
        Figure("compile_time", compiled.seconds, "s", "lower"),
        Figure("ipus", float(ipus), "1", "none", over="sum"),
    ]
    for place, (_, name) in enumerate(_LATENCIES):
        reported_ns = [call.latencies[place] for call in calls]
        found.append(Figure(name, statistics.median(reported_ns), "s", "lower", samples=tuple(reported_ns)))
    return tuple(found)


class ModelWithLoss(nn.Module):
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
    settings = options.IpuSettings.of(run.parameters, run.data_source)
    sizes = shares(run, settings, group.world)
    seed = int(run.parameters.get("seed") or 0)
    cache = environment.of_run(directory) / f"ipu-{run.run_id}" if group.world > 1 else None
    chosen = options.make(poptorch, settings, seed=seed + group.rank, world=group.world, cache=cache)
    torch.manual_seed(seed)
    task = prepare.load_task(run)
    cost = reporting.cost(run, task, accelerator)
    network = task.model().train()
    trainer = Trainer(task, network, task.optimizer(network), accelerator)
    if settings.ipus_per_replica > 1:
        options.place_blocks(poptorch, network, task, settings.ipus_per_replica)
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


def shares(run: RunPlan, settings: options.IpuSettings, world: int) -> prepare.Batches:
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
    repeats = iterations if run.data_source == "device" else 1
    return prepare.Batches(micro * settings.micro_batches, 1, sizes.step_samples * repeats)


def with_loss(poptorch: Any, network: nn.Module, task: Task) -> ModelWithLoss:
    """Return what poptorch trains. It receives which tensor is the loss: one that is put together is not found by itself."""

    def mark(loss: Tensor) -> Tensor:
        marked: Tensor = poptorch.identity_loss(loss, reduction="none")
        return marked

    return ModelWithLoss(network, task, mark)


def _compile(poptorch: Any, model: ModelWithLoss, chosen: Any, trainer: Trainer, batch: Batch) -> Compiled:
    executor = poptorch.trainingModel(model, options=chosen, optimizer=trainer.optimizer)
    started = time.perf_counter_ns()
    executor.compile(*stored(batch))
    seconds = (time.perf_counter_ns() - started) / 1e9
    return Compiled(executor, int(chosen.device_iterations), seconds)


@dataclass(frozen=True)
class IpuWindow:
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
) -> IpuWindow:
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
    loop.check_wall(started_ns, ended_ns, epoch_s)
    return IpuWindow(calls, start_ns, started_ns, ended_ns, epoch_s, during)
