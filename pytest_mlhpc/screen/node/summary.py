"""PAYLOAD, no torch. What samples of one node say of a timed window, as figures of a record. Pure functions.

Their names begin with ``telemetry_``; none is judged. What the node does not tell has no figure.
"""

from __future__ import annotations

from typing import Iterable, List, Optional, Sequence, Tuple

from pytest_mlhpc.results.schema import Figure
from pytest_mlhpc.screen.node.samples import DeviceSample, Sample

#: 0 degrees Celsius in kelvin.
ZERO_CELSIUS = 273.15


def window(samples: Sequence[Sample], begin_s: float, end_s: float) -> Sequence[Sample]:
    """Return the samples between two moments of the monotonic clock; all, if fewer than two lie there."""
    inside = [sample for sample in samples if begin_s <= sample.time_s <= end_s]
    return inside if len(inside) >= 2 else samples


def figures(samples: Sequence[Sample]) -> Tuple[Figure, ...]:
    """Return the figures of one node; of several nodes they are added, or the worst is taken, as each says.

    Nothing comes of fewer than two samples: rates need two.
    """
    if len(samples) < 2:
        return ()
    devices = [device for sample in samples for device in sample.devices]
    made = [
        _figure("telemetry_cores", _cores(samples), "1", "sum"),
        _figure("telemetry_memory", _memory(samples), "B", "max"),
        _figure("telemetry_read_rate", _read_rate(samples), "B/s", "sum"),
        _figure("telemetry_device_busy", _mean(device.busy for device in devices), "1", "mean"),
        _figure("telemetry_power", _power(samples), "W", "sum"),
        _figure("telemetry_temperature", _hottest(devices), "K", "max"),
        _figure("telemetry_clock", _mean(device.clock_hz for device in devices), "Hz", "min"),
        _figure("telemetry_cost", _cost(samples), "1", "max"),
    ]
    return tuple(figure for figure in made if figure is not None)


def _figure(name: str, value: Optional[float], unit: str, over: str) -> Optional[Figure]:
    return None if value is None else Figure(name, value, unit, "none", over)


def _seconds(samples: Sequence[Sample]) -> float:
    return max(samples[-1].time_s - samples[0].time_s, 1e-9)


def _cores(samples: Sequence[Sample]) -> float:
    """Return cores kept busy: what each process used from one look to the next, as processes come and go."""
    used = 0.0
    for before, after in zip(samples, samples[1:]):
        old = {(one.pid, one.start_ticks): one.cpu_s for one in before.processes}
        used += sum(
            max(0.0, one.cpu_s - old[one.pid, one.start_ticks])
            for one in after.processes
            if (one.pid, one.start_ticks) in old
        )
    return used / _seconds(samples)


def _memory(samples: Sequence[Sample]) -> float:
    return float(max(sum(one.rss_bytes for one in sample.processes) for sample in samples))


def _read_rate(samples: Sequence[Sample]) -> Optional[float]:
    read, known = 0, False
    for before, after in zip(samples, samples[1:]):
        old = {(one.pid, one.start_ticks): one.read_bytes for one in before.processes}
        for one in after.processes:
            earlier = old.get((one.pid, one.start_ticks))
            if one.read_bytes is not None and earlier is not None:
                read, known = read + max(0, one.read_bytes - earlier), True
    return read / _seconds(samples) if known else None


def _power(samples: Sequence[Sample]) -> Optional[float]:
    """Return the mean power of all devices together, from looks that tell all of them."""
    sums = []
    for sample in samples:
        powers = [device.power_w for device in sample.devices if device.power_w is not None]
        if powers and len(powers) == len(sample.devices):
            sums.append(sum(powers))
    return _mean(sums)


def _hottest(devices: Sequence[DeviceSample]) -> Optional[float]:
    known = [device.celsius for device in devices if device.celsius is not None]
    return max(known) + ZERO_CELSIUS if known else None


def _cost(samples: Sequence[Sample]) -> float:
    return sum(sample.cost_s for sample in samples[1:]) / _seconds(samples)


def _mean(values: Iterable[Optional[float]]) -> Optional[float]:
    known: List[float] = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
