"""Was it the machine? What the calibration kernel and the contention figures of a run say about its speed."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_mlhpc.results.schema import Measurement

#: The calibration kernel itself is not repeatable below this; smaller moves correct nothing.
CALIBRATION_NOISE = 0.015


def calibration_rate(measurement: Measurement) -> float | None:
    """Return the mean rate of the calibration kernel around a run (1/s), or None where it was not run."""
    rates = [rate for rate in (measurement.calibration_before, measurement.calibration_after) if rate]
    return sum(rates) / len(rates) if rates else None


def speed(measurement: Measurement, reference: float | None) -> float:
    """Return how fast the machine was against *reference*; 1 where it is not known or within the kernel's noise."""
    rate = calibration_rate(measurement)
    if not rate or not reference:
        return 1.0
    ratio = rate / reference
    return 1.0 if abs(ratio - 1.0) < CALIBRATION_NOISE else ratio


def scaled(value: float, unit: str, ratio: float) -> float:
    """Return what *value* would have been on a machine that was not *ratio* times as fast; only rates and times scale."""
    if unit.endswith("/s"):
        return value / ratio
    return value * ratio if unit == "s" else value


def excused(value: float, unit: str, ratio: float) -> float:
    """Return *value* corrected for a slower machine.

    It only ever excuses: a machine that is faster than at the baseline corrects nothing, because one slow calibration
    back then would make every later run look bad.
    """
    return scaled(value, unit, ratio) if ratio < 1.0 else value


#: Contention figure -> (limit, how people say it). Fractions of 1 unless said.
LIMITS: Mapping[str, tuple[float, str]] = {
    "foreign_load_per_core": (0.25, "other processes used {:.2f} of each core"),
    "steal_fraction": (0.02, "the hypervisor took {:.1%} of the processor time"),
    "throttled_fraction": (0.02, "the cgroup was throttled {:.1%} of the time"),
    "pressure_cpu": (0.25, "tasks waited for a core {:.0%} of the time"),
    "pressure_memory": (0.10, "tasks waited for memory {:.0%} of the time"),
    "pressure_io": (0.25, "tasks waited for storage {:.0%} of the time"),
}


def busy(measurement: Measurement) -> str:
    """Return what else kept the machine busy during the run, in words, or an empty string."""
    found = [
        text.format(measurement.contention[name])
        for name, (limit, text) in LIMITS.items()
        if measurement.contention.get(name, 0.0) > limit
    ]
    return "; ".join(found)
