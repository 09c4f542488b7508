"""PAYLOAD. What one rank of a probe does between joining its group and reporting: check, warm up, repeat, check again."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Dict, List, Mapping

from pytest_mlhpc.node.protocol.plan import RunPlan
from pytest_mlhpc.node.protocol.schema import RankReport
from pytest_mlhpc.node.worker import prepare, reporting, timing
from pytest_mlhpc.node.worker.accelerators.base import Accelerator
from pytest_mlhpc.node.worker.distributed import Group
from pytest_mlhpc.node.worker.probes.base import Place, Probe
from pytest_mlhpc.node.worker.reporting import Progress

#: Figures of other programs' processor time, see :class:`pytest_mlhpc.node.worker.probes.base.Probe`.
_OF_PROCESSORS = ("busy_cores", "own_cores")


@dataclasses.dataclass(frozen=True)
class Window:
    """The timed window of a probe. ``seconds`` are those of each operation, ``repetitions`` those of all together."""

    started_ns: int
    ended_ns: int
    epoch_s: float
    seconds: Mapping[str, List[float]]
    repetitions: List[float]
    meanwhile: reporting.Meanwhile


def measure(
    run: RunPlan, group: Group, accelerator: Accelerator, directory: Path, progress: Progress
) -> RankReport:
    """Do the run's repetitions on this rank and return what was measured.

    Raises:
        WorkerFailure: the run is broken; the name says how.
    """
    place = Place(run, group, accelerator, directory)
    before = reporting.calibrated(run, group, accelerator)
    probe: Probe = prepare.load_module(run).probe(place)
    try:
        warm_s = _warm_up(place, probe)
        window = _window(place, probe, progress)
        probe.verify()
        place.barrier()
        figures = probe.figures() if hasattr(probe, "figures") else ()
        place.barrier()
    finally:
        probe.close()
    after = reporting.calibrated(run, group, accelerator)
    timing.check_wall(window.started_ns, window.ended_ns, window.epoch_s)
    return RankReport(
        **reporting.who(run, group, accelerator),
        **window.meanwhile,
        environment=reporting.surroundings(run, group, accelerator, probe.environment()),
        steps=len(window.repetitions),
        samples=len(window.repetitions),
        started_ns=window.started_ns,
        ended_ns=window.ended_ns,
        epoch_s=window.epoch_s,
        wait_s=0.0,
        copy_s=0.0,
        warmup_s=warm_s,
        step_times_s=tuple(window.repetitions),
        losses=(),
        calibration_before=before,
        calibration_after=after,
        data_kind=run.data_kind,
        cache=probe.cache(),
        timed=tuple(
            dataclasses.replace(one, seconds=tuple(window.seconds[one.name])) for one in probe.operations
        ),
        figures=figures,
    )


def _warm_up(place: Place, probe: Probe) -> float:
    start = time.perf_counter()
    probe.verify()
    for _ in range(place.run.warmup_steps):
        probe.repeat()
    return time.perf_counter() - start


def _window(place: Place, probe: Probe, progress: Progress) -> Window:
    steps = place.run.steps
    seconds: Dict[str, List[float]] = {one.name: [] for one in probe.operations}
    repetitions: List[float] = []
    watch = reporting.Watch(place.accelerator)
    place.barrier()
    started_ns, start = time.time_ns(), time.perf_counter()
    then = start
    for step in range(1, steps + 1):
        for name, value in probe.repeat().items():
            seconds[name].append(value)
        now = time.perf_counter()
        repetitions.append(now - then)
        then = now
        progress(step, steps, step / (now - start))
    ended_ns, epoch_s = time.time_ns(), then - start
    meanwhile = watch.over()
    if probe.kernel_works:
        during = meanwhile["contention"]
        meanwhile["contention"] = {name: during[name] for name in during if name not in _OF_PROCESSORS}
    return Window(started_ns, ended_ns, epoch_s, seconds, repetitions, meanwhile)
