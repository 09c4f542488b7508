"""What the calibration kernel says of the machine's speed, and what a figure would have been at full speed."""

from __future__ import annotations

from pytest_mlhpc.node.protocol.schema import Measurement

#: The calibration kernel itself is not repeatable below this; smaller moves correct nothing.
CALIBRATION_NOISE = 0.015


def calibration_rate(measurement: Measurement) -> float | None:
    """Return the mean rate of the calibration kernel around a run (1/s), or None where it was not run."""
    rates = [rate for rate in (measurement.calibration_before, measurement.calibration_after) if rate]
    return sum(rates) / len(rates) if rates else None


def ratio(rate: float | None, reference: float | None) -> float:
    """Return *rate* over *reference*; 1 where either is not known or the difference is within the kernel's noise."""
    if not rate or not reference:
        return 1.0
    found = rate / reference
    return 1.0 if abs(found - 1.0) < CALIBRATION_NOISE else found


def scaled(value: float, unit: str, factor: float) -> float:
    """Return what *value* would have been on a machine that was not *factor* times as fast; only rates and times scale."""
    if unit.endswith("/s"):
        return value / factor
    return value * factor if unit == "s" else value


def excused(value: float, unit: str, factor: float) -> float:
    """Return *value* corrected for a slower machine.

    It only ever excuses: a machine that is faster than at the baseline corrects nothing, because one slow calibration
    back then would make every later run look bad.
    """
    return scaled(value, unit, factor) if factor < 1.0 else value
