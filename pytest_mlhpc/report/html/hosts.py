"""Nodes and systems of the report: what ran on each node, and the last night of each system."""

from __future__ import annotations

import datetime as dt
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from pytest_mlhpc.history.series import Night
from pytest_mlhpc.judge.baseline_files import TOLERANCE
from pytest_mlhpc.report.html.model import KINDS, BenchmarkIssue, BenchmarkNights, Host, SystemNight, kind_of

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
#: Figures that a node's deviation is the median of: the newest, so that what was repaired looks repaired.
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
    counted: set[tuple[str, str, str]] = (
        set()
    )  # session, host, reason: a packed vetting is in each run's record
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
