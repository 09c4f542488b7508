"""Graphcore's IPUs by poptorch: archived. It never ran on hardware; its tests have a stand-in with poptorch's signatures.

A rank is a process of the host that has its model compiled for the IPUs and calls it. It computes nothing itself, but all that
is done when a call returns, so times are those of the host's clock, as on CPUs; poptorch tells how long transfers took.
"""

from __future__ import annotations

import functools
import gc
import importlib
import itertools
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from pytest_mlhpc.node.protocol.plan import RunPlan
from pytest_mlhpc.node.protocol.schema import Figure, RankReport
from pytest_mlhpc.node.telemetry import contention
from pytest_mlhpc.node.worker import distributed, environment, loop, prepare, reporting
from pytest_mlhpc.node.worker.accelerators.cpu import Cpu
from pytest_mlhpc.node.worker.base import Accelerator, Task
from pytest_mlhpc.node.worker.distributed import Group
from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.node.worker.loop import PROGRESS_NS, Batch, Trainer, resolve_losses


class Ipu(Cpu):
    """The IPUs of one rank, however many; tensors stay with the host until poptorch takes them."""

    type = "ipu"

    def __init__(self, local_rank: int, poptorch: Any) -> None:
        super().__init__(local_rank, f"Graphcore IPU Mk{poptorch.ipuHardwareVersion()}")
        self._version = str(getattr(poptorch, "__version__", ""))

    def peak_memory_bytes(self) -> Optional[int]:
        """Return None: what the host holds says nothing of the IPUs, whose memory is laid out when a model is compiled."""
        return None

    def environment(self) -> Mapping[str, str]:
        """Return poptorch's version, and which partition of IPUs the host was given."""
        found = {
            "poptorch": self._version,
            "ipu_partition": os.environ.get("IPUOF_VIPU_API_PARTITION_ID", ""),
            "poplar_engine_options": os.environ.get("POPLAR_ENGINE_OPTIONS", ""),
        }
        return {name: value for name, value in found.items() if value}


def load() -> Any:
    """Return the module ``poptorch``.

    Raises:
        WorkerFailure: ``wrong_device``, it is not here.
    """
    try:
        return importlib.import_module("poptorch")
    except (ImportError, AssertionError, OSError) as error:  # AssertionError: made for another torch
        text = (
            f"cannot import poptorch beside torch {torch.__version__}: {error}. It comes with the Poplar SDK, is in no "
            "package registry and wants the one torch that it was made for: use an image of Graphcore's, or source the "
            "SDK's enable scripts before python starts"
        )
        raise WorkerFailure("wrong_device", text) from error


def open_device(local_rank: int) -> Ipu:
    """Return this rank's IPUs.

    Raises:
        WorkerFailure: ``wrong_device``, there is no poptorch here, or it finds no IPU.
    """
    poptorch = load()
    if not poptorch.ipuHardwareIsAvailable():
        text = (
            "poptorch finds no IPU; check that the job asked for some, that IPUOF_VIPU_API_PARTITION_ID names the "
            "partition, and what gc-info -l says"
        )
        raise WorkerFailure("wrong_device", text)
    return Ipu(local_rank, poptorch)


@dataclass(frozen=True)
class IpuSettings:
    """What a run's fields say, with defaults filled in; see ``node/worker/workloads/fields/compiled_devices.py``."""

    device_iterations: int = 1
    ipus_per_replica: int = 1
    replicas: int = 1
    accumulate: int = 1
    execution: str = "pipelined"
    partials: Optional[str] = None
    io_tiles: Optional[int] = None
    synthetic: bool = False  #: the IPUs make random input themselves, and the host sends none

    @classmethod
    def of(cls, parameters: Mapping[str, Any], data_source: str) -> IpuSettings:
        """Read a run's parameters. ``data="device"``, the run without input, is synthetic data on IPUs."""
        return cls(
            device_iterations=int(parameters.get("device_iterations") or 1),
            ipus_per_replica=int(parameters.get("ipus_per_replica") or 1),
            replicas=int(parameters.get("ipu_replicas") or 1),
            accumulate=int(parameters.get("gradient_accumulation") or 1),
            execution=str(parameters.get("ipu_execution") or "pipelined"),
            partials=parameters.get("ipu_partials"),
            io_tiles=parameters.get("ipu_io_tiles"),
            synthetic=data_source == "device",
        )

    @property
    def micro_batches(self) -> int:
        """Return how many micro-batches one call of the compiled model takes from this rank."""
        return self.device_iterations * self.replicas * self.accumulate


