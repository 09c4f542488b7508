"""The pass over all series: where a level changed, since which night, and what else changed there.

A SQLite file beside the store's index. An entry says of which figures it is, so that what is stale is never used; whatever
is wrong with the file (locked, read-only, damaged, killed in the middle of a write), the pass computes everything anew.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import math
import os
import sqlite3
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path

from pytest_mlhpc.history.events import (
    Beginning,
    Event,
    epoch_beginning,
    events_near,
    events_of_series,
    present_epoch,
)
from pytest_mlhpc.history.series import Night, Point, Series, Source, feeds
from pytest_mlhpc.judge import changes as detection
from pytest_mlhpc.judge.changes import Change, find_all
from pytest_mlhpc.judge.fence import Detector
from pytest_mlhpc.node.files import read_json
from pytest_mlhpc.store.locations import index_path
from pytest_mlhpc.store.record import SeriesKey

#: Part of what an entry is of: another detector never reads ours.
VERSION = 1
#: What nobody has asked for so long is taken away, in seconds.
KEPT_S = 60 * 86_400
#: Another process may write as long as this, in seconds; then we go on without.
WAIT_S = 2.0

_TABLE = "CREATE TABLE IF NOT EXISTS changes (series TEXT PRIMARY KEY, figures BLOB, found TEXT, used INTEGER) WITHOUT ROWID"


def cache_path(state_dir: Path) -> Path:
    """Return this user's cache of a state directory: on a local disk, as its index."""
    return index_path(state_dir).with_name(f"changes-v{VERSION}-{os.getuid()}.sqlite")


class Cache:
    """What *detector* found in series, by key and figures. No method raises: what fails is as if it were empty."""

    def __init__(self, path: Path, detector: Detector) -> None:
        self._path = path
        self._detector = f"{_code()} {astuple(detector)}"
        self._database: sqlite3.Connection | None = None
        if not self._open():
            self._open()

    def _open(self) -> bool:
        """Return False where a damaged file was in the way, which is gone now."""
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._database = sqlite3.connect(self._path, timeout=WAIT_S, isolation_level=None)
            self._database.execute("PRAGMA synchronous = OFF")  # what is lost is computed again
            self._database.execute(_TABLE)
        except sqlite3.OperationalError:
            self.close()  # it cannot be written here, or somebody else is writing: go on without
        except sqlite3.DatabaseError:
            self._forget()
            return False
        return True

    def get(
        self, keys: Sequence[SeriesKey], values: Sequence[Sequence[float]]
    ) -> list[tuple[Change, ...] | None]:
        """Return the changes of each series, None where they are not known."""
        return [self._one(key, figures) for key, figures in zip(keys, values, strict=True)]

    def put(self, found: Iterable[tuple[SeriesKey, Sequence[float], tuple[Change, ...]]]) -> None:
        """Keep the changes of series with these figures."""
        now = int(time.time())
        rows = [
            (self._name(key), _digest(figures), json.dumps([asdict(change) for change in changes]), now)
            for key, figures, changes in found
        ]
        if self._database is None or not rows:
            return
        try:
            self._database.execute("BEGIN IMMEDIATE")
            self._database.executemany("INSERT OR REPLACE INTO changes VALUES (?, ?, ?, ?)", rows)
            self._database.execute("DELETE FROM changes WHERE used < ?", (now - KEPT_S,))
            self._database.execute("COMMIT")
        except (sqlite3.Error, ValueError):
            self.close()

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._database is not None:
            with contextlib.suppress(sqlite3.Error):
                self._database.close()
            self._database = None

    def _one(self, key: SeriesKey, figures: Sequence[float]) -> tuple[Change, ...] | None:
        if self._database is None:
            return None
        query = "SELECT figures, found FROM changes WHERE series = ?"
        try:
            row = self._database.execute(query, (self._name(key),)).fetchone()
            if row is None or row[0] != _digest(figures):
                return None
            return tuple(Change(**change) for change in read_json(row[1]))
        except sqlite3.DatabaseError:
            self._forget()
        except (ValueError, TypeError):  # damaged: it is written anew
            pass
        return None

    def _name(self, key: SeriesKey) -> str:
        return hashlib.sha256(json.dumps([VERSION, self._detector, *astuple(key)]).encode()).hexdigest()

    def _forget(self) -> None:
        """Remove a damaged file, its journal too: that would be played back into the next one."""
        self.close()
        for path in (self._path, self._path.with_name(f"{self._path.name}-journal")):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


