"""The last night of each system: what was ok, slow, broken, missing, and what needs a look. Pure."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Sequence

from pytest_mlhpc.history.series import Night
from pytest_mlhpc.report.html.model import KINDS, Bench, SystemNight, Trouble, kind_of

_HOUR_NS = 3600 * 10**9
#: What was recorded within this time of a system's newest record is of the same night: a night's queue ends by noon.
NIGHT_NS = 18 * _HOUR_NS
#: A benchmark that ran within this time before the last night, and not in it, is missing; what is older was given up.
EXPECTED_NS = 8 * 24 * _HOUR_NS
#: A system of which nothing was recorded for so long is stale: a day, and two hours of queueing (issue "over time").
STALE_NS = 26 * _HOUR_NS
#: Nights in a system's strip of past nights.
NIGHTS = 60


def systems(benches: Sequence[Bench], now_ns: int) -> tuple[SystemNight, ...]:
    """Return the last night of each system that has a record, by name."""
    groups: dict[str, list[Bench]] = {}
    for bench in benches:
        groups.setdefault(bench.key.system, []).append(bench)
    return tuple(_system(name, groups[name], now_ns) for name in sorted(groups))


def day(moment_ns: int) -> str:
    """Return the date of the night that a moment belongs to, UTC; a night that begins before midnight ends after it."""
    shifted = (moment_ns + 6 * _HOUR_NS) / 1e9
    return f"{dt.datetime.fromtimestamp(shifted, tz=dt.UTC):%Y-%m-%d}"


def _system(name: str, benches: Sequence[Bench], now_ns: int) -> SystemNight:
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
            troubles.append(Trouble(bench.id, kind, last.verdict, _reason(last, kind)))
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


def _counted(bench: Bench) -> list[Night]:
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
    return tuple((date, tuple(found[date][kind] for kind in KINDS)) for date in sorted(found)[-NIGHTS:])
