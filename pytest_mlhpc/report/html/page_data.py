"""From a source of history to all that a page shows: benchmarks, nodes, systems. Pure but for what it reads of the source."""

from __future__ import annotations

import datetime as dt
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pytest_mlhpc.history.events import Event
from pytest_mlhpc.history.level_changes import NightlyQuery, WatchedSeries, watch
from pytest_mlhpc.history.series import Night, Series, Source
from pytest_mlhpc.judge.baseline_files import TOLERANCE, Entry
from pytest_mlhpc.report import keys
from pytest_mlhpc.report.html import rows
from pytest_mlhpc.report.html.page import (
    KINDS,
    BenchmarkIssue,
    BenchmarkNights,
    Host,
    Page,
    SystemMark,
    SystemNight,
    kind_of,
    split_of,
)
from pytest_mlhpc.store.record import SeriesKey

_HOUR_NS = 3600 * 10**9
#: What was recorded within this time of a system's newest record is of the same night: a night's queue ends by noon.
NIGHT_NS = 18 * _HOUR_NS
#: A benchmark that ran within this time before the last night, and not in it, is missing; what is older was given up.
EXPECTED_NS = 8 * 24 * _HOUR_NS
#: A system of which nothing was recorded for so long is stale: a day, and two hours of queueing (issue "over time").
STALE_NS = 26 * _HOUR_NS
#: Nights in a system's strip of past nights.
OVERVIEW_NIGHTS = 60


def systems(benches: Sequence[BenchmarkNights], now_ns: int) -> tuple[SystemNight, ...]:
    """Return the last night of each system that has a record, by name."""
    groups: dict[str, list[BenchmarkNights]] = {}
    for bench in benches:
        groups.setdefault(bench.key.system, []).append(bench)
    return tuple(_system(name, groups[name], now_ns) for name in sorted(groups))


def day(moment_ns: int) -> str:
    """Return the date of the night that a moment belongs to, UTC; a night that begins before midnight ends after it."""
    shifted = (moment_ns + 6 * _HOUR_NS) / 1e9
    return f"{dt.datetime.fromtimestamp(shifted, tz=dt.UTC):%Y-%m-%d}"


def _system(name: str, benches: Sequence[BenchmarkNights], now_ns: int) -> SystemNight:
    counted = [(bench, _counted(bench)) for bench in benches]
    every = [night for _bench, nights in counted for night in nights]
    ended_ns = max(night.created_ns for night in every)
    began_ns = ended_ns - NIGHT_NS
    tonight = [night for night in every if night.created_ns > began_ns]
    counts: Counter[str] = Counter()
    troubles = []
    for bench, nights in counted:
        last = nights[-1] if nights else None
        if last is None or last.created_ns <= began_ns - EXPECTED_NS:
            continue
        kind = kind_of(last.verdict) if last.created_ns > began_ns else "missing"
        counts[kind] += 1
        if kind != "ok":
            troubles.append(BenchmarkIssue(bench.id, kind, last.verdict, _reason(last, kind)))
    order = {kind: place for place, kind in enumerate(("slow", "broken", "machine", "missing", "unsure"))}
    return SystemNight(
        system=name,
        started_ns=min(night.created_ns for night in tonight),
        ended_ns=ended_ns,
        counts={kind: counts[kind] for kind in KINDS if counts[kind]},
        troubles=tuple(sorted(troubles, key=lambda one: order[one.kind])),
        node_hours=sum(
            night.node_hours for bench in benches for night in bench.nights if night.created_ns > began_ns
        ),
        unfit={host: reason for night in tonight for host, reason in night.unfit.items()},
        stale=now_ns - ended_ns > STALE_NS,
        days=_days(every),
    )


def _counted(bench: BenchmarkNights) -> list[Night]:
    """Return the nights of a bench that say how its system does: watched ones, or where it has none, all first attempts."""
    watched = [night for night, counts in zip(bench.nights, bench.watched, strict=True) if counts]
    return watched or [night for night in bench.nights if night.attempt == 0] or list(bench.nights)


def _reason(night: Night, kind: str) -> str:
    if kind == "missing":
        return f"not recorded since {day(night.created_ns)}"
    return night.failure.strip().partition("\n")[0][:300]


