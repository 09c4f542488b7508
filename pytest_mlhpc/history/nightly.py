"""The pass over all series: where a level changed, since which night, and what else changed there."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pytest_mlhpc.history.cache import Cache
from pytest_mlhpc.history.events import (
    Beginning,
    Event,
    epoch_beginning,
    events_near,
    events_of_series,
    present_epoch,
)
from pytest_mlhpc.history.series import Night, Point, Series, Source, feeds
from pytest_mlhpc.judge.changes import Change, find_all
from pytest_mlhpc.judge.fence import Detector
from pytest_mlhpc.store.record import SeriesKey

#: Nights on each side whose environments are compared.
NIGHTS = 7
#: What is said of one change, at most.
MOST = 8
#: Said of the checkout, not of the machine; the commit says more.
_IGNORED = frozenset({"commit_changed"})


@dataclass(frozen=True)
class Cause:
    """Something that was *before* on all nights before and *after* on all nights after. Empty: it was not there."""

    name: str
    before: str
    after: str

    def __str__(self) -> str:
        """Return it for people, as ``driver 570 -> 580``."""
        return f"{self.name} {self.before or '(absent)'} -> {self.after or '(absent)'}"


def causes(points: Sequence[Point], first: int, last: int) -> tuple[Cause, ...]:
    """Return what differs between the nights before *first* and those from *last* on.

    The level changed at one of the points *first* to *last*, both inclusive. What had a value on nights of one side that it
    also had on the other is no candidate: it did not change with the level. Commit first, then the environment by name,
    nodes last.
    """
    before = [point.night for point in points[max(0, first - NIGHTS) : first]]
    after = [point.night for point in points[last : last + NIGHTS]]
    if not before or not after:
        return ()
    names = {name for night in (before[-1], after[0]) for name in night.changes} - _IGNORED
    found = [
        _differs("commit", before, after, lambda night: night.commit),
        *(_differs(name, before, after, _environment(name)) for name in sorted(names)),
        _nodes(before, after),
    ]
    return tuple([cause for cause in found if cause][:MOST])


def _environment(name: str) -> Callable[[Night], str]:
    return lambda night: night.changes.get(name, "")


def _differs(
    name: str, before: Sequence[Night], after: Sequence[Night], value: Callable[[Night], str]
) -> Cause | None:
    """A commit is another one each night: what counts is that no value stands on both sides; the nearest two are told."""
    if {value(night) for night in before} & {value(night) for night in after}:
        return None
    return Cause(name, value(before[-1]), value(after[0]))


def _nodes(before: Sequence[Night], after: Sequence[Night]) -> Cause | None:
    """Nodes are a candidate only where those after are always the same few: otherwise they are drawn by the scheduler."""
    earlier, later = _hosts(before), _hosts(after)
    if not earlier or not later or earlier.keys() & later.keys():
        return None
    if len(after) > 1 and max(later.values()) < len(after):
        return None
    return Cause("nodes", _words(earlier), _words(later))


def _hosts(nights: Iterable[Night]) -> Counter[str]:
    return Counter(host for night in nights for host in night.nodes)


def _words(hosts: Counter[str], most: int = 4) -> str:
    names = sorted(hosts)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return "+".join(names[:most]) + more


#: Nights of a series that are looked at, newest: almost three years. What lies before them was told long ago.
MOST_NIGHTS = 1000
#: Series that go through the detector at a time: a few MB, and enough for its arrays.
PORTION = 512


@dataclass(frozen=True)
class Shift:
    """A lasting change of level of one series, told in nights.

    ``at`` is the first night of the new level as far as one can tell; it is one of ``first`` to ``last``, both inclusive.
    ``before`` and ``after`` are the levels (medians) in the unit, ``worse_by`` the relative change, positive when worse
    (for a metric without a direction: the size of the change, always positive). ``causes`` are candidates, ``events`` what
    people noted near it, nearest first.
    """

    key: SeriesKey
    unit: str
    better: str
    judged: bool
    at: Night
    first: Night
    last: Night
    before: float
    after: float
    worse_by: float
    confidence: float
    causes: tuple[Cause, ...] = ()
    events: tuple[Event, ...] = ()

    @property
    def worse(self) -> bool:
        """Whether the new level is worse than the one before."""
        return self.better != "none" and self.worse_by > 0


@dataclass(frozen=True)
class WatchedSeries:
    """A series of which only the points remain that are watched over nights, with its shifts, oldest first.

    The points are of the present epoch, which ``began`` after nights of another one, if there were some. ``changes`` are the same shifts in the detector's words: indices into ``series.points``.
    """

    series: Series
    changes: tuple[Change, ...] = ()
    shifts: tuple[Shift, ...] = ()
    events: tuple[Event, ...] = ()
    began: Beginning | None = None


@dataclass(frozen=True)
class NightlyQuery:
    """What a pass looks at. ``judged_only`` leaves out metrics by which no test fails."""

    since_ns: int = 0
    until_ns: int | None = None
    system: str = ""
    benchmark: str = ""
    default_branch: str = "main"
    judged_only: bool = False
    detector: Detector = field(default_factory=Detector)


def watch(
    source: Source, look: NightlyQuery | None = None, events: Sequence[Event] = (), cache: Path | None = None
) -> Iterator[WatchedSeries]:
    """Yield all series that *look* asks for, by key, with their shifts. Those without a watched night are left out.

    With *cache*, a file, what was computed is kept there for the next pass; it may be lost or damaged at any time.

    Raises:
        StoreError: the history cannot be read.
    """
    chosen = look or NightlyQuery()
    found = source.series(chosen.since_ns, chosen.until_ns, system=chosen.system, benchmark=chosen.benchmark)
    wanted = (one for one in found if one.judged or not chosen.judged_only)
    parts = (watched_part(one, chosen.default_branch) for one in wanted)
    kept = (one for one in parts if one.series.points)
    store = None
    try:
        for portion in _portions(kept, PORTION):
            store = store or (Cache(cache, chosen.detector) if cache else None)
            series = [one.series for one in portion]
            for one, changes in zip(portion, _changes(series, chosen.detector, store), strict=True):
                yield told(one, changes, events)
    finally:
        if store:
            store.close()


def watched_part(series: Series, default_branch: str = "main") -> WatchedSeries:
    """Return *series* with only those of its newest points that are watched over nights, without its shifts."""
    points = [point for point in series.points if feeds(point.night, default_branch)]
    present = present_epoch(points)[-MOST_NIGHTS:]
    return WatchedSeries(replace(series, points=present), began=epoch_beginning(points))


def told(watched: WatchedSeries, changes: Sequence[Change], events: Sequence[Event] = ()) -> WatchedSeries:
    """Return *watched* with its *changes* in nights, and what else changed there."""
    series = watched.series
    shifts = tuple(_shift(series, change, events) for change in changes)
    noted = events_of_series(events, series)
    return replace(watched, changes=tuple(changes), shifts=shifts, events=noted)


def _changes(portion: Sequence[Series], detector: Detector, store: Cache | None) -> list[tuple[Change, ...]]:
    values = [[point.value for point in one.points] for one in portion]
    if store is None:
        return find_all(values, detector)
    known = store.get([one.key for one in portion], values)
    missing = [number for number, one in enumerate(known) if one is None]
    computed = dict(zip(missing, find_all([values[number] for number in missing], detector), strict=True))
    store.put([(portion[number].key, values[number], changes) for number, changes in computed.items()])
    return [computed[number] if one is None else one for number, one in enumerate(known)]


def _shift(series: Series, change: Change, events: Sequence[Event]) -> Shift:
    points = series.points
    return Shift(
        key=series.key,
        unit=series.unit,
        better=series.better,
        judged=series.judged,
        at=points[change.index].night,
        first=points[change.first].night,
        last=points[change.last].night,
        before=change.before,
        after=change.after,
        worse_by=worse_by(change.before, change.after, series.better),
        confidence=change.confidence,
        causes=causes(points, change.first, change.last),
        events=events_near(events, points, change.first, change.last),
    )


def worse_by(before: float, after: float, better: str) -> float:
    """Return the relative change, positive when worse; infinite from a level of zero."""
    if before == after:
        return 0.0
    size = (after - before) / abs(before) if before else math.copysign(math.inf, after - before)
    return {"higher": -size, "lower": size}.get(better, abs(size))


def _portions(watched: Iterable[WatchedSeries], size: int) -> Iterator[list[WatchedSeries]]:
    rest = iter(watched)
    while portion := list(itertools.islice(rest, size)):
        yield portion