def make(poptorch: Any, settings: IpuSettings, *, seed: int, world: int, cache: Optional[Path]) -> Any:
    """Return a ``poptorch.Options`` for one of *world* ranks.

    Every micro-batch's loss is returned: poptorch's own default for training is the last one's alone. *cache* is where compiled
    programs lie, so that of several ranks one compiles; None: as the environment says (``POPTORCH_CACHE_DIR``).

    Raises:
        WorkerFailure: ``worker_exit``, the launcher gave this rank another number of replicas than it has to drive;
            ``import_failed``, several ranks without popdist.
    """
    options = _own(poptorch, settings) if world == 1 else _of_several(settings)
    options.deviceIterations(settings.device_iterations)
    options.Training.gradientAccumulation(settings.accumulate)
    options.outputMode(poptorch.OutputMode.All)
    options.randomSeed(seed)
    options.showCompilationProgressBar(False)
    if settings.partials is not None:
        options.Precision.setPartialsType({"float": torch.float, "half": torch.half}[settings.partials])
    if settings.io_tiles is not None:
        options.TensorLocations.numIOTiles(settings.io_tiles)
    if settings.ipus_per_replica > 1:
        # Blocks are numbered as they come: a model may come back to an IPU (weights that its ends share).
        stages = poptorch.AutoStage.AutoIncrement
        kind = poptorch.ShardedExecution if settings.execution == "sharded" else poptorch.PipelinedExecution
        options.setExecutionStrategy(kind(stages))
    if cache is not None:
        options.enableExecutableCaching(str(cache))
    if settings.synthetic:
        options.enableSyntheticData(True)
    return options


def _own(poptorch: Any, settings: IpuSettings) -> Any:
    options = poptorch.Options()
    options.replicationFactor(settings.replicas)
    return options


def _of_several(settings: IpuSettings) -> Any:
    """Return the options that PopRun's library makes: it knows how many replicas are this rank's."""
    try:
        popdist: Any = importlib.import_module("popdist")
        module: Any = importlib.import_module("popdist.poptorch")
    except ImportError as error:
        text = f"several ranks on IPUs need popdist, which comes with the Poplar SDK: {error}"
        raise WorkerFailure("import_failed", text) from error
    replicas = int(popdist.getNumLocalReplicas())
    if replicas != settings.replicas:
        text = f"poprun gave this rank {replicas} replicas, ipu_replicas is {settings.replicas}; use launcher poprun"
        raise WorkerFailure("worker_exit", text)
    return module.Options(ipus_per_replica=settings.ipus_per_replica)


#: Workload -> parts of its model in the order in which they run. A block may begin at each module of a sequence or list.
ORDER: Mapping[str, Tuple[str, ...]] = {
    "cosmoflow": ("features", "head"),
    "deepcam": ("entry", "encoder", "pyramid", "upsample", "low_level", "decoder"),
    "resnet50": ("stem", "stages", "head"),
    "language_model": ("embedding", "positions", "blocks", "norm", "head"),
}


@dataclass(frozen=True)
class Begin:
    """From the module *name* on, in the order of running, the model is computed on this IPU of its replica."""

    name: str
    ipu: int


def units(model: nn.Module, workload: str) -> List[str]:
    """Return the names of modules at which a block may begin, in the order in which they run.

    Raises:
        WorkerFailure: ``not_supported``, it is not known in which order this workload's model runs.
    """
    if workload not in ORDER:
        text = f"ipus_per_replica: only {', '.join(ORDER)} can be spread over several IPUs, not {workload}"
        raise WorkerFailure("not_supported", text)
    found: List[str] = []
    for name in ORDER[workload]:
        part = getattr(model, name)
        if isinstance(part, (nn.Sequential, nn.ModuleList)):
            found += [f"{name}.{child}" for child, _ in part.named_children()]
        elif part is not None:
            found.append(name)
    return found


def tied(model: nn.Module) -> Tuple[str, str]:
    """Return the names of the two modules that share their weights, first and last of the model, or two empty names."""
    head, embedding = getattr(model, "head", None), getattr(model, "embedding", None)
    if not isinstance(head, nn.Linear) or not isinstance(embedding, nn.Embedding):
        return "", ""
    return ("embedding", "head") if head.weight is embedding.weight else ("", "")


