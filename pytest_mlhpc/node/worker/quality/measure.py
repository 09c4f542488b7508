"""What one rank does to train to a quality target: cool the data, start the clock, stage, train, evaluate, stop it.

The clock starts before the data are touched (MLPerf HPC rules 3.0, "Data State at Start of Run"): models are built before, and
caches dropped; listing, staging and reading come after.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, List, Optional, Tuple

import torch

from pytest_mlhpc.node.protocol.plan import RunPlan
from pytest_mlhpc.node.protocol.schema import Figure, RankReport, thin
from pytest_mlhpc.node.worker import distributed, loop, prepare, reporting
from pytest_mlhpc.node.worker.base import Accelerator
from pytest_mlhpc.node.worker.data.dataset_files import DataError
from pytest_mlhpc.node.worker.distributed import Group
from pytest_mlhpc.node.worker.loop import Trainer
from pytest_mlhpc.node.worker.quality import datasets, train
from pytest_mlhpc.node.worker.quality.rules import Logbook, QualitySettings, settings_of
from pytest_mlhpc.node.worker.quality.staging import RankNode, find_node, gathered
from pytest_mlhpc.node.worker.quality.train import (
    MOST_STEPS,
    EnsembleMember,
    QualityRun,
    ReadPlan,
    TrainingOutcome,
)
from pytest_mlhpc.node.worker.reporting import Progress


@dataclass(frozen=True)
class ReadyRun:
    """All that is there before the clock starts."""

    run: RunPlan
    group: Group
    node: RankNode
    settings: QualitySettings
    trainer: Trainer
    sizes: prepare.Batches
    metric: train.Metric
    origin: datasets.DataOrigin
    cache: str
    seed: int  #: of the data
    log: Logbook
    member: Optional[EnsembleMember]


@dataclass(frozen=True)
class TimedRun:
    """What the clock saw: the run from its start to its stop, and what the node did meanwhile."""

    outcome: TrainingOutcome
    moved: datasets.StagedSplits
    started_ns: int
    ended_ns: int
    seconds: float
    meanwhile: reporting.WindowUsage


def measure(
    run: RunPlan,
    group: Group,
    accelerator: Accelerator,
    directory: Path,
    progress: Progress,
    *,
    member: Optional[EnsembleMember] = None,
) -> RankReport:
    """Train *run* until its target is reached, and return what that took.

    A *member* of an ensemble is trained until the ensemble has reached it.

    Raises:
        WorkerFailure: ``target_missed``, or the run is broken; the name says how.
    """
    log = Logbook(keeps=group.rank == 0)
    log.note("init_start")
    ready = _prepared(run, group, accelerator, directory, log, member=member)
    before = reporting.calibrated(run, group, accelerator)
    if member is not None:
        member.begin()
    log.note("init_stop")
    timed = _timed(ready, progress)
    after = reporting.calibrated(run, group, accelerator)
    loop.check_wall(timed.started_ns, timed.ended_ns, timed.seconds)
    return _report(ready, timed, (before, after))


def _prepared(
    run: RunPlan,
    group: Group,
    accelerator: Accelerator,
    directory: Path,
    log: Logbook,
    *,
    member: Optional[EnsembleMember],
) -> ReadyRun:
    sizes = prepare.split_batch(run, group.world)
    seed = int(run.parameters.get("seed") or 0)
    settings = settings_of(run)
    node = find_node(group, os.environ)
    torch.manual_seed(seed)
    task = prepare.load_task(run)
    trainer = prepare.build(run, task, group, accelerator, sizes.accumulate)
    torch.manual_seed(seed + group.rank)  # dropout differs between ranks
    data_seed, metric = seed, train.METRICS[run.workload]
    if member is not None:
        data_seed, metric = member.data_seed, member.metric
    with _one_first(group, accelerator):
        origin = datasets.origin_of(run, settings, directory, data_seed)
    cache = _cooled(origin, group, node)
    return ReadyRun(run, group, node, settings, trainer, sizes, metric, origin, cache, data_seed, log, member)


@contextlib.contextmanager
def _one_first(group: Group, accelerator: Accelerator) -> Iterator[None]:
    """Let one rank (of each disk) do it before the others: it may have to make what they find."""
    first = prepare.goes_first(group, os.environ)
    if not first:
        distributed.barrier(group, accelerator)
    yield
    if first:
        distributed.barrier(group, accelerator)
    distributed.barrier(group, accelerator)


def _cooled(origin: datasets.DataOrigin, group: Group, node: RankNode) -> str:
    """Drop the data from every node's page cache, and return the state of the worst.

    Raises:
        DataError: some node keeps them in memory.
    """
    states = gathered(group, datasets.cool(origin.files) if node.leads else "cold")
    if "warm" in states:
        where = f"rank {states.index('warm')}'s node" if group.world > 1 else "this node"
        text = (
            f"is in the page cache of {where} and does not leave it, but time to train counts from data in no cache: use a "
            "copy on a disk (not in memory) that no other program reads"
        )
        raise DataError(origin.base, text)
    return "unknown" if "unknown" in states else "cold"


def _timed(ready: ReadyRun, progress: Progress) -> TimedRun:
    run, group, accelerator, log = ready.run, ready.group, ready.trainer.accelerator, ready.log
    watch = reporting.RunWatch(accelerator)
    with contextlib.ExitStack() as stack:
        folder = datasets.folder(ready.settings, run, ready.node, group, stack)
        distributed.barrier(group, accelerator)
        start = time.perf_counter()
        started_ns = log.note("run_start")
        moved = datasets.move(
            ready.origin, ready.settings, ready.node, log, group=group, place=folder, find=_finder(ready)
        )
        course = QualityRun(
            ready.settings,
            ready.trainer,
            group,
            ready.sizes,
            ready.metric,
            log,
            _reading(ready),
            start,
            run.workload,
            ready.member,
        )
        outcome = course.go(run.parameters, moved, progress)
        seconds = time.perf_counter() - start
        ended_ns = log.note("run_stop", None, status="success", epoch_num=len(outcome.spent.epochs_s))
        meanwhile = watch.over()
        distributed.barrier(group, accelerator)
    return TimedRun(outcome, moved, started_ns, ended_ns, seconds, meanwhile)


def _finder(ready: ReadyRun) -> datasets.Finder:
    """Return what lists the two parts of the set at a place, which may hold the share of one of several nodes."""

    def find(root: Optional[Path], nodes: int) -> Tuple[datasets.Part, datasets.Part]:
        return datasets.splits_of(
            ready.run, ready.trainer.task, ready.settings.of_share(nodes), root, ready.seed
        )

    return find


def _reading(ready: ReadyRun) -> ReadPlan:
    return ReadPlan(
        node=ready.node,
        by_node=ready.settings.by_node,
        seed=ready.seed,
        asked_workers=ready.run.parameters.get("loader_workers"),
        cores=ready.run.cores_per_rank,
    )


def _figures(ready: ReadyRun, timed: TimedRun) -> List[Figure]:
    outcome, spent = timed.outcome, timed.outcome.spent
    found = [
        Figure("time_to_train", timed.seconds, "s", "lower"),
        Figure("staging_time", timed.moved.seconds, "s", "lower"),
        Figure("training_time", sum(spent.epochs_s), "s", "lower"),
        Figure(
            "evaluation_time", sum(outcome.evaluations_s), "s", "lower", samples=thin(outcome.evaluations_s)
        ),
        Figure("epochs", float(len(spent.epochs_s)), "1", "lower", "first"),
        Figure("quality", outcome.curve[-1], "1", ready.settings.target.better, "first", thin(outcome.curve)),
        Figure(
            "training_epoch_time",
            statistics.median(spent.epochs_s),
            "s",
            "lower",
            samples=thin(spent.epochs_s),
        ),
    ]
    if sum(outcome.evaluations_s) > 0:
        rate = outcome.evaluated * len(outcome.evaluations_s) / sum(outcome.evaluations_s)
        found.append(Figure("evaluation_throughput", rate, "samples/s", "higher", "min"))
    if ready.settings.staging is not None and timed.moved.seconds > 0:
        found.append(
            Figure("staging_bandwidth", timed.moved.bytes / timed.moved.seconds, "B/s", "higher", "sum")
        )
    return found


def _report(
    ready: ReadyRun, timed: TimedRun, calibrations: Tuple[Optional[float], Optional[float]]
) -> RankReport:
    run, group, accelerator, spent = ready.run, ready.group, ready.trainer.accelerator, timed.outcome.spent
    exposed, late = distributed.communication(ready.trainer, spent.last_batch, group)
    return RankReport(
        **reporting.who(run, group, accelerator),
        **reporting.cost(run, ready.trainer.task, accelerator),
        **timed.meanwhile,
        environment=reporting.surroundings(run, group, accelerator),
        steps=spent.steps,
        samples=spent.samples,
        started_ns=timed.started_ns,
        ended_ns=timed.ended_ns,
        epoch_s=sum(spent.epochs_s),
        wait_s=max(0.0, spent.wait_s),
        copy_s=spent.copy_s,
        warmup_s=0.0,
        step_times_s=thin(spent.step_times_s, MOST_STEPS),
        losses=thin(spent.losses, MOST_STEPS),
        first_batch_s=spent.first_s,
        read_s=spent.read_s,
        forward_s=spent.forward_s,
        backward_s=spent.backward_s,
        optimizer_s=spent.optimizer_s,
        exposed_communication_s=None if exposed is None else exposed * spent.steps,
        arrival_s=late,
        calibration_before=calibrations[0],
        calibration_after=calibrations[1],
        data_kind=ready.origin.kind,
        cache=ready.cache,
        exposed_copy_s=spent.exposed_copy_s,
        loader_start_s=spent.first_s,
        figures=tuple(_figures(ready, timed)),
        events=ready.log.events,
    )
