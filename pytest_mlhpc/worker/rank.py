"""PAYLOAD. What one rank does between joining its group and reporting: warm up, measure, diagnose."""

from __future__ import annotations

import contextlib
import gc
import socket
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, Optional, Sequence, Tuple

import torch

from pytest_mlhpc.batch.plan import RunPlan
from pytest_mlhpc.results.schema import Figure, RankReport
from pytest_mlhpc.worker import (
    calibrate,
    contention,
    distributed,
    energy,
    environment,
    flops,
    prepare,
    timing,
)
from pytest_mlhpc.worker.accelerators import binding
from pytest_mlhpc.worker.accelerators.base import Accelerator
from pytest_mlhpc.worker.distributed import Group
from pytest_mlhpc.worker.failure import WorkerFailure
from pytest_mlhpc.worker.loop import Trainer, resolve_losses, run_steps

#: ``progress(step, steps, samples per second of this rank)``; the batch adds ranks up.
Progress = Callable[[int, int, float], None]


@dataclass(frozen=True)
class Window:
    """The timed window: what the loop left, and what the node did meanwhile."""

    recorder: timing.Recorder
    started_ns: int
    ended_ns: int
    epoch_s: float
    energy_j: Optional[float]
    contention: Any
    peak_memory_bytes: Optional[int]


@dataclass(frozen=True)
class Trained:
    """What is left of a measured training: its report, the model with its weights, the data that it was trained on."""

    report: RankReport
    trainer: Trainer
    data: prepare.Data


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
) -> Trained:
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
    operations = flops.count(task)
    trainer = prepare.build(run, task, group, accelerator, sizes.accumulate)
    torch.manual_seed(seed + group.rank)  # dropout differs between ranks
    before = calibrated(run, group, accelerator)  # before loader processes take their share of the cores
    data = prepare.open_data(run, trainer, group, sizes, directory, draw=draw)
    warm = _warm_up(run, trainer, data, group, progress)
    begin()
    window = _window(run, trainer, data, group, progress)
    after = calibrated(run, group, accelerator)
    losses = warm.losses + resolve_losses(window.recorder.losses, run.warmup_steps)
    exposed, late = distributed.communication(trainer, window.recorder.last_batch, group)
    sent = distributed.traffic(trainer, window.recorder.last_batch, group)
    timing.check_wall(window.started_ns, window.ended_ns, window.epoch_s)
    times = timing.resolve(window.recorder, accelerator, sizes.accumulate)
    first_s = times.first_wait_s if run.warmup_steps == 0 else 0.0
    precision = str(run.parameters.get("precision") or "fp32")
    report = RankReport(
        rank=group.rank,
        local_rank=group.local_rank,
        host=socket.gethostname(),
        device_type=accelerator.type,
        device_index=accelerator.index,
        device_model=accelerator.model,
        steps=len(times.step_times_s),
        samples=window.recorder.samples,
        started_ns=window.started_ns,
        ended_ns=window.ended_ns,
        epoch_s=window.epoch_s,
        wait_s=times.wait_s - first_s,
        copy_s=times.copy_s,
        warmup_s=warm.seconds,
        step_times_s=times.step_times_s,
        losses=losses,
        first_batch_s=first_s,
        read_s=None if run.data_source == "device" else window.recorder.read_s,
        forward_s=None if trainer.captured else times.forward_s,
        backward_s=None if trainer.captured else times.backward_s,
        optimizer_s=None if trainer.captured else times.optimizer_s,
        exposed_communication_s=None if exposed is None else exposed * run.steps,
        arrival_s=late,
        peak_memory_bytes=window.peak_memory_bytes,
        energy_j=window.energy_j,
        calibration_before=before,
        calibration_after=after,
        forward_flop_per_sample=float(operations.forward),
        train_flop_per_sample=float(operations.train),
        peak_flops_per_s=flops.peak_flops(accelerator.model, precision),
        parameters=operations.parameters,
        data_kind=data.source.kind,
        data_source=run.data_source,
        cache=data.source.cache,
        environment=environment_of(run, accelerator) if group.rank == 0 else None,
        contention=window.contention,
        exposed_copy_s=times.exposed_copy_s,
        loader_start_s=data.start_s + (warm.first_wait_s if run.warmup_steps else times.first_wait_s),
        tokens_per_sample=task.tokens_per_sample or None,
        figures=(*warm.figures, *sent),
    )
    return Trained(report, trainer, data)


