"""Training until a quality is reached: training epochs and evaluations in turn."""

from __future__ import annotations

import functools
import math
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Sampler

from pytest_mlhpc.node.worker import distributed, loop, prepare
from pytest_mlhpc.node.worker.data.source import ShardedSampler
from pytest_mlhpc.node.worker.distributed import Group
from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.node.worker.loop import AHEAD, Batch, Trainer, autocast, resolve_losses, run_steps
from pytest_mlhpc.node.worker.quality import datasets
from pytest_mlhpc.node.worker.quality.datasets import StagedSplits
from pytest_mlhpc.node.worker.quality.rules import (
    DEPARTURE,
    Logbook,
    QualitySettings,
    Schedule,
    departures,
    hyperparameters,
    schedule_of,
)
from pytest_mlhpc.node.worker.quality.staging import RankNode, gathered
from pytest_mlhpc.node.worker.reporting import Progress
from pytest_mlhpc.node.worker.workloads.fields.parallel import batch_norm_ranks

#: Steps of a run whose own times and losses are recorded; of a longer run they are spread evenly over it.
MOST_STEPS = 4096


@dataclass
class TimeSpent:
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

    def add(self, times: loop.WindowTimes, recorder: loop.Recorder, epoch_s: float, start_s: float) -> None:
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
    spent: TimeSpent,
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
    accelerator, recorder = trainer.accelerator, loop.Recorder()
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
    spent.add(loop.resolve(recorder, accelerator, trainer.accumulate), recorder, epoch_s, start_s)


def _tell(
    progress: Callable[[int, float], None], recorder: loop.Recorder, before: int, step: int, samples: int
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


#: ``metric(outputs, targets) -> (N,)``: the quality of each sample; that of a set is the mean.
Metric = Callable[[Tensor, Tensor], Tensor]


def absolute_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """CosmoFlow: mean absolute error of the four parameters (mlcommons/hpc, ``cosmoflow/train.py``)."""
    return (outputs.float() - targets).abs().flatten(1).mean(dim=1)


def intersection_over_union(outputs: Tensor, labels: Tensor) -> Tensor:
    """DeepCAM: mean over classes (mlcommons/hpc, ``deepcam/src/deepCam/utils/metric.py``)."""
    from pytest_mlhpc.node.worker.workloads.deepcam import mean_iou

    pairs = zip(torch.split(outputs, 1), torch.split(labels, 1))
    return torch.stack([mean_iou(scores, truth) for scores, truth in pairs])


def top_1(outputs: Tensor, labels: Tensor) -> Tensor:
    """ResNet-50: 1 where the highest score is the right class's."""
    return (outputs.argmax(dim=1) == labels).float()


def log_perplexity(outputs: Tensor, tokens: Tensor) -> Tensor:
    """Language model: mean negative logarithm of the right token's probability."""
    losses = functional.cross_entropy(outputs.flatten(0, 1).float(), tokens.flatten(), reduction="none")
    return losses.view(len(tokens), -1).mean(dim=1)


#: Workload -> what measures it.
METRICS: Mapping[str, Metric] = {
    "cosmoflow": absolute_error,
    "deepcam": intersection_over_union,
    "resnet50": top_1,
    "language_model": log_perplexity,
}


class InOrder(Sampler[int]):
    """The same indices every time. They are padded to *length* with the first one, so that ranks do equally many batches."""

    def __init__(self, indices: Sequence[int], length: int) -> None:
        self.own = len(indices)
        self.indices = (*indices, *([indices[0]] * (length - len(indices))))

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[int]:
        """Yield them."""
        return iter(self.indices)


@dataclass(frozen=True)
class Evaluated:
    """The mean quality of all ranks' samples, and how many those were."""

    quality: float
    samples: int


def evaluate(trainer: Trainer, batches: Iterable[Batch], own: int, metric: Metric, group: Group) -> Evaluated:
    """Evaluate the first *own* samples of *batches*, and combine what all ranks found.

    Raises:
        WorkerFailure: ``loss_nan``, the model's answers are no numbers.
    """
    model = trainer.model
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module  # the wrapper would send buffers before each batch
    _have_one_model(model, group)
    model.eval()
    try:
        sums = _sums(trainer, model, batches, own, metric)
    finally:
        model.train()
    total = torch.stack(
        [torch.stack(sums).double().sum(), torch.tensor(float(own)).double().to(sums[0].device)]
    )
    if group.world > 1:
        dist.all_reduce(total)
    found, samples = total.tolist()
    quality = found / samples
    if not math.isfinite(quality):
        raise WorkerFailure(
            "loss_nan", f"the evaluation gives {quality}: look at precision, learning rate and data"
        )
    return Evaluated(quality, int(samples))


@torch.no_grad()
def _have_one_model(model: nn.Module, group: Group) -> None:
    """Give every rank the first one's buffers, as training does before each step.

    After its last step each rank has its own share of the batch in the statistics of its normalisations; the quality
    would be that of as many models.
    """
    if group.world > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)


