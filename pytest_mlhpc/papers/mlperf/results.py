"""Results of repeated runs of one training at one scale, and published results beside them."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from pytest_mlhpc.papers.mlperf import rules
from pytest_mlhpc.papers.mlperf.rules import Departure
from pytest_mlhpc.papers.mlperf.trained import TrainedRun
from pytest_mlhpc.papers.published import PUBLISHED, SOURCES
from pytest_mlhpc.report import keys
from pytest_mlhpc.store.record import SeriesKey

#: Runs below which nothing is left when fastest and slowest are dropped.
FEWEST: Final = 3


@dataclass(frozen=True)
class ResultScore:
    """The result of a set of runs. ``seconds`` is None where there is none, and ``why`` says so.

    ``dropped`` are the fastest and the slowest (None: one that did not converge); ``counted`` the others, in order of time.
    """

    seconds: float | None
    runs: int
    lost: int
    counted: tuple[float, ...] = ()
    dropped: tuple[float | None, float | None] | None = None
    why: str = ""

    @property
    def spread(self) -> float | None:
        """Half the range of the runs kept, relative to the result."""
        if self.seconds is None or len(self.counted) < 2:
            return None
        return (max(self.counted) - min(self.counted)) / 2 / self.seconds


def olympic(times: Sequence[float | None]) -> ResultScore:
    """Return the score of runs that took *times* seconds; None stands for one that did not converge."""
    converged = sorted(time for time in times if time is not None and math.isfinite(time))
    runs, lost = len(times), len(times) - len(converged)
    if lost > 1:
        return ResultScore(
            None, runs, lost, why=f"{lost} of {runs} runs did not converge; a result allows one"
        )
    if runs < FEWEST:
        return ResultScore(
            None, runs, lost, tuple(converged), why=f"{runs} of the {FEWEST} runs that an olympic mean takes"
        )
    ordered: list[float | None] = [*converged, *([None] if lost else [])]
    counted = tuple(time for time in ordered[1:-1] if time is not None)
    return ResultScore(statistics.fmean(counted), runs, lost, counted, (ordered[0], ordered[-1]))


#: Repeated runs differ in it by the rules (MLPerf Training rules, "Run Results": random numbers).
_REPEATED = "seed"


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ in their seed alone, oldest first."""

    runs: tuple[TrainedRun, ...]

    @property
    def key(self) -> SeriesKey:
        """The oldest one's series."""
        return self.runs[0].key

    @property
    def benchmark(self) -> keys.Benchmark:
        """The oldest one's benchmark."""
        return self.runs[0].benchmark

    @property
    def workload(self) -> str:
        """What was trained."""
        return self.runs[0].workload

    @property
    def name(self) -> str:
        """The test's name, for people."""
        key = keys.parse(self.benchmark)
        return (key.name if key else "") or self.workload

    @property
    def machine(self) -> str:
        """Where, for people: ``system:partition``."""
        return machine_of(self.key)

    @property
    def staging(self) -> str:
        """How its data came to the nodes: ``files`` or ``archives``; empty where nothing was staged."""
        return str(self.runs[0].parameters.get("staging") or "")

    @property
    def score(self) -> ResultScore:
        """The olympic mean; a run that did not reach its target is one that did not converge."""
        return olympic([run.time_s if run.reached else None for run in self.runs])

    @property
    def departures(self) -> tuple[Departure, ...]:
        """All that single runs and their number depart from."""
        found = [one for run in self.runs for one in rules.departures(run)]
        lost = sum(not run.reached for run in self.runs)
        return tuple(dict.fromkeys([*found, *rules.of_group(self.workload, len(self.runs), lost)]))

    @property
    def division(self) -> str:
        """The strictest division whose rules all runs keep together."""
        return rules.division(self.departures)


def machine_of(key: SeriesKey) -> str:
    """Return the machine of a series for people: system, partition, and the environment where it has a name."""
    place = ":".join(filter(None, (key.system, key.partition)))
    return f"{place} {key.environment}" if key.environment not in ("", "default") else place


def groups(runs: Iterable[TrainedRun]) -> tuple[RunGroup, ...]:
    """Return *runs* in groups, in the order of machines and keys."""
    found: dict[SeriesKey, list[TrainedRun]] = {}
    for run in sorted(runs, key=lambda one: (one.created_ns, one.record)):
        found.setdefault(replace(run.key, benchmark=_without_seed(run.benchmark)), []).append(run)
    made = [RunGroup(tuple(some)) for some in found.values()]
    return tuple(sorted(made, key=lambda one: (one.machine, keys.order(one.benchmark))))


def _without_seed(benchmark: keys.Benchmark) -> str:
    """Return what is left without the seed: a seed that parametrizes a test stands in its identity, too."""
    key = keys.parse(benchmark)
    if key is None:
        return json.dumps(benchmark)
    fields = {name: value for name, value in key.fields.items() if name != _REPEATED}
    return json.dumps([benchmark.name.partition("[")[0], key.workload, sorted(fields.items())])


_SC21: Final = "sc21"
#: How the sources of rates in rounds of MLPerf HPC begin.
_ROUNDS: Final = ("MLPerf HPC", "logs of MLPerf HPC")


@dataclass(frozen=True)
class Reference:
    """One published result: minutes to train, or samples per second of one device, or both."""

    source: str
    system: str
    workload: str
    division: str = ""
    devices: int | None = None
    minutes: float | None = None
    per_device: float | None = None


#: Workload, division, system, devices, minutes.
_MINUTES: Final[tuple[tuple[str, str, str, int, float], ...]] = (
    ("cosmoflow", "closed", "Piz Daint", 128, 461.01),
    ("cosmoflow", "closed", "Piz Daint", 256, 327.01),
    ("cosmoflow", "closed", "ABCI", 512, 34.42),
    ("cosmoflow", "closed", "Fugaku", 512, 268.77),
    ("cosmoflow", "closed", "Fugaku", 8192, 101.49),
    ("cosmoflow", "closed", "Cori-GPU", 64, 364.73),
    ("cosmoflow", "closed", "Cori-KNL", 512, 536.06),
    ("cosmoflow", "closed", "HAL", 64, 265.59),
    ("cosmoflow", "closed", "Frontera-RTX", 64, 602.23),
    ("cosmoflow", "open", "ABCI", 2048, 13.21),
    ("cosmoflow", "open", "Fugaku", 16384, 30.07),
    ("cosmoflow", "open", "Cori-KNL", 1024, 419.69),
    ("deepcam", "closed", "ABCI", 1024, 11.71),
    ("deepcam", "closed", "Cori-GPU", 64, 139.29),
    ("deepcam", "open", "ABCI", 1024, 10.49),
)


def references(workload: str) -> tuple[Reference, ...]:
    """Return what is published of *workload*: times first, then rates of rounds of MLPerf HPC."""
    times = [
        Reference(_SC21, system, workload, division, devices, minutes)
        for name, division, system, devices, minutes in _MINUTES
        if name == workload
    ]
    rates = [
        Reference(one.source, one.system, workload, "", one.devices, None, one.per_device)
        for one in PUBLISHED
        if one.workload == workload and one.per_device is not None and SOURCES[one.source].startswith(_ROUNDS)
    ]
    return (*times, *rates)
