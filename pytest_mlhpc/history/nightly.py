"""The pass over all series: where did a level change, since which night, and what else changed there?

Streaming: a portion of the series at a time goes through the detector, which is fastest with many at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pytest_mlhpc.history import epochs
from pytest_mlhpc.history.cache import Cache
from pytest_mlhpc.history.causes import Cause, causes
from pytest_mlhpc.history.events import Event
from pytest_mlhpc.history.series import Night, Series, Source, feeds
from pytest_mlhpc.judge.changes import Change, find_all
from pytest_mlhpc.judge.fence import Detector
from pytest_mlhpc.store.record import SeriesKey

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
class Watched:
    """A series of which only the points remain that are watched over nights, with its shifts, oldest first.

    The points are of the present epoch, which ``began`` after nights of another one, if there were some. ``changes`` are the same shifts in the detector's words: indices into ``series.points``.
    """

    series: Series
    changes: tuple[Change, ...] = ()
    shifts: tuple[Shift, ...] = ()
    events: tuple[Event, ...] = ()
    began: epochs.Beginning | None = None


@dataclass(frozen=True)
class Look:
    """What a pass looks at. ``judged_only`` leaves out metrics by which no test fails."""

    since_ns: int = 0
    until_ns: int | None = None
    system: str = ""
    benchmark: str = ""
    default_branch: str = "main"
    judged_only: bool = False
    detector: Detector = field(default_factory=Detector)


def watch(
    source: Source, look: Look | None = None, events: Sequence[Event] = (), cache: Path | None = None
) -> Iterator[Watched]:
    """Yield all series that *look* asks for, by key, with their shifts. Those without a watched night are left out.

    With *cache*, a file, what was computed is kept there for the next pass; it may be lost or damaged at any time.

    Raises:
        StoreError: the history cannot be read.
    """
    chosen = look or Look()
    found = source.series(chosen.since_ns, chosen.until_ns, system=chosen.system, benchmark=chosen.benchmark)
    wanted = (one for one in found if one.judged or not chosen.judged_only)
    parts = (watched_part(one, chosen.default_branch) for one in wanted)
    kept = (one for one in parts if one.series.points)
    store = Cache(cache, chosen.detector) if cache else None
    try:
        for portion in _portions(kept, PORTION):
            series = [one.series for one in portion]
            for one, changes in zip(portion, _changes(series, chosen.detector, store), strict=True):
                yield told(one, changes, events)
    finally:
        if store:
            store.close()


def watched_part(series: Series, default_branch: str = "main") -> Watched:
    """Return *series* with only those of its newest points that are watched over nights, without its shifts."""
    points = [point for point in series.points if feeds(point.night, default_branch)]
    present = epochs.present(points)[-MOST_NIGHTS:]
    return Watched(replace(series, points=present), began=epochs.beginning(points))


def told(watched: Watched, changes: Sequence[Change], events: Sequence[Event] = ()) -> Watched:
    """Return *watched* with its *changes* in nights, and what else changed there."""
    series = watched.series
    shifts = tuple(_shift(series, change, events) for change in changes)
    noted = epochs.of_series(events, series)
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
        events=epochs.near(events, points, change.first, change.last),
    )


def worse_by(before: float, after: float, better: str) -> float:
    """Return the relative change, positive when worse; infinite from a level of zero."""
    if before == after:
        return 0.0
    size = (after - before) / abs(before) if before else math.copysign(math.inf, after - before)
    return {"higher": -size, "lower": size}.get(better, abs(size))


def _portions(watched: Iterable[Watched], size: int) -> Iterator[list[Watched]]:
    rest = iter(watched)
    while portion := list(itertools.islice(rest, size)):
        yield portion