@torch.no_grad()
def _sums(
    trainer: Trainer, model: nn.Module, batches: Iterable[Batch], own: int, metric: Metric
) -> List[Tensor]:
    accelerator = trainer.accelerator
    sums: List[Tensor] = []
    marks: List[Any] = []
    left = own
    for inputs, targets, _ in batches:
        if accelerator.asynchronous and len(marks) >= AHEAD:
            accelerator.wait(marks[-AHEAD])
        copied = accelerator.copy((inputs, targets))
        accelerator.await_copy(copied)
        with autocast(accelerator.device.type, trainer.precision):
            ready, wanted = trainer.task.prepare(copied.tensors[0], copied.tensors[1])
            found = metric(model(ready), wanted)
        counted = min(left, len(inputs))
        sums.append(found[:counted].float().sum())
        left -= counted
        if accelerator.asynchronous:
            marks.append(accelerator.mark())
    return sums


#: Evaluations that a failure's text shows: the last so many.
_SHOWN = 8


@dataclass(frozen=True)
class ReadPlan:
    """How ranks share the samples, and how many processes read them."""

    node: RankNode
    by_node: bool
    seed: int
    asked_workers: Optional[int]
    cores: int


@dataclass(frozen=True)
class EnsembleMember:
    """What differs in the training of a base model, which ends with its ensemble's quality (``node/worker/ensemble_process.py``).

    ``data_seed`` chooses the set of all base models. ``sampler(length of the set, rank, ranks, indices of an epoch)`` gives
    a rank's order. ``begin`` waits for the others before the clock starts. ``metric`` notes the predictions of each
    evaluation, of at most ``most_samples`` a rank. ``ask(own samples, last)`` gives the ensemble's quality, and whether
    training ends there.
    """

    data_seed: int
    sampler: Callable[[int, int, int, int], Sampler[int]]
    begin: Callable[[], None]
    metric: Metric
    most_samples: int
    ask: Callable[[int, bool], Tuple[float, bool]]


@dataclass(frozen=True)
class TrainingOutcome:
    """What was spent, the quality at each evaluation, their seconds, and the samples of one."""

    spent: TimeSpent
    curve: Tuple[float, ...]
    evaluations_s: Tuple[float, ...]
    evaluated: int


@dataclass(frozen=True)
class _Loaders:
    training: DataLoader[Any]
    steps: int
    evaluation: DataLoader[Any]
    own: int


