"""What a run's events say: values of keys, and how long what took. Pure.

Events are those of MLPerf's logs: ``X_start`` and ``X_stop`` enclose a phase; all else is a value at one time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pytest_mlhpc.node.protocol.schema import Event, Measurement

START, STOP = "_start", "_stop"
_NS = 1e9
#: More than this no counter holds, and no figure is.
_MOST = 2**63
_LARGEST = 1e300


class TimelineError(ValueError):
    """Events contradict themselves; the text says how."""


@dataclass(frozen=True)
class Interval:
    """From a start to its stop, ns UTC; ``number`` is the training epoch (``epoch_num``) where it is told."""

    start_ns: int
    stop_ns: int
    number: float | None = None

    @property
    def seconds(self) -> float:
        """How long it was."""
        return (self.stop_ns - self.start_ns) / _NS

    def within(self, other: Interval) -> float:
        """Return the seconds of it that lie in *other*."""
        return max(0, min(self.stop_ns, other.stop_ns) - max(self.start_ns, other.start_ns)) / _NS


def told(measurement: Measurement) -> tuple[Event, ...]:
    """Return the events of the lowest rank that told any, by time; those of one time stay in their order.

    Raises:
        TimelineError: one is at no time that a clock tells.
    """
    for report in sorted(measurement.per_rank, key=lambda one: one.rank):
        if report.events:
            if not all(0 <= event.time_ns < _MOST for event in report.events):
                raise TimelineError("an event is at a time that no clock tells")
            return tuple(sorted(report.events, key=lambda event: event.time_ns))
    return ()


def values(events: Sequence[Event], key: str) -> list[Any]:
    """Return all values of *key*, in order."""
    return [event.value for event in events if event.key == key]


def first(events: Sequence[Event], key: str) -> Any:
    """Return the first value of *key*, None where there is none."""
    return next(iter(values(events, key)), None)


def last(events: Sequence[Event], key: str) -> Any:
    """Return the last value of *key*, None where there is none."""
    return next(iter(reversed(values(events, key))), None)


def count(events: Sequence[Event], key: str) -> int | None:
    """Return the value of *key* as a whole number, None where it is none."""
    return whole(first(events, key))


def whole(value: Any) -> int | None:
    """Return *value* as a whole number from 0 on that any machine can count to, None where it is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST else None


def number(value: Any) -> float | None:
    """Return *value* as a finite figure, None where it is none."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or abs(value) >= _LARGEST:
        return None
    return float(value) if value == value else None  # noqa: PLR0124 - not so of NaN


def intervals(events: Sequence[Event], phase: str) -> list[Interval]:
    """Return the phases called *phase*, in order. The last one may lack its stop: the run ended in it, then so did the phase.

    Raises:
        TimelineError: a phase stops that has not started, or starts twice.
    """
    found: list[Interval] = []
    begun: Event | None = None
    for event in events:
        if event.key == phase + START:
            if begun is not None:
                raise TimelineError(f"{phase}_start twice without {phase}_stop between them")
            begun = event
        elif event.key == phase + STOP:
            if begun is None:
                raise TimelineError(f"{phase}_stop without {phase}_start")
            found.append(Interval(begun.time_ns, event.time_ns, _epoch(begun, event)))
            begun = None
    if begun is not None:
        end = next((event.time_ns for event in events if event.key == "run_stop"), events[-1].time_ns)
        found.append(Interval(begun.time_ns, max(begun.time_ns, end), _epoch(begun)))
    return found


def _epoch(*events: Event) -> float | None:
    return next((at for event in events if (at := number(event.metadata.get("epoch_num"))) is not None), None)


def total(some: Sequence[Interval]) -> float:
    """Return the seconds of all together."""
    return sum(one.seconds for one in some)