def calibrated(run: RunPlan, group: Group, accelerator: Accelerator) -> Optional[float]:
    """Run the fixed kernel, if it is wanted, and return its rate in 1/s.

    On all ranks at once: cores that share a cache or a clock must do so both times.
    """
    if not run.calibrate:
        return None
    distributed.barrier(group, accelerator)
    return calibrate.calibrate(accelerator)


@dataclass(frozen=True)
class WarmUp:
    """What warm-up cost: all of it, the wait for its first batch, its losses, and what compiling took."""

    seconds: float
    first_wait_s: float
    losses: Tuple[float, ...]
    figures: Tuple[Figure, ...] = ()


def _warm_up(run: RunPlan, trainer: Trainer, data: prepare.Data, group: Group, progress: Progress) -> WarmUp:
    recorder = timing.Recorder()
    recorder.start(trainer.accelerator)
    with _counted(run, "warm-up"):
        run_steps(
            trainer,
            data.batches,
            run.warmup_steps,
            recorder,
            lambda _step, _samples: progress(0, run.steps, 0.0),
        )
    trainer.accelerator.synchronize()
    seconds = (recorder.clock.perf() - recorder.start_ns) / 1e9
    first_s = (recorder.stamps[0][1] - recorder.stamps[0][0]) / 1e9 if recorder.stamps else 0.0
    losses = resolve_losses(recorder.losses)
    distributed.barrier(group, trainer.accelerator)
    compiles = run.parameters.get("compile") or trainer.captured
    return WarmUp(seconds, first_s, losses, compile_figures(recorder.stamps) if compiles else ())


def compile_figures(stamps: Sequence[timing.Stamps]) -> Tuple[Figure, ...]:
    """Return what compiling or capturing took: what steps of warm-up, in which it happens, took beyond the median one.

    From the host's clock: it is the host that compiles. Nothing can be told of fewer than three steps.
    """
    if len(stamps) < 3:
        return ()
    took = [(row[5] - row[1]) / 1e9 for row in stamps]
    usual = statistics.median(took)
    return (Figure("compile_time", sum(max(0.0, one - usual) for one in took), "s", "lower"),)


def _window(run: RunPlan, trainer: Trainer, data: prepare.Data, group: Group, progress: Progress) -> Window:
    accelerator, recorder = trainer.accelerator, timing.Recorder()

    def tell(step: int, samples: int) -> None:
        progress(step, run.steps, samples / ((recorder.clock.perf() - recorder.start_ns) / 1e9))

    gc.collect()
    gc.freeze()  # what exists now lives on: later collections need not walk it
    accelerator.reset_peak_memory()
    before = contention.snapshot()
    joules = accelerator.energy_j()
    distributed.barrier(group, accelerator)
    started_ns = recorder.clock.wall()
    recorder.start(accelerator)
    with _counted(run, "the timed window"):
        run_steps(trainer, data.batches, run.steps, recorder, tell)
    accelerator.synchronize()
    epoch_s = (recorder.clock.perf() - recorder.start_ns) / 1e9
    ended_ns = recorder.clock.wall()
    used = energy.difference(joules, accelerator.energy_j())
    during = contention.difference(before, contention.snapshot())
    peak = accelerator.peak_memory_bytes()
    distributed.barrier(group, accelerator)
    gc.unfreeze()
    return Window(recorder, started_ns, ended_ns, epoch_s, used, during, peak)


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


def environment_of(run: RunPlan, accelerator: Accelerator) -> Mapping[str, str]:
    """Return what software and hardware this rank measures with."""
    device = {**accelerator.environment(), **binding.described(run)}
    if run.calibrate:
        device["calibration_kernel"] = calibrate.KERNEL
    return environment.describe(str(torch.__version__), accelerator.model, device, run.cwd)
