"""PAYLOAD, no torch. What looks at one node say of a timed window, as figures of a record. Pure functions.

Their names begin with ``telemetry_``; none is judged. What the node does not tell has no figure.
"""

from __future__ import annotations

from typing import Optional, Sequence, Tuple

from pytest_mlhpc.node.protocol.schema import Figure
from pytest_mlhpc.node.telemetry.looks import Look, Mean

#: 0 degrees Celsius in kelvin.
ZERO_CELSIUS = 273.15


def window(looks: Sequence[Look], begin_s: float, end_s: float) -> Sequence[Look]:
    """Return the looks between two moments of the monotonic clock; where fewer than two lie there, those around them too."""
    inside = [one for one in looks if begin_s <= one.time_s <= end_s]
    if len(inside) >= 2:
        return inside
    first = max((place for place, one in enumerate(looks) if one.time_s <= begin_s), default=0)
    last = next((place for place, one in enumerate(looks) if one.time_s >= end_s), len(looks) - 1)
    return looks[min(first, max(0, len(looks) - 2)) : max(last, 1) + 1]


def figures(looks: Sequence[Look]) -> Tuple[Figure, ...]:
    """Return the figures of one node; of several nodes they are added, or the worst is taken, as each says.

    Nothing comes of fewer than two looks: rates need two. What the first one tells of the time before it is no part of them.
    """
    if len(looks) < 2:
        return ()
    later = looks[1:]
    seconds = max(looks[-1].time_s - looks[0].time_s, 1e-9)
    reads = [one.read_bytes for one in later if one.read_bytes is not None]
    hottest = max((one.celsius for one in looks if one.celsius is not None), default=None)
    made = [
        _figure("telemetry_cores", sum(one.used_s for one in later) / seconds, "1", "sum"),
        _figure("telemetry_memory", float(max(one.rss_bytes for one in looks)), "B", "max"),
        _figure("telemetry_read_rate", sum(reads) / seconds if reads else None, "B/s", "sum"),
        _figure("telemetry_device_busy", _mean([one.busy for one in looks]), "1", "mean"),
        _figure("telemetry_power", _mean([one.power_w for one in looks]), "W", "sum"),
        _figure("telemetry_temperature", None if hottest is None else hottest + ZERO_CELSIUS, "K", "max"),
        _figure("telemetry_clock", _mean([one.clock_hz for one in looks]), "Hz", "min"),
        _figure("telemetry_cost", sum(one.cost_s for one in later) / seconds, "1", "max"),
    ]
    return tuple(figure for figure in made if figure is not None)


def _figure(name: str, value: Optional[float], unit: str, over: str) -> Optional[Figure]:
    return None if value is None else Figure(name, value, unit, "none", over)


def _mean(parts: Sequence[Mean]) -> Optional[float]:
    whole = sum(parts, Mean())
    return whole.total / whole.count if whole.count else None