@functools.cache
def _code() -> str:
    """Return a digest of the detector's code: what an earlier release has found is not what this one would."""
    folder = Path(detection.__file__).parent
    found = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


def _digest(figures: Sequence[float]) -> bytes:
    return hashlib.sha256(struct.pack(f"<{len(figures)}d", *figures)).digest()


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
    """A commit is another one each night: what counts is that no value stands on both sides; the nearest two are reported."""
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
    return Cause("nodes", _some_hosts(earlier), _some_hosts(later))


def _hosts(nights: Iterable[Night]) -> Counter[str]:
    return Counter(host for night in nights for host in night.nodes)


def _some_hosts(hosts: Counter[str]) -> str:
    first, rest = sorted(hosts)[:4], len(hosts) - 4
    return "+".join(first) + (f" and {rest} more" if rest > 0 else "")


#: Nights of a series that are examined, newest: almost three years. What lies before them was reported long ago.
MOST_NIGHTS = 1000
#: Series that go through the detector at a time: a few MB, and enough for its arrays.
PORTION = 512


@dataclass(frozen=True)
class Shift:
    """A lasting change of level of one series, dated by nights.

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

    The points are of the present epoch, which ``began`` after nights of another one, if there were some. ``changes`` are the same shifts as the detector returns them: indices into ``series.points``.
    """

    series: Series
    changes: tuple[Change, ...] = ()
    shifts: tuple[Shift, ...] = ()
    events: tuple[Event, ...] = ()
    began: Beginning | None = None


@dataclass(frozen=True)
class NightlyQuery:
    """What a pass examines. ``judged_only`` leaves out metrics by which no test fails."""

    since_ns: int = 0
    until_ns: int | None = None
    system: str = ""
    benchmark: str = ""
    default_branch: str = "main"
    judged_only: bool = False
    detector: Detector = field(default_factory=Detector)


def watch(
    source: Source, query: NightlyQuery | None = None, events: Sequence[Event] = (), cache: Path | None = None
) -> Iterator[WatchedSeries]:
    """Yield all series that *query* asks for, by key, with their shifts. Those without a watched night are left out.

    With *cache*, a file, what was computed is cached there for the next pass; it may be lost or damaged at any time.

    Raises:
        StoreError: the history cannot be read.
    """
    chosen = query or NightlyQuery()
    found = source.series(chosen.since_ns, chosen.until_ns, system=chosen.system, benchmark=chosen.benchmark)
    wanted = (one for one in found if one.judged or not chosen.judged_only)
    parts = (watched_part(one, chosen.default_branch) for one in wanted)
    nonempty = (one for one in parts if one.series.points)
    store = None
    try:
        for portion in _portions(nonempty, PORTION):
            store = store or (Cache(cache, chosen.detector) if cache else None)
            series = [one.series for one in portion]
            for one, changes in zip(portion, _changes(series, chosen.detector, store), strict=True):
                yield with_causes(one, changes, events)
    finally:
        if store:
            store.close()


def watched_part(series: Series, default_branch: str = "main") -> WatchedSeries:
    """Return *series* with only those of its newest points that are watched over nights, without its shifts."""
    points = [point for point in series.points if feeds(point.night, default_branch)]
    present = present_epoch(points)[-MOST_NIGHTS:]
    return WatchedSeries(replace(series, points=present), began=epoch_beginning(points))


def with_causes(
    watched: WatchedSeries, changes: Sequence[Change], events: Sequence[Event] = ()
) -> WatchedSeries:
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
