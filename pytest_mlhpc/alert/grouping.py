"""What has one cause is one incident. Pure.

Regressions that began in the same night on one system belong together: all of them where most of its benchmarks are
slower, else those whose I/O, communication or computing is. The same benchmark slower on several systems in the same
night is the code's doing, and one incident too. What is stale, broken or unfit is one incident for each system and night.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pytest_mlhpc.alert.channels.base import Kind
from pytest_mlhpc.alert.model import DAY_NS, Bad, Incident

#: Change points of one cause are found up to so far apart: the night before or after. Nights begin at other hours, too.
TOLERANCE_NS = DAY_NS * 3 // 2
#: What is found later is of the same cause if it began in the same night or the next one: whoever falls two nights later has
#: another cause, and is told. Half a day, as nights begin at other hours.
LATE_NS = DAY_NS // 2
#: From this share of a system's benchmarks on, and from three of them on, it is the system.
MOST, FEWEST = 0.6, 3
#: Metrics that say that reading or writing is slower, or sending.
IO_METRICS = frozenset({
    "io_time", "read_time", "wait_time", "copy_time", "exposed_copy_time", "compute_fraction", "write_bandwidth",
    "read_bandwidth", "create_rate", "small_read_rate",
})  # fmt: skip
COMMUNICATION_METRICS = frozenset({"latency", "bus_bandwidth", "exposed_communication_time"})
#: A loss of the whole is explained by computing if that lost at least this share of it.
EXPLAINS = 0.5


@dataclass(frozen=True)
class Group:
    """Bads of one cause."""

    kind: Kind
    scope: str
    bads: tuple[Bad, ...]

    @property
    def systems(self) -> tuple[str, ...]:
        """Sorted."""
        return tuple(sorted({bad.subject.system for bad in self.bads}))

    @property
    def benchmarks(self) -> tuple[str, ...]:
        """Sorted; empty for nodes."""
        return benchmarks(self.bads)


def benchmarks(bads: Iterable[Bad]) -> tuple[str, ...]:
    """Return the benchmarks of *bads*, sorted, those of several systems told apart."""
    return tuple(sorted({place(bad) for bad in bads if bad.subject.benchmark}))


def place(bad: Bad) -> str:
    """Return a benchmark with its system and partition."""
    return f"{bad.subject.system}:{bad.subject.partition}:{bad.subject.benchmark}"


def joins(bad: Bad, incident: Incident) -> bool:
    """Whether *bad*, found tonight, is a late part of what an incident told already."""
    if bad.subject.kind is not incident.kind:
        return False
    if bad.first_ns - LATE_NS > incident.last_ns or incident.first_ns > bad.last_ns + LATE_NS:
        return False
    if incident.scope == "code":
        told = {member.told.subject.benchmark for member in incident.members}
        return bad.subject.benchmark in told
    return (bad.subject.system,) == incident.systems


def groups(bads: Sequence[Bad], measured: Mapping[str, Collection[str]]) -> list[Group]:
    """Return *bads* by cause, in a fixed order. *measured* are the benchmarks of each system."""
    found: list[Group] = []
    for kind in Kind:
        mine = sorted((bad for bad in bads if bad.subject.kind is kind), key=lambda bad: bad.subject)
        if kind is Kind.REGRESSION:
            found += _regressions(mine, measured)
        else:
            found += [Group(kind, kind.value, part) for part in by_time(by_system(mine))]
    return found


def _regressions(bads: Sequence[Bad], measured: Mapping[str, Collection[str]]) -> list[Group]:
    code, rest = _by_code(bads)
    found = [Group(Kind.REGRESSION, "code", part) for part in code]
    for part in by_time(by_system(rest)):
        found += _by_class(part, len(measured.get(part[0].subject.system, ())))
    return found


def _by_code(bads: Sequence[Bad]) -> tuple[list[tuple[Bad, ...]], list[Bad]]:
    """Return what several systems have in common, by night, and the rest."""
    parts: list[tuple[Bad, ...]] = []
    rest: list[Bad] = []
    for part in by_time([tuple(bads)] if bads else []):
        systems: dict[str, set[str]] = {}
        for bad in part:
            systems.setdefault(bad.subject.benchmark, set()).add(bad.subject.system)
        shared = {benchmark for benchmark, where in systems.items() if len(where) > 1}
        common = tuple(bad for bad in part if bad.subject.benchmark in shared)
        if common:
            parts.append(common)
        rest += [bad for bad in part if bad.subject.benchmark not in shared]
    return parts, rest


def _by_class(bads: Sequence[Bad], measured: int) -> list[Group]:
    classes: dict[str, list[Bad]] = {}
    for benchmark in benchmarks(bads):
        mine = [bad for bad in bads if place(bad) == benchmark]
        classes.setdefault(class_of(mine), []).extend(mine)
    affected = len(benchmarks(bads))
    if affected >= FEWEST and affected >= MOST * measured and set(classes) != {"io"}:
        return [Group(Kind.REGRESSION, "all", tuple(bads))]
    return [Group(Kind.REGRESSION, name, tuple(part)) for name, part in sorted(classes.items())]


def class_of(bads: Sequence[Bad]) -> str:
    """Return what is slower of one benchmark: ``io``, ``communication`` or ``benchmarks`` (computing, or unknown)."""
    losses = {bad.subject.metric: bad.worse_by for bad in bads}
    names = losses.keys()
    if names <= IO_METRICS:
        return "io"
    if names <= COMMUNICATION_METRICS:
        return "communication"
    whole = losses.get("effective_throughput", 0.0)
    if names <= {"effective_throughput"} | IO_METRICS and whole:
        return "io"
    if whole and losses.get("compute_throughput", 0.0) < EXPLAINS * whole:
        return "io"
    return "benchmarks"


def by_system(bads: Sequence[Bad]) -> list[tuple[Bad, ...]]:
    """Return the bads of each system, in its name's order."""
    systems: dict[str, list[Bad]] = {}
    for bad in bads:
        systems.setdefault(bad.subject.system, []).append(bad)
    return [tuple(part) for _name, part in sorted(systems.items())]


def by_time(parts: Iterable[Sequence[Bad]]) -> list[tuple[Bad, ...]]:
    """Split each part into those that may have begun in one night, oldest first."""
    found: list[tuple[Bad, ...]] = []
    for part in parts:
        night: list[Bad] = []
        for bad in sorted(part, key=lambda bad: (bad.last_ns, bad.subject)):
            if night and bad.last_ns - night[0].last_ns > TOLERANCE_NS:
                found.append(tuple(night))
                night = []
            night.append(bad)
        if night:
            found.append(tuple(night))
    return found
