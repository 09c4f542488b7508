"""A simulated year of nights on three systems, with planted faults: records as a session would have stored them."""

import dataclasses
import datetime as dt
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from worlds import measurement, record

from pytest_mlhpc.node.protocol.schema import MetricValue
from pytest_mlhpc.store.record import Record, RecordedVetting

HOUR_NS = 3600 * 10**9
DAY_NS = 24 * HOUR_NS
#: Midnight of the first night; any would do.
BEGIN = dt.datetime(2025, 1, 1, tzinfo=dt.UTC)
BEGIN_NS = int(BEGIN.timestamp()) * 10**9
BENCHMARKS = ("cosmoflow", "deepcam", "language_model", "resnet50", "unet")
SYSTEMS = ("alps", "cirrus", "eidf")
NODES = tuple(f"n{number}" for number in range(1, 9))
JUDGED = ("effective_throughput", "compute_throughput")


def identity_of(workload: str) -> str:
    """Return the identity of a workload's test."""
    return f"suites/training/test_{workload}.py::test_{workload}"


def night_ns(day: int, hour: float = 1.0) -> int:
    """Return a moment of a night, in ns UTC."""
    return BEGIN_NS + day * DAY_NS + int(hour * HOUR_NS)


@dataclass(frozen=True)
class Slow:
    """From ``begin`` on and before ``end``, figures are worse by these shares."""

    begin: int
    end: int
    io: float = 0.0
    compute: float = 0.0
    systems: Sequence[str] = SYSTEMS
    workloads: Sequence[str] = BENCHMARKS

    def hits(self, day: int, system: str, workload: str) -> bool:
        return self.begin <= day < self.end and system in self.systems and workload in self.workloads


@dataclass(frozen=True)
class Year:
    """What happens in it. Noise is white, 0.8 %, and the first night of ``seed`` decides all others."""

    slow: Sequence[Slow] = ()
    missing: Sequence[tuple[str, int, int]] = ()  #: system, first day, first day after
    never: Sequence[tuple[str, int, int]] = ()  #: submitted, and never scheduled
    broken: Sequence[tuple[str, str, int, int]] = ()  #: system, workload, first day, first day after
    unfit: Sequence[tuple[str, str, int, int]] = ()  #: system, node, first day, first day after
    drivers: dict[str, dict[int, str]] = field(default_factory=dict)
    days: int = 365
    noise: float = 0.008
    seed: int = 6
    systems: Sequence[str] = SYSTEMS

    def night(self, day: int) -> Iterator[Record]:
        """Yield the records of one night, oldest first."""
        for at, system in enumerate(self.systems):
            if _within(self.missing, system, day):
                continue
            for number, workload in enumerate(BENCHMARKS):
                yield from self._runs(day, at, number, system, workload)

    def _runs(self, day: int, at: int, number: int, system: str, workload: str) -> Iterator[Record]:
        dice = random.Random(f"{self.seed} {day} {system} {workload}")  # noqa: S311 - test data, the same each time
        ordinal = (day * 10 + at) * 100 + number * 10
        unfit = self._unfit(system, day)
        fields = {
            "node_id": f"suites/training/test_{workload}.py::test_{workload}[{system}:standard]",
            "session": f"session-{system}-{day}", "benchmark": identity_of(workload), "system": system,
            "definition": f"{workload} devices=4 nodes=2 precision=bf16 preset=reference",
            "created_ns": night_ns(day, 1 + number / 4), "commit": f"{day // 7:040x}",
            "nodes": tuple(sorted(dice.sample([n for n in NODES if n not in unfit], 2))), "judged": JUDGED,
            "node_hours": 0.5, "vetting": RecordedVetting("quick", 20.0, NODES, unfit),
        }  # fmt: skip
        if failure := self._failure(day, system, workload):
            failed = {"verdict": failure.partition(":")[0], "failure": failure, "measurement": None}
            yield record(ordinal, **{**fields, **failed})
            return
        values = [self._figures(dice, day, system, workload) for _ in range(5)]
        wanted = _regressed(values)
        attempts = values if _gate(values[0]) else values[:1]
        for attempt, figures in enumerate(attempts):
            verdict = "regressed" if wanted and attempt == 0 else "passed"
            yield record(ordinal + attempt, **{
                **fields, "attempt": attempt, "verdict": verdict, "created_ns": fields["created_ns"] + attempt * 60 * 10**9,
                "measurement": self._measured(figures, day, system),
            })  # fmt: skip

    def _failure(self, day: int, system: str, workload: str) -> str:
        """Return why a run has no figures, if it has none."""
        if _within(self.never, system, day):
            return "never_scheduled: Resources"
        broken = any(s == system and w == workload and a <= day < b for s, w, a, b in self.broken)
        return "worker_exit: rank 3 ended with exit code 1" if broken else ""

    def _figures(self, dice: random.Random, day: int, system: str, workload: str) -> tuple[float, float]:
        """Return effective and compute throughput: 100 and 125 samples/s when all is well."""
        hits = [one for one in self.slow if one.hits(day, system, workload)]
        compute_s = 0.8 * (1 + dice.gauss(0, self.noise))
        io_s = 0.2 * (1 + dice.gauss(0, self.noise))
        for one in hits:
            compute_s /= 1 - one.compute
            io_s += one.io * (compute_s + io_s)
        return 100 / (compute_s + io_s), 100 / compute_s

    def _measured(self, figures: tuple[float, float], day: int, system: str) -> object:
        effective, compute = figures
        drivers = {since: name for since, name in self.drivers.get(system, {}).items() if since <= day}
        more = (MetricValue("compute_throughput", compute, "samples/s", "higher"),)
        found = measurement(effective, name="effective_throughput", more=more)
        return dataclasses.replace(found, environment={"driver": drivers[max(drivers)] if drivers else "550"})

    def _unfit(self, system: str, day: int) -> dict[str, str]:
        nodes = [node for s, node, first, end in self.unfit if s == system and first <= day < end]
        return dict.fromkeys(nodes, "clock: 3 of 4 devices at 60 %")


def _within(spans: Sequence[tuple[str, int, int]], system: str, day: int) -> bool:
    return any(name == system and first <= day < end for name, first, end in spans)


def _gate(figures: tuple[float, float]) -> bool:
    """As the judge: 3 sigma, here 2.4 %, below the baseline."""
    return figures[0] < 97.6 or figures[1] < 125 * 0.976


def _regressed(values: Sequence[tuple[float, float]]) -> bool:
    """As the quorum: three of four re-runs beyond 0.6 of the fence's distance."""
    return _gate(values[0]) and sum(e < 100 * 0.9856 or c < 125 * 0.9856 for e, c in values[1:]) >= 3
