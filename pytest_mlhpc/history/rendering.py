"""How series and shifts become text. Pure."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Sequence
from typing import Any

from pytest_mlhpc.history.events import Event
from pytest_mlhpc.history.level_changes import Cause, Shift
from pytest_mlhpc.history.series import Night
from pytest_mlhpc.node.files import clean
from pytest_mlhpc.node.protocol.schema import to_json
from pytest_mlhpc.store.record import SeriesKey
from pytest_mlhpc.store.text import from_to, iso, minutes

_BARS = "▁▂▃▄▅▆▇█"
#: The least that a sparkline spans, as a share of the level.
_LEAST_SPAN = 0.1


def line(text: str, width: int = 240) -> str:
    """Return *text* as one line of output, with its indentation, safe to print, cut to *width* characters."""
    flat = clean(text).rstrip().replace("\n", " ")
    return (flat if len(flat) <= width else f"{flat[: width - 3]}...") + "\n"


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """Return the newest *width* values as bars; a blank where there is no number.

    The scale spans at least a tenth of their level, so that noise appears as small as it is.
    """
    recent = values[-width:]
    finite = [value for value in recent if math.isfinite(value)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    span = max(high - low, _LEAST_SPAN * abs(statistics.median(finite)))
    low -= (span - (high - low)) / 2
    return "".join(_bar(value, low, span / len(_BARS)) for value in recent)


def _bar(value: float, low: float, step: float) -> str:
    if not math.isfinite(value):
        return " "
    if not step or not math.isfinite(step):
        return _BARS[len(_BARS) // 2]
    return _BARS[max(0, min(int((value - low) / step), len(_BARS) - 1))]


def place(key: SeriesKey) -> str:
    """Return where a series is measured: ``system:partition``, and the environment where it is no usual name."""
    where = f"{key.system}:{key.partition}"
    return where if key.environment in {"", "default"} else f"{where} ({key.environment})"


def percent(share: float) -> str:
    """Return a relative size, never more exact than it is known."""
    if not math.isfinite(share):
        return "from zero"
    return f"{share:.1%}"


def change(shift: Shift) -> str:
    """Return what a shift did: ``5.2% worse, 103 -> 97.6 samples/s``."""
    levels = from_to(shift.before, shift.after, shift.unit)
    if shift.better == "none":
        return f"{percent(shift.worse_by)} different, {levels}"
    return f"{percent(abs(shift.worse_by))} {'worse' if shift.worse else 'better'}, {levels}"


def nights(shift: Shift) -> str:
    """Return since when: one night, or from which to which."""
    if shift.first.id == shift.last.id:
        return minutes(shift.at.created_ns)
    return f"{minutes(shift.at.created_ns)} (between {minutes(shift.first.created_ns)} and {minutes(shift.last.created_ns)})"


def reasons(shift: Shift) -> list[str]:
    """Return what may have caused a shift: events that people noted, then what was recorded; at least one line."""
    lines = [event_line(event) for event in shift.events]
    lines += [f"changed there: {short(cause)}" for cause in shift.causes]
    if not shift.causes:
        lines.append(
            "nothing recorded changed there: same commit, same environment. Suspect the system, not the code"
            if shift.at.commit
            else "nothing recorded changed there; the commit is not known"
        )
    return lines


def history_command(key: SeriesKey) -> str:
    """Return the command that shows the nights of a series."""
    return shlex.join(["mlhpc", "history", key.benchmark, "--system", key.system, "--metric", key.metric])


def event_line(event: Event) -> str:
    """Return an event as one line."""
    return f"event {event.id}, {minutes(event.at_ns)}: {event.text}"


def short(cause: Cause, most: int = 12) -> str:
    """Return a cause; hashes of commits are cut."""
    if cause.name != "commit":
        return str(cause)
    return str(Cause(cause.name, cause.before[:most], cause.after[:most]))


def where_of(night: Night) -> str:
    """Return the nodes of a night."""
    return "+".join(night.nodes)


def shift_json(shift: Shift) -> dict[str, Any]:
    """Return a shift for programs; its nights by id and time."""
    return {
        **{name: getattr(shift.key, name) for name in shift.key.__dataclass_fields__},
        "unit": shift.unit,
        "better": shift.better,
        "judged": shift.judged,
        "before": shift.before,
        "after": shift.after,
        "worse_by": shift.worse_by if shift.before else None,
        "confidence": shift.confidence,
        **{
            name: {
                "record": night.id,
                "time": iso(night.created_ns),
                "commit": night.commit,
                "nodes": list(night.nodes),
            }
            for name, night in (("at", shift.at), ("first", shift.first), ("last", shift.last))
        },
        "causes": [to_json(cause) for cause in shift.causes],
        "events": [to_json(event) for event in shift.events],
    }
