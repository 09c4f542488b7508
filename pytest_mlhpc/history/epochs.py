"""Baseline epochs: the time in which figures of a series may be compared without a second thought. Pure.

A new one begins with an accepted value, with an event that somebody noted, and with another definition or device model. By
events a level is explained; figures of two definitions are never compared at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pytest_mlhpc.history.events import Event
from pytest_mlhpc.history.series import Night, Point, Series
from pytest_mlhpc.store.definition import changed


def epoch_start(events: Sequence[Event], system: str, partition: str, accepted_ns: int, now_ns: int) -> int:
    """Return since when figures belong to the epoch of *now_ns*, in ns UTC.

    That is the newest of when the baseline was accepted and the events of the partition; events of the future do not count
    yet.
    """
    starts = (e.at_ns for e in events if e.concerns(system, partition) and e.at_ns <= now_ns)
    return max([accepted_ns, *starts])


@dataclass(frozen=True)
class Beginning:
    """When the present epoch of a series began, in ns UTC, and what changed then."""

    at_ns: int
    what: str


def began(before: Night, after: Night) -> str:
    """Return what changed from one night of a series to the next, if a new epoch begins there; empty if none does."""
    return changed(before.epoch, after.epoch)


def present(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return those of *points* whose figures may be compared with the newest."""
    if not points:
        return ()
    newest = points[-1].night.epoch
    return tuple(point for point in points if not changed(point.night.epoch, newest))


def beginning(points: Sequence[Point]) -> Beginning | None:
    """Return how the epoch of the newest of *points* began; None where nothing of another epoch lies before it."""
    for before, after in zip(reversed(points[:-1]), reversed(points), strict=False):
        if what := began(before.night, after.night):
            return Beginning(after.night.created_ns, what)
    return None


def of_series(events: Sequence[Event], series: Series) -> tuple[Event, ...]:
    """Return the events that start an epoch of *series*: those of its partition within its time, oldest first."""
    if not series.points:
        return ()
    last_ns = series.points[-1].night.created_ns
    found = (
        event
        for event in events
        if event.concerns(series.key.system, series.key.partition)
        and series.points[0].night.created_ns <= event.at_ns <= last_ns
    )
    return tuple(sorted(found, key=lambda event: event.at_ns))


def near(events: Sequence[Event], points: Sequence[Point], first: int, last: int) -> tuple[Event, ...]:
    """Return the events that may be what changed the level between the points *first* and *last* (inclusive), nearest first.

    People note an event by its day, or on the morning after: one night more on each side is looked at.
    """
    if not points:
        return ()
    key = points[0].night
    begin = points[max(0, first - 2)].night.created_ns
    end = points[min(len(points) - 1, last + 1)].night.created_ns
    middle = points[first].night.created_ns
    found = [e for e in events if e.concerns(key.system, key.partition) and begin < e.at_ns <= end]
    return tuple(sorted(found, key=lambda event: abs(event.at_ns - middle)))