def begins(
    names: Sequence[str], operations: Mapping[str, int], ipus: int, shared: Tuple[str, str] = ("", "")
) -> Tuple[Begin, ...]:
    """Return where each IPU but the first begins; what comes before the first of them runs on IPU 0.

    Args:
        names: units in the order of running.
        operations: of layers, by their full names.
        ipus: over which the units are spread, each gets at least one.
        shared: first and last unit, where they have the same weights, which can lie on one IPU only: the last comes back
            to IPU 0.

    Raises:
        WorkerFailure: ``not_supported``, there are fewer units than IPUs.
    """
    costs = [_cost(name, operations) for name in names]
    chosen = list(names)
    if shared[1] and ipus > 1:
        costs[chosen.index(shared[0])] += costs.pop(chosen.index(shared[1]))
        chosen.remove(shared[1])
    if len(chosen) < ipus:
        text = f"ipus_per_replica={ipus}: the model has {len(chosen)} parts that can be on IPUs of their own"
        raise WorkerFailure("not_supported", text)
    found = [Begin(chosen[first], ipu) for ipu, first in enumerate(balance(costs, ipus)) if ipu]
    if found and shared[1]:
        found.append(Begin(shared[1], 0))
    return tuple(found)


def _cost(unit: str, operations: Mapping[str, int]) -> int:
    return sum(done for name, done in operations.items() if name == unit or name.startswith(f"{unit}."))


def balance(costs: Sequence[int], parts: int) -> List[int]:
    """Cut *costs* into consecutive *parts*, none empty, of which the dearest is as cheap as can be; the first index of each.

    Needs at least as many costs as parts. The work is parts x len(costs) ** 2, for at most a hundred costs.
    """
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    count = len(costs)
    # best[n] of k parts: the dearest part where the first n costs are shared best, and where the last part begins.
    best: List[Tuple[int, int]] = [(sums[end], 0) for end in range(count + 1)]
    history = [best]
    for part in range(1, parts):
        row: List[Tuple[int, int]] = [(0, 0)] * (count + 1)
        for end in range(part + 1, count + 1):
            row[end] = min(
                (max(best[start][0], sums[end] - sums[start]), start) for start in range(part, end)
            )
        best = row
        history.append(row)
    firsts: List[int] = []
    end = count
    for row in reversed(history):
        firsts.append(row[end][1])
        end = row[end][1]
    return firsts[::-1]


def apply(poptorch: Any, model: nn.Module, plan: Sequence[Begin]) -> None:
    """Let blocks of *model* begin as *plan* says. poptorch may give back another module, which takes the old one's place."""
    for number, begin in enumerate(plan, 1):
        parent, _, child = begin.name.rpartition(".")
        owner = model.get_submodule(parent)
        block = poptorch.BeginBlock(
            model.get_submodule(begin.name), user_id=f"block{number}", ipu_id=begin.ipu
        )
        setattr(owner, child, block)


def place_blocks(poptorch: Any, model: nn.Module, task: Task, ipus: int) -> None:
    """Spread the blocks of *model* over *ipus*, so that the one with the most operations has as few as can be.

    Raises:
        WorkerFailure: ``not_supported``, the model cannot be spread, or not over so many.
    """
    plan = begins(units(model, task.name), reporting.by_layer(task), ipus, tied(model))
    apply(poptorch, model, plan)


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
    settings = IpuSettings.of(run.parameters, run.data_source)
    sizes = shares(run, settings, group.world)
    seed = int(run.parameters.get("seed") or 0)
    cache = environment.of_run(directory) / f"ipu-{run.run_id}" if group.world > 1 else None
    chosen = make(poptorch, settings, seed=seed + group.rank, world=group.world, cache=cache)
    torch.manual_seed(seed)
    task = prepare.load_task(run)
    cost = reporting.cost(run, task, accelerator)
    network = task.model().train()
    trainer = Trainer(task, network, task.optimizer(network), accelerator)
    if settings.ipus_per_replica > 1:
        place_blocks(poptorch, network, task, settings.ipus_per_replica)
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


def shares(run: RunPlan, settings: IpuSettings, world: int) -> prepare.Batches:
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
