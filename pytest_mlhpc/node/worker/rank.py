"""What one rank does between joining its group and reporting (warm up, measure, diagnose), and in which mode: a window of steps, a probe, a quality target, an ensemble."""

from __future__ import annotations

import contextlib
import gc
import importlib
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, List, Optional, Sequence, Tuple

import torch

from pytest_mlhpc.node.protocol.plan import RunPlan
from pytest_mlhpc.node.protocol.schema import Figure, RankReport
from pytest_mlhpc.node.telemetry import contention
from pytest_mlhpc.node.worker import distributed, loop, prepare, reporting
from pytest_mlhpc.node.worker.base import Accelerator
from pytest_mlhpc.node.worker.distributed import Group
from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.node.worker.loop import Trainer, resolve_losses, run_steps
from pytest_mlhpc.node.worker.reporting import Progress


@dataclass(frozen=True)
class ReadyRank:
    """All that is there before warm-up."""

    run: RunPlan
    group: Group
    trainer: Trainer
    data: prepare.OpenData
    cost: reporting.SampleCost


@dataclass(frozen=True)
class WarmUp:
    """What warm-up cost: all of it, the wait for its first batch, its losses, and what compiling took."""

    seconds: float
    first_wait_s: float
    losses: Tuple[float, ...]
    figures: Tuple[Figure, ...] = ()


@dataclass(frozen=True)
class Window:
    """The timed window: what the loop left, and what the node did meanwhile."""

    recorder: loop.Recorder
    started_ns: int
    ended_ns: int
    epoch_s: float
    meanwhile: reporting.WindowUsage


@dataclass(frozen=True)
class TrainedRank:
    """What is left of a measured training: its report, the model with its weights, the data that it was trained on."""

    report: RankReport
    trainer: Trainer
    data: prepare.OpenData


def measure(
    run: RunPlan, group: Group, accelerator: Accelerator, directory: Path, progress: Progress
) -> RankReport:
    """Train the run's steps on this rank and return what was measured.

    Raises:
        WorkerFailure: the run is broken; the name says how.
    """
    return train(run, group, accelerator, directory, progress).report


def train(
    run: RunPlan,
    group: Group,
    accelerator: Accelerator,
    directory: Path,
    progress: Progress,
    *,
    draw: Optional[prepare.Draw] = None,
    begin: Callable[[], None] = lambda: None,
) -> TrainedRank:
    """Do :func:`measure`, and return model and data as well.

    *draw* says which samples are taken, instead of all; *begin* is called between warm-up and the timed window, for those
    that have to wait there for trainings beside this one.

    Raises:
        WorkerFailure: the run is broken; the name says how.
    """
    sizes = prepare.split_batch(run, group.world)
    seed = int(run.parameters.get("seed") or 0)
    torch.manual_seed(seed)
    task = prepare.load_task(run)
    cost = reporting.cost(run, task, accelerator)
    trainer = prepare.build(run, task, group, accelerator, sizes.accumulate)
    torch.manual_seed(seed + group.rank)  # dropout differs between ranks
    before = reporting.calibrated(run, group, accelerator)  # before loaders take their share of the cores
    data = prepare.open_data(run, trainer, group, sizes, directory, draw=draw)
    ready = ReadyRank(run, group, trainer, data, cost)
    warm = _warm_up(ready, progress)
    begin()
    window = _window(ready, progress)
    after = reporting.calibrated(run, group, accelerator)
    return TrainedRank(_report(ready, warm, window, (before, after)), trainer, data)


def _report(
    ready: ReadyRank, warm: WarmUp, window: Window, calibrations: Tuple[Optional[float], Optional[float]]
) -> RankReport:
    run, group, trainer, recorder = ready.run, ready.group, ready.trainer, window.recorder
    losses = warm.losses + resolve_losses(recorder.losses, run.warmup_steps)
    exposed, late = distributed.communication(trainer, recorder.last_batch, group)
    sent = distributed.traffic(trainer, recorder.last_batch, group)
    loop.check_wall(window.started_ns, window.ended_ns, window.epoch_s)
    times = loop.resolve(recorder, trainer.accelerator, trainer.accumulate)
    first_s = times.first_wait_s if run.warmup_steps == 0 else 0.0
    source = ready.data.source
    made = {"samples_read_again": str(len(source.dataset))} if source.again else {}
    return RankReport(
        **reporting.who(run, group, trainer.accelerator),
        **ready.cost,
        **window.meanwhile,
        environment=reporting.surroundings(run, group, trainer.accelerator, made),
        steps=len(times.step_times_s),
        samples=recorder.samples,
        started_ns=window.started_ns,
        ended_ns=window.ended_ns,
        epoch_s=window.epoch_s,
        wait_s=times.wait_s - first_s,
        copy_s=times.copy_s,
        exposed_copy_s=times.exposed_copy_s,
        warmup_s=warm.seconds,
        step_times_s=times.step_times_s,
        losses=losses,
        first_batch_s=first_s,
        read_s=None if run.data_source == "device" else recorder.read_s,
        forward_s=None if trainer.captured else times.forward_s,
        backward_s=None if trainer.captured else times.backward_s,
        optimizer_s=None if trainer.captured else times.optimizer_s,
        exposed_communication_s=None if exposed is None else exposed * run.steps,
        arrival_s=late,
        calibration_before=calibrations[0],
        calibration_after=calibrations[1],
        data_kind=source.kind,
        cache=source.cache,
        loader_start_s=ready.data.start_s + (warm.first_wait_s if run.warmup_steps else times.first_wait_s),
        figures=(*warm.figures, *sent),
    )