def _days(nights: Sequence[Night]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    found: dict[str, Counter[str]] = {}
    for night in nights:
        found.setdefault(day(night.created_ns), Counter())[kind_of(night.verdict)] += 1
    return tuple(
        (date, tuple(found[date][kind] for kind in KINDS)) for date in sorted(found)[-OVERVIEW_NIGHTS:]
    )


#: Nights in a node's strip.
NODE_NIGHTS = 30
#: Figures that a node's deviation is the median of: the newest, so that what was repaired appears repaired.
NEWEST = 40
#: Figures of one level from which it is a median of something.
FEWEST = 3
#: How bad a night is for the strip: the worst of a date is shown. Slow means 5 % slower than the series was then: a
#: system that became slower makes no node slow.
_ORDER = ("ok", "slow", "broken", "machine", "unfit")


@dataclass
class _HostNights:
    runs: int = 0
    failed: int = 0
    last_ns: int = 0
    drops: list[tuple[int, float]] = field(default_factory=list)
    unfit: int = 0
    reason: str = ""
    reason_ns: int = 0
    days: dict[str, str] = field(default_factory=dict)

    def note(self, date: str, kind: str) -> None:
        before = self.days.get(date, "ok")
        self.days[date] = max(before, kind, key=_ORDER.index)


def hosts(benches: Sequence[BenchmarkNights]) -> tuple[Host, ...]:
    """Return all nodes that any record names, those with trouble first within a system."""
    by_host: dict[tuple[str, str], _HostNights] = {}
    # session, host, reason: a packed vetting is in each run's record
    counted: set[tuple[str, str, str]] = set()
    for bench in benches:
        changes = _changes(bench)
        for place, night in enumerate(bench.nights):
            for name in night.nodes:
                _ran(by_host.setdefault((night.system, name), _HostNights()), night, changes[place])
            for name, reason in night.unfit.items():
                mark = (night.session, name, reason)
                _left_out(
                    by_host.setdefault((night.system, name), _HostNights()),
                    night,
                    reason,
                    new=mark not in counted,
                )
                counted.add(mark)
    found = [_host(system, name, one) for (system, name), one in by_host.items()]
    return tuple(sorted(found, key=lambda host: (host.system, -host.unfit, host.deviation or 0.0, host.name)))


def _ran(one: _HostNights, night: Night, changes: Sequence[float]) -> None:
    kind = kind_of(night.verdict)
    one.runs += 1
    one.failed += kind in {"broken", "machine"}
    one.last_ns = max(one.last_ns, night.created_ns)
    slow = len(night.nodes) == 1 and any(change < -TOLERANCE for change in changes)
    one.note(day(night.created_ns), kind if kind in {"broken", "machine"} else "slow" if slow else "ok")
    if len(night.nodes) == 1:
        one.drops += [(night.created_ns, change) for change in changes]


def _left_out(one: _HostNights, night: Night, reason: str, *, new: bool) -> None:
    one.unfit += new
    one.last_ns = max(one.last_ns, night.created_ns)
    one.note(day(night.created_ns), "unfit")
    if night.created_ns >= one.reason_ns:
        one.reason, one.reason_ns = reason, night.created_ns


def _changes(bench: BenchmarkNights) -> list[list[float]]:
    """Return for each night how far its judged figures lie from the level of their series then, positive when better."""
    found: list[list[float]] = [[] for _night in bench.nights]
    for row in bench.rows:
        if not row.judged or row.better == "none":
            continue
        sign = 1.0 if row.better == "higher" else -1.0
        edges = [0, *(shift.index for shift in row.shifts), len(row.values)]
        for begin, end in itertools.pairwise(edges):
            values = [value for value in row.values[begin:end] if value is not None]
            level = statistics.median(values) if len(values) >= FEWEST else 0.0
            if not 0 < level < math.inf:  # the mean of two middle ones can overflow
                continue
            for place in range(begin, end):
                if (value := row.values[place]) is not None:
                    found[place].append(sign * (value - level) / level)
    return found


def _host(system: str, name: str, one: _HostNights) -> Host:
    newest = [change for _at, change in sorted(one.drops)[-NEWEST:]]
    return Host(
        system=system,
        name=name,
        runs=one.runs,
        failed=one.failed,
        last_ns=one.last_ns,
        deviation=statistics.median(newest) if newest else None,
        figures=len(newest),
        unfit=one.unfit,
        reason=one.reason,
        reason_ns=one.reason_ns,
        days=tuple((date, one.days[date]) for date in sorted(one.days)[-NODE_NIGHTS:]),
    )


#: Figures on one page, at most, before those that no test is judged by are left out: some 35 bytes each in the file.
MOST_FIGURES = 400_000
#: Metrics that other parts of the page are made of; they stay as long as judged ones do.
NEEDED = frozenset(
    {"epoch_time", "io_time", "exposed_communication_time", "step_time", "effective_throughput"}
)


@dataclass(frozen=True)
class PageQuery:
    """What the page is asked to show: moments in ns UTC; empty texts choose everything."""

    now_ns: int
    since_ns: int = 0
    system: str = ""
    benchmark: str = ""
    metrics: frozenset[str] = frozenset()
    default_branch: str = "main"
    title: str = "Benchmarks"
    source: str = "local"
    links: Mapping[str, str] = field(default_factory=dict)


def gather(
    source: Source,
    wanted: PageQuery,
    entries: Mapping[SeriesKey, Entry],
    events: Sequence[Event] = (),
) -> Page | None:
    """Return what *wanted* asks for, or None where nothing is recorded.

    Raises:
        StoreError: the history cannot be read.
    """
    nights = _nights(source, wanted)
    if not nights:
        return None
    found, notes = _chosen(_series(source, wanted), wanted.metrics)
    benchmarks = {key: keys.benchmark_of(max(some, key=_time)) for key, some in nights.items()}
    labels = keys.labels(sorted(set(benchmarks.values())))[1]
    known = rows.KnownSeries(
        entries, _watched(found, events, wanted.default_branch), events, wanted.default_branch
    )
    benches = [
        rows.make_bench(key, labels[benchmarks[key]], nights[key], found.get(key, ()), known)
        for key in sorted(nights, key=_order)
    ]
    return Page(
        title=wanted.title,
        made_ns=wanted.now_ns,
        since_ns=max(wanted.since_ns, min(night.created_ns for some in nights.values() for night in some)),
        source=wanted.source,
        benches=tuple(benches),
        systems=systems(benches, wanted.now_ns),
        marks=tuple(_marks(events, benches, wanted)),
        splits=tuple(one for bench in benches if (one := split_of(bench)) is not None),
        scaling=rows.plots(benches),
        hosts=hosts(benches),
        notes=tuple(notes),
        links=wanted.links,
    )


def _nights(source: Source, wanted: PageQuery) -> dict[SeriesKey, list[Night]]:
    found: dict[SeriesKey, list[Night]] = {}
    for night in source.nights(wanted.since_ns):
        if (not wanted.system or night.system == wanted.system) and keys.benchmark_of(night).holds(
            wanted.benchmark
        ):
            found.setdefault(night.series(""), []).append(night)
    return found


def _series(source: Source, wanted: PageQuery) -> dict[SeriesKey, list[Series]]:
    found: dict[SeriesKey, list[Series]] = {}
    for one in source.series(wanted.since_ns, system=wanted.system):
        newest = one.points[-1].night
        if keys.benchmark_of(newest).holds(wanted.benchmark):
            found.setdefault(rows.identity(one.key), []).append(one)
    return found


def _chosen(
    found: dict[SeriesKey, list[Series]], metrics: frozenset[str]
) -> tuple[dict[SeriesKey, list[Series]], list[str]]:
    """Return the series to show: those asked for, else all that fit in a page, judged ones first."""
    if metrics:
        return {key: [one for one in some if one.key.metric in metrics] for key, some in found.items()}, []
    figures = sum(len(one.points) for some in found.values() for one in some)
    if figures <= MOST_FIGURES:
        return found, []
    data = {
        key: [one for one in some if one.judged or one.key.metric in NEEDED] for key, some in found.items()
    }
    note = (
        f"{figures:,} figures are more than a page holds: only metrics that tests are judged by are shown; "
        "others with --metric NAME, or choose a --system, a --benchmark or a later --since"
    )
    return data, [note]


def _time(night: Night) -> tuple[int, str]:
    return night.created_ns, night.id


def _order(key: SeriesKey) -> tuple[object, ...]:
    return key.system, key.partition, keys.natural(key.benchmark), key.environment, key.fingerprint


def _marks(
    events: Sequence[Event], benches: Sequence[BenchmarkNights], wanted: PageQuery
) -> list[SystemMark]:
    systems = {bench.key.system for bench in benches}
    return [
        SystemMark(event.at_ns, event.system, event.partition, event.label)
        for event in sorted(events, key=lambda event: event.at_ns)
        if event.system in systems and event.at_ns >= wanted.since_ns
    ]


class _ReadSource:
    """The source again, of what was read of it: what is watched over nights is found in the same way for every reader."""

    def __init__(self, found: Mapping[SeriesKey, Sequence[Series]]) -> None:
        self._found = found

    def nights(self, since_ns: int = 0, until_ns: int | None = None) -> Iterator[Night]:
        """Yield none: nobody asks."""
        del since_ns, until_ns
        yield from ()

    def series(
        self, since_ns: int = 0, until_ns: int | None = None, *, system: str = "", benchmark: str = ""
    ) -> Iterator[Series]:
        """Yield all that have a direction, as no other change is good or bad; they were chosen when they were read."""
        del since_ns, until_ns, system, benchmark
        for some in self._found.values():
            yield from (one for one in some if one.better != "none")


def _watched(
    found: Mapping[SeriesKey, Sequence[Series]], events: Sequence[Event], default_branch: str
) -> dict[SeriesKey, WatchedSeries]:
    query = NightlyQuery(default_branch=default_branch)
    return {one.series.key: one for one in watch(_ReadSource(found), query, events)}