@dataclass(frozen=True)
class QualityRun:
    """All that the course of one run needs; ``start`` is when its clock started (seconds of ``perf_counter``)."""

    settings: QualitySettings
    trainer: Trainer
    group: Group
    sizes: prepare.Batches
    metric: Metric
    log: Logbook
    reading: ReadPlan
    start: float
    workload: str
    member: Optional[EnsembleMember] = None

    def go(self, parameters: Mapping[str, Any], data: StagedSplits, progress: Progress) -> TrainingOutcome:
        """Train and evaluate until the target is reached.

        Raises:
            WorkerFailure: ``target_missed`` after all epochs or when the time is over; ``data_exhausted``, less data than a step.
        """
        settings, log = self.settings, self.log
        datasets.check_first(data.training, self.trainer.task)
        loaders = self._loaders(data)
        schedule = schedule_of(self.workload, parameters, self.sizes.step_samples)
        options = self.trainer.optimizer.param_groups[0]
        facts = hyperparameters(self.workload, options, schedule, loaders.steps, self.sizes.accumulate)
        if "batchnorm_group_size" in facts:
            facts["batchnorm_group_size"] = batch_norm_ranks(parameters, self.group.world)
        log.facts({"quality_target": settings.target.value, **facts})
        for text in departures(self.workload, schedule):
            log.note(DEPARTURE, text)
        spent, curve, seconds, evaluated = TimeSpent(), [], [], 0
        total = settings.max_epochs * loaders.steps
        for epoch in range(1, settings.max_epochs + 1):
            log.note("epoch_start", None, epoch_num=epoch)
            train_epoch(
                self.trainer, loaders.training, self.group, spent,
                schedule=schedule, steps=loaders.steps, progress=lambda step, rate: progress(step, total, rate),
            )  # fmt: skip
            log.note("epoch_stop", None, epoch_num=epoch)
            last = self._late(spent) or epoch == settings.max_epochs
            if epoch % settings.every and not last:
                continue
            start = time.perf_counter()
            quality, evaluated, last = self._evaluated(loaders, epoch, last=last)
            curve.append(quality)
            seconds.append(time.perf_counter() - start)
            if settings.target.reached(quality):
                return TrainingOutcome(spent, tuple(curve), tuple(seconds), evaluated)
            if last:
                break
        raise WorkerFailure("target_missed", self._missed(spent, curve))

    def _evaluated(self, loaders: _Loaders, epoch: int, *, last: bool) -> Tuple[float, int, bool]:
        """Return the quality (the ensemble's, for a base model), of how many samples, and whether training ends here."""
        self.log.note("eval_start", None, epoch_num=epoch)
        found = evaluate(self.trainer, loaders.evaluation, loaders.own, self.metric, self.group)
        quality = found.quality
        if self.member is not None:
            quality, last = self.member.ask(loaders.own, last)
        distributed.barrier(self.group, self.trainer.accelerator)
        self.log.note(self.settings.target.key, quality, epoch_num=epoch)
        self.log.note("eval_stop", None, epoch_num=epoch)
        return quality, found.samples, last

    def _late(self, spent: TimeSpent) -> bool:
        """Return whether another training epoch would end beyond the limit, by rank 0's clock."""
        end = time.perf_counter() - self.start + max(spent.epochs_s[-1:], default=0.0)
        return bool(gathered(self.group, end > self.settings.max_seconds)[0])

    def _missed(self, spent: TimeSpent, curve: List[float]) -> str:
        settings, epochs, elapsed = self.settings, len(spent.epochs_s), time.perf_counter() - self.start
        target = settings.target
        best = min(curve) if target.better == "lower" else max(curve)
        direction = "at most" if target.better == "lower" else "at least"
        last = ", ".join(f"{quality:.4g}" for quality in curve[-_SHOWN:])
        why = "max_epochs" if epochs >= settings.max_epochs else f"max_seconds={settings.max_seconds:g}"
        whose = "" if self.member is None else "the ensemble's "
        return (
            f"{whose}{target.key} is {curve[-1]:.4g} after {epochs} training epochs ({spent.steps} steps, {elapsed:.1f} s), the "
            f"target is {direction} {target.value:g}; the best was {best:.4g}, the last: {last}. Ended by {why}: allow "
            "more, or change learning_rate, schedule or global_batch"
        )

    def _loaders(self, data: StagedSplits) -> _Loaders:
        """Open both parts for this rank, each sample on one rank.

        Raises:
            WorkerFailure: ``data_exhausted``, a rank has not enough for one step, or none to evaluate.
        """
        group, reading, micro = self.group, self.reading, self.sizes.micro
        place, ranks = (
            (reading.node.place, reading.node.ranks) if reading.by_node else (group.rank, group.world)
        )
        trained = len(range(place, len(data.training), ranks))
        own = range(place, len(data.evaluation), ranks)
        gathered_counts = gathered(group, (trained, len(own), len(data.training), len(data.evaluation)))
        steps = min(one[0] for one in gathered_counts) // (micro * self.sizes.accumulate)
        whole = [sum(one[part] for one in gathered_counts) for part in (0, 1)]
        if not steps:
            text = f"{whole[0]} samples are less than one step of {self.sizes.step_samples} on {group.world} ranks"
            raise WorkerFailure("data_exhausted", f"{text}: use more data or a smaller global_batch")
        if not min(one[1] for one in gathered_counts):
            raise WorkerFailure(
                "data_exhausted",
                f"{whole[1]} samples to evaluate are not one for each of {group.world} ranks",
            )
        most = max(one[1] for one in gathered_counts)
        if self.member is not None and most > self.member.most_samples:
            text = f"a rank has no room for its predictions of {most} evaluation samples, but for {self.member.most_samples}"
            raise WorkerFailure("not_supported", f"{text}: use eval_samples, or more devices of a base model")
        self.log.facts({"train_samples": whole[0], "eval_samples": whole[1]})
        accelerator, task = self.trainer.accelerator, self.trainer.task
        workers = prepare.choose_workers(reading.asked_workers, "files", reading.cores, accelerator.type)
        shape = prepare.Shape(micro, workers, pin=accelerator.asynchronous)
        training: Sampler[int] = ShardedSampler(len(data.training), place, ranks, reading.seed)
        if self.member is not None:
            count = steps * micro * self.sizes.accumulate
            training = self.member.sampler(len(data.training), place, ranks, count)
        evaluation = InOrder(own, most)
        return _Loaders(
            prepare.loader_of(data.training.dataset(task), training, shape),
            steps,
            prepare.loader_of(data.evaluation.dataset(task), evaluation, shape, whole=False),
            len(own),
        )
