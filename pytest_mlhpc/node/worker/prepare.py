"""From a run's plan to a task, a trainer, an open source of data, and batches from it."""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from pytest_mlhpc.node.processes import die_with_parent
from pytest_mlhpc.node.protocol.plan import SLOW_RANK, SLOW_STEPS, PlantedFault, RunPlan
from pytest_mlhpc.node.worker import distributed
from pytest_mlhpc.node.worker.accelerators import cpu, gpu
from pytest_mlhpc.node.worker.base import Accelerator, Task
from pytest_mlhpc.node.worker.distributed import Group
from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.node.worker.loop import Batch, Trainer, autocast, grad_scaler

#: Batches that each loader process prepares ahead. Two is torch's own default: one being taken, one being made.
PREFETCH = 2

#: Distinct batches that the no-I/O twin holds on the device: enough that caches see different addresses.
DEVICE_BATCHES = 2


@dataclass(frozen=True)
class Shape:
    """How one rank reads: samples of a micro-batch, loader processes, whether pinned memory is of use."""

    batch: int
    workers: int
    pin: bool


def choose_workers(asked: Optional[int], data_source: str, cores: int, device_type: str) -> int:
    """Return how many loader processes one rank gets.

    Memory and device data need none. For files: beside an accelerator all cores but one, at most eight; where the cores
    compute as well, a quarter of them, at least two (readers mostly wait), at most eight; one if there is but one core.
    """
    if asked is not None:
        return asked
    if data_source != "files":
        return 0
    if cores <= 1:
        return 1
    return max(1, min(8, cores - 1)) if device_type != "cpu" else max(2, min(8, cores // 4))


def batches_of(dataset: Dataset[Any], sampler: Sampler[int], shape: Shape) -> Iterator[Batch]:
    """Return an iterator over host batches. It ends when the sampler does; an incomplete last batch is dropped."""
    return iter(loader_of(dataset, sampler, shape))


def loader_of(
    dataset: Dataset[Any], sampler: Sampler[int], shape: Shape, *, whole: bool = True
) -> DataLoader[Any]:
    """Return what gives host batches, once for each iteration; not only *whole* ones, if an incomplete last one counts too.

    Its processes last from the first iteration to its end.
    """
    options: Any = {}
    if shape.workers:
        options = {
            "prefetch_factor": PREFETCH,
            "persistent_workers": True,
            "worker_init_fn": functools.partial(_end_with_rank, os.getpid()),
        }
    in_place = shape.pin and not shape.workers
    return DataLoader(
        dataset,
        batch_size=shape.batch,
        sampler=sampler,
        num_workers=shape.workers,
        collate_fn=functools.partial(collate_in_place, pin=True) if in_place else collate,
        pin_memory=shape.pin and not in_place,
        drop_last=whole,
        **options,
    )


def device_batches(
    dataset: Any, sampler: Sampler[int], batch: int, accelerator: Accelerator
) -> Iterator[Batch]:
    """Return an endless iterator over batches that lie on the device already."""
    indices = list(itertools.islice(iter(sampler), batch * DEVICE_BATCHES))
    batches: List[Batch] = []
    for start in range(0, len(indices) - batch + 1, batch):
        inputs, targets, _ = collate([dataset[index] for index in indices[start : start + batch]])
        batches.append((inputs.to(accelerator.device), targets.to(accelerator.device), 0.0))
    accelerator.synchronize()
    return itertools.cycle(batches)


def collate(samples: Sequence[Tuple[Tensor, Tensor, float]]) -> Batch:
    """Make one batch of samples; seconds of reading add up.

    torch's own function writes straight into shared memory when it runs in a loader process.
    """
    inputs, targets, read_s = zip(*samples)
    stack = torch.utils.data.default_collate
    return stack(list(inputs)), stack(list(targets)), float(sum(read_s))


def collate_in_place(samples: Sequence[Tuple[Tensor, Tensor, float]], *, pin: bool) -> Batch:
    """Make one batch in this process, written once: torch would make it first and then copy it to pinned memory.

    For samples of tens of megabytes those two passes take longer than the training step that they should hide behind.
    torch keeps pinned memory until copies from it are done, and hands it out again then.
    """
    inputs, targets, read_s = zip(*samples)
    return _stacked(inputs, pin), _stacked(targets, pin), float(sum(read_s))


def _stacked(tensors: Sequence[Tensor], pin: bool) -> Tensor:
    first = tensors[0]
    whole = torch.empty((len(tensors), *first.shape), dtype=first.dtype, pin_memory=pin)
    return torch.stack(list(tensors), out=whole)


def _end_with_rank(rank: int, _worker: int) -> None:
    die_with_parent(rank)


@dataclass(frozen=True)
class Batches:
    """Samples of one micro-batch, and how many of them make a step on all ranks."""

    micro: int
    accumulate: int
    step_samples: int


@dataclass(frozen=True)
class OpenData:
    """An open source, the iterator over its batches, and what starting that (loader processes) took."""

    source: Any  #: node/worker/data/source.py
    batches: Iterator[Batch]
    start_s: float


@dataclass(frozen=True)
class Draw:
    """A choice of samples: from a set of that ``seed``, with ``extra`` samples beside those that the steps need.

    ``sampler(length of the set, rank, ranks)`` gives a rank's endless order.
    """

    seed: int
    extra: int
    sampler: Callable[[int, int, int], Any]


def split_batch(run: RunPlan, world: int) -> Batches:
    """Share the global batch among ranks and micro-batches.

    Raises:
        WorkerFailure: it cannot be shared evenly, so that ranks would do unequal work.
    """
    accumulate = int(run.parameters.get("gradient_accumulation") or 1)
    step_samples = int(run.parameters.get("global_batch") or _device_batch(run) * world)
    micro, rest = divmod(step_samples, world * accumulate)
    if rest or not micro:
        text = f"global_batch={step_samples} is not divisible by {world} ranks x gradient_accumulation={accumulate}"
        raise WorkerFailure("worker_exit", text)
    return Batches(micro, accumulate, step_samples)


def _device_batch(run: RunPlan) -> int:
    from pytest_mlhpc.node.worker.workloads.catalogue import WORKLOADS

    accumulate = int(run.parameters.get("gradient_accumulation") or 1)
    found = next((workload.device_batch for workload in WORKLOADS if workload.name == run.workload), 1)
    return max(found, accumulate)


def load_module(run: RunPlan) -> Any:
    """Return the module of the workload, which has ``task(parameters)``, or ``probe(place)`` for what is no training.

    ``MLHPC_WORKLOAD_MODULE`` in the run's variables (not in the shell) names the module of a workload that is not our own.

    Raises:
        WorkerFailure: ``import_failed``, there is no such module here.
    """
    from pytest_mlhpc.node.worker.workloads.catalogue import WORKLOADS

    modules = {workload.name: workload.module for workload in WORKLOADS}
    name = modules.get(run.workload) or run.variables.get("MLHPC_WORKLOAD_MODULE", "")
    if not name:
        raise WorkerFailure("import_failed", f"this payload knows no workload {run.workload!r}")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise WorkerFailure("import_failed", f"workload {run.workload!r} needs {name}: {error}") from error


def load_task(run: RunPlan) -> Task:
    """Build the task by the ``task(parameters)`` of the workload's module.

    Raises:
        WorkerFailure: ``import_failed``, there is no such module here.
    """
    task: Task = load_module(run).task(run.parameters)
    return task


def build(run: RunPlan, task: Task, group: Group, accelerator: Accelerator, accumulate: int) -> Trainer:
    """Put model and optimizer on the device, wrapped for the group, to compute as the run's fields say.

    Raises:
        WorkerFailure: ``wrong_device`` or ``not_supported``, device or torch cannot compute so.
    """
    precision = str(run.parameters.get("precision") or "fp32")
    require_precision(precision, accelerator)
    choose_arithmetic(precision)
    captured = gpu.captured_step(run.parameters, accelerator, group.world)
    model = distributed.place(task.model(), group, accelerator, run.parameters).train()
    wrapped = gpu.on_side_stream(
        accelerator,
        lambda: distributed.wrap(model, group, accelerator, run.parameters),
        wanted=captured is not None,
    )
    if run.parameters.get("compile"):
        cpu.compile_model(wrapped, str(run.parameters["compile"]), accelerator)
    return Trainer(
        task=task,
        model=wrapped,
        optimizer=task.optimizer(model),
        accelerator=accelerator,
        precision=precision,
        accumulate=accumulate,
        scaler=grad_scaler(accelerator.device.type, precision, run.parameters.get("loss_scale")),
        captured=captured,
        fault=planted(run.fault, group),
    )


def planted(fault: Optional[PlantedFault], group: Group) -> Optional[PlantedFault]:
    """Return what slows down this rank in a drill: a slow rank, the last one, computes longer."""
    if fault is None or fault.kind != SLOW_RANK:
        return fault
    return replace(fault, kind=SLOW_STEPS) if group.rank == group.world - 1 else None


def require_precision(precision: str, accelerator: Accelerator) -> None:
    """Refuse a precision in which this device would not compute, though the record would say that it did.

    Raises:
        WorkerFailure: ``wrong_device``. TF32 needs a CUDA device of compute capability 8.0 (NVIDIA A100) or newer; fp16
            and bf16 need an autocast that takes them, which torch 1.13's for CPUs does not for fp16: it only warns.
    """
    kind = accelerator.device.type
    if precision == "tf32":
        if (
            kind != "cuda"
            or torch.version.cuda is None
            or torch.cuda.get_device_capability(accelerator.device) < (8, 0)
        ):
            raise WorkerFailure(
                "wrong_device", f"precision=tf32: {accelerator.model} does not compute in TF32"
            )
    elif precision in {"bf16", "fp16"} and kind == "cpu":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what it would warn of is raised below
            with autocast(kind, precision):
                enabled = _autocast_on_cpu()
        if not enabled:
            text = f"precision={precision}: torch {torch.__version__} does not compute in it on a CPU"
            raise WorkerFailure("wrong_device", text)


def _autocast_on_cpu() -> bool:
    try:
        return bool(torch.is_autocast_enabled("cpu"))  # since torch 2.4
    except TypeError:
        return bool(torch.is_autocast_cpu_enabled())


def choose_arithmetic(precision: str) -> None:
    """Let fp32 mean IEEE fp32 on GPUs too (torch runs convolutions in TF32 by default), and tune kernels."""
    tf32 = precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = True  # shapes never change here; warm-up pays for the search


def goes_first(group: Group, environ: Mapping[str, str]) -> bool:
    """Return whether this rank makes what the others on the same disk find: ``MLHPC_OWN_DISK`` says that each node has its own."""
    return group.local_rank == 0 if environ.get("MLHPC_OWN_DISK") == "1" else group.rank == 0


def open_data(
    run: RunPlan,
    trainer: Trainer,
    group: Group,
    sizes: Batches,
    directory: Path,
    *,
    draw: Optional[Draw] = None,
) -> OpenData:
    """Open the run's data for this rank, all of it or what *draw* says.

    Rank 0 goes first, because it may have to write a synthetic set; where nodes share no disk, the first rank of each. Then
    all wait for all, because opening brings the page cache into the asked state.
    """
    from pytest_mlhpc.node.worker.data.source import ShardedSampler, open_source

    task, accelerator = trainer.task, trainer.accelerator
    on_device = run.data_source == "device"
    count = sizes.step_samples * (DEVICE_BATCHES if on_device else run.steps + run.warmup_steps)
    seed = int(run.parameters.get("seed") or 0) if draw is None else draw.seed
    count += 0 if draw is None else draw.extra
    first = goes_first(group, os.environ)
    if not first:
        distributed.barrier(group, accelerator)
    again = sizes.step_samples if draw is None else None
    source = open_source(run, task, count=count, seed=seed, directory=str(directory), again=again)
    if first:
        distributed.barrier(group, accelerator)
    distributed.barrier(group, accelerator)
    length = len(source.dataset)
    if length < group.world:
        raise WorkerFailure("data_exhausted", f"{length} samples cannot be shared by {group.world} ranks")
    if draw is None:
        repeat = source.again or run.data_source != "files"
        sampler: Any = ShardedSampler(length, group.rank, group.world, seed, repeat=repeat)
    else:
        sampler = draw.sampler(length, group.rank, group.world)
    start_ns = time.perf_counter_ns()
    if on_device:
        batches = device_batches(source.dataset, sampler, sizes.micro, accelerator)
    else:
        asked = run.parameters.get("loader_workers")
        workers = choose_workers(asked, run.data_source, run.cores_per_rank, accelerator.type)
        shape = Shape(sizes.micro, workers, pin=accelerator.asynchronous)
        batches = batches_of(source.dataset, sampler, shape)
    return OpenData(source, batches, (time.perf_counter_ns() - start_ns) / 1e9)
