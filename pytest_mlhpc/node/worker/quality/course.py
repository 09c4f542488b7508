"""PAYLOAD. The course of a run to a quality target: training epochs and evaluations by turns, until it is reached or missed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, List, Mapping, Optional, Tuple

from torch.utils.data import DataLoader

from pytest_mlhpc.node.worker import distributed, loader, prepare
from pytest_mlhpc.node.worker.data.sampler import ShardedSampler
from pytest_mlhpc.node.worker.distributed import Group
from pytest_mlhpc.node.worker.failure import WorkerFailure
from pytest_mlhpc.node.worker.loop import Trainer
from pytest_mlhpc.node.worker.quality import parts
from pytest_mlhpc.node.worker.quality.evaluation import InOrder, evaluate
from pytest_mlhpc.node.worker.quality.logbook import Logbook, hyperparameters
from pytest_mlhpc.node.worker.quality.metrics import Metric
from pytest_mlhpc.node.worker.quality.moving import Moved
from pytest_mlhpc.node.worker.quality.place import Node, gathered
from pytest_mlhpc.node.worker.quality.schedule import DEPARTURE, departures, schedule_of
from pytest_mlhpc.node.worker.quality.settings import Settings
from pytest_mlhpc.node.worker.quality.training import Spent, train_epoch
from pytest_mlhpc.node.worker.reporting import Progress

#: Evaluations that a failure's text shows: the last so many.
_SHOWN = 8


@dataclass(frozen=True)
class Reading:
    """How ranks share the samples, and how many processes read them."""

    node: Node
    by_node: bool
    seed: int
    asked_workers: Optional[int]
    cores: int


@dataclass(frozen=True)
class Outcome:
    """What was spent, the quality at each evaluation, their seconds, and the samples of one."""

    spent: Spent
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
class Course:
    """All that the course of one run needs; ``start`` is when its clock started (seconds of ``perf_counter``)."""

    settings: Settings
    trainer: Trainer
    group: Group
    sizes: prepare.Batches
    metric: Metric
    log: Logbook
    reading: Reading
    start: float
    workload: str

    def go(self, parameters: Mapping[str, Any], data: Moved, progress: Progress) -> Outcome:
        """Train and evaluate until the target is reached.

        Raises:
            WorkerFailure: ``target_missed`` after all epochs or when the time is over; ``data_exhausted``, less data than a step.
        """
        settings, log = self.settings, self.log
        parts.check_first(data.training, self.trainer.task)
        loaders = self._loaders(data)
        schedule = schedule_of(self.workload, parameters, self.sizes.step_samples)
        options = self.trainer.optimizer.param_groups[0]
        log.facts({
            "quality_target": settings.target.value,
            **hyperparameters(self.workload, options, schedule, loaders.steps, self.sizes.accumulate),
        })  # fmt: skip
        for text in departures(self.workload, schedule):
            log.note(DEPARTURE, text)
        spent, curve, seconds, evaluated = Spent(), [], [], 0
        total = settings.max_epochs * loaders.steps
        for epoch in range(1, settings.max_epochs + 1):
            log.note("epoch_start", None, epoch_num=epoch)
            train_epoch(
                self.trainer, loaders.training, self.group, spent,
                schedule=schedule, steps=loaders.steps, progress=lambda step, rate: progress(step, total, rate),
            )  # fmt: skip
            log.note("epoch_stop", None, epoch_num=epoch)
            late = self._late(spent)
            if epoch % settings.every and epoch != settings.max_epochs and not late:
                continue
            quality, evaluated, took_s = self._evaluated(loaders, epoch)
            curve.append(quality)
            seconds.append(took_s)
            if settings.target.reached(quality):
                return Outcome(spent, tuple(curve), tuple(seconds), evaluated)
            if late:
                break
        raise WorkerFailure("target_missed", self._missed(spent, curve))

    def _evaluated(self, loaders: _Loaders, epoch: int) -> Tuple[float, int, float]:
        start = time.perf_counter()
        self.log.note("eval_start", None, epoch_num=epoch)
        found = evaluate(self.trainer, loaders.evaluation, loaders.own, self.metric, self.group)
        distributed.barrier(self.group, self.trainer.accelerator)
        self.log.note(self.settings.target.key, found.quality, epoch_num=epoch)
        self.log.note("eval_stop", None, epoch_num=epoch)
        return found.quality, found.samples, time.perf_counter() - start

    def _late(self, spent: Spent) -> bool:
        """Return whether another training epoch would end beyond the limit, by rank 0's clock."""
        end = time.perf_counter() - self.start + max(spent.epochs_s[-1:], default=0.0)
        return bool(gathered(self.group, end > self.settings.max_seconds)[0])

    def _missed(self, spent: Spent, curve: List[float]) -> str:
        settings, epochs, elapsed = self.settings, len(spent.epochs_s), time.perf_counter() - self.start
        target = settings.target
        best = min(curve) if target.better == "lower" else max(curve)
        direction = "at most" if target.better == "lower" else "at least"
        last = ", ".join(f"{quality:.4g}" for quality in curve[-_SHOWN:])
        why = "max_epochs" if epochs >= settings.max_epochs else f"max_seconds={settings.max_seconds:g}"
        return (
            f"{target.key} is {curve[-1]:.4g} after {epochs} training epochs ({spent.steps} steps, {elapsed:.1f} s), the "
            f"target is {direction} {target.value:g}; the best was {best:.4g}, the last: {last}. Ended by {why}: allow "
            "more, or change learning_rate, schedule or global_batch"
        )

    def _loaders(self, data: Moved) -> _Loaders:
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
        told = gathered(group, (trained, len(own), len(data.training), len(data.evaluation)))
        steps = min(one[0] for one in told) // (micro * self.sizes.accumulate)
        whole = [sum(one[part] for one in told) for part in (0, 1)]
        if not steps:
            text = f"{whole[0]} samples are less than one step of {self.sizes.step_samples} on {group.world} ranks"
            raise WorkerFailure("data_exhausted", f"{text}: use more data or a smaller global_batch")
        if not min(one[1] for one in told):
            raise WorkerFailure(
                "data_exhausted",
                f"{whole[1]} samples to evaluate are not one for each of {group.world} ranks",
            )
        self.log.facts({"train_samples": whole[0], "eval_samples": whole[1]})
        accelerator, task = self.trainer.accelerator, self.trainer.task
        workers = loader.choose_workers(reading.asked_workers, "files", reading.cores, accelerator.type)
        shape = loader.Shape(micro, workers, pin=accelerator.asynchronous)
        training = ShardedSampler(len(data.training), place, ranks, reading.seed)
        evaluation = InOrder(own, max(one[1] for one in told))
        return _Loaders(
            loader.loader_of(data.training.dataset(task), training, shape),
            steps,
            loader.loader_of(data.evaluation.dataset(task), evaluation, shape, whole=False),
            len(own),
        )