def _warm_up(ready: ReadyRank, progress: Progress) -> WarmUp:
    run, trainer, recorder = ready.run, ready.trainer, loop.Recorder()
    recorder.start(trainer.accelerator)
    with _counted(run, "warm-up"):
        run_steps(
            trainer,
            ready.data.batches,
            run.warmup_steps,
            recorder,
            _warm_up_progress(ready, recorder.clock, progress),
        )
    trainer.accelerator.synchronize()
    seconds = (recorder.clock.perf() - recorder.start_ns) / 1e9
    first_s = (recorder.stamps[0][1] - recorder.stamps[0][0]) / 1e9 if recorder.stamps else 0.0
    losses = resolve_losses(recorder.losses)
    distributed.barrier(ready.group, trainer.accelerator)
    compiles = run.parameters.get("compile") or trainer.captured
    return WarmUp(seconds, first_s, losses, compile_figures(recorder.stamps) if compiles else ())


def _warm_up_progress(ready: ReadyRank, clock: loop.Clock, progress: Progress) -> Callable[[int, int], None]:
    """Return what reports steps of warm-up. They are late by their share of the usual time, but for the first reported ones.

    The first ones make caches and choose kernels. Where a model is compiled or captured, that takes what it takes.
    """
    run, compiles = ready.run, ready.run.parameters.get("compile") or ready.trainer.captured
    usual_s = None if compiles or run.usual_s is None else run.usual_s * run.warmup_steps / run.steps
    begun: List[Tuple[int, contention.Snapshot]] = []

    def tell(_step: int, _samples: int) -> None:
        if usual_s is not None and not begun:
            begun.append((clock.perf(), contention.snapshot()))
        late = [contention.late_figures(node, (clock.perf() - at) / 1e9, usual_s) for at, node in begun]
        progress(0, run.steps, 0.0, *late)

    return tell


def compile_figures(stamps: Sequence[loop.Stamps]) -> Tuple[Figure, ...]:
    """Return what compiling or capturing took: what steps of warm-up, in which it happens, took beyond the median one.

    From the host's clock: it is the host that compiles. Nothing can be said of fewer than three steps.
    """
    if len(stamps) < 3:
        return ()
    took = [(row[5] - row[1]) / 1e9 for row in stamps]
    usual = statistics.median(took)
    return (Figure("compile_time", sum(max(0.0, one - usual) for one in took), "s", "lower"),)


def _window(ready: ReadyRank, progress: Progress) -> Window:
    run, group, accelerator = ready.run, ready.group, ready.trainer.accelerator
    recorder = loop.Recorder()

    def tell(step: int, samples: int) -> None:
        elapsed_s = (recorder.clock.perf() - recorder.start_ns) / 1e9
        progress(step, run.steps, samples / elapsed_s, watch.late(elapsed_s, run.usual_s))

    gc.collect()
    gc.freeze()  # what exists now lives on: later collections need not walk it
    watch = reporting.RunWatch(accelerator)
    distributed.barrier(group, accelerator)
    started_ns = recorder.clock.wall()
    recorder.start(accelerator)
    with _counted(run, "the timed window"):
        run_steps(ready.trainer, ready.data.batches, run.steps, recorder, tell)
    accelerator.synchronize()
    epoch_s = (recorder.clock.perf() - recorder.start_ns) / 1e9
    ended_ns = recorder.clock.wall()
    meanwhile = watch.over()
    distributed.barrier(group, accelerator)
    gc.unfreeze()
    return Window(recorder, started_ns, ended_ns, epoch_s, meanwhile)


@contextlib.contextmanager
def _counted(run: RunPlan, where: str) -> Iterator[None]:
    """Add what was asked for to the text of a loader that ended early."""
    try:
        yield
    except WorkerFailure as failure:
        if failure.outcome != "data_exhausted":
            raise
        text = (
            f"{failure.text} in {where}; asked were {run.warmup_steps} steps of warm-up and {run.steps} timed ones: "
            "use more data, fewer steps or a smaller batch"
        )
        raise WorkerFailure("data_exhausted", text) from failure


#: ``measure(run, group, accelerator, directory, progress) -> RankReport``, on every rank.
Measure = Callable[[RunPlan, Group, Accelerator, Path, Progress], RankReport]


#: Devices that take a training step as one program -> what trains on them.
_WHOLLY = {"ipu": "accelerators.ipu", "wse": "accelerators.wse"}


def measure_of(run: RunPlan) -> Measure:
    """Return what measures *run*: its parameters say in which mode. Only that mode's modules are imported."""
    if run.parameters.get("telemetry"):
        from pytest_mlhpc.node.telemetry.sidecar import watched

        return watched(_mode_of(run))
    return _mode_of(run)


def _mode_of(run: RunPlan) -> Measure:
    if hasattr(prepare.load_module(run), "probe"):
        return _measure("probes.measure")
    if run.device_type in _WHOLLY:
        return _measure(_WHOLLY[run.device_type])
    if run.parameters.get("bagging"):
        return _measure("ensemble_rank")
    if run.parameters.get("until") == "quality":
        return _measure("quality.measure")
    return measure


def _measure(module: str) -> Measure:
    found: Any = importlib.import_module(f"pytest_mlhpc.node.worker.{module}")
    measure: Measure = found.measure
    return measure
