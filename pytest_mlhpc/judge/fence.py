"""How far from its baseline a figure may lie, and whether tonight's lies farther. Plain statistics, no I/O.

All figures here are *drops*: relative changes against the baseline, positive when worse, whatever the metric's
direction. The limits come from a simulation of 40 series x 5 noise worlds x 150 nights (``docs/judge.md``); what
survives everywhere is a fence scaled by history plus confirmation by re-runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

#: A normal distribution's standard deviation is this many median absolute deviations.
MAD_TO_SIGMA = 1.4826
#: Records that a width is taken from, at most; and the fewest from which it can be.
WINDOW, ENOUGH = 30, 8
#: No series is quieter than this: smaller spreads are luck of few records.
SIGMA_FLOOR = 0.004
#: Nothing below this is ever called a change.
SMALLEST = 0.015
FENCE_SIGMAS = 3.0


@dataclass(frozen=True)
class Fence:
    """``width`` is how far a figure may lie from its baseline; ``sigma`` None = too few records."""

    width: float
    sigma: float | None


def drop(value: float, baseline: float, better: str) -> float:
    """Return the relative change of *value* against *baseline*, positive when worse."""
    change = (value - baseline) / baseline
    return change if better == "lower" else -change


def robust_sigma(values: Sequence[float], baseline: float) -> float:
    """Return the robust standard deviation of *values* relative to *baseline*: 1.4826 x MAD, never below 0.4 %."""
    middle = statistics.median(values)
    mad = statistics.median(abs(value - middle) for value in values)
    return max(MAD_TO_SIGMA * mad / baseline, SIGMA_FLOOR)


def make_fence(history: Sequence[float], baseline: float, tolerance: float) -> Fence:
    """Return the fence: what matters (*tolerance*), and from eight records on at least three robust sigma."""
    recent = history[-WINDOW:]
    if len(recent) < ENOUGH:
        return Fence(max(tolerance, SMALLEST), None)
    sigma = robust_sigma(recent, baseline)
    return Fence(max(FENCE_SIGMAS * sigma, tolerance, SMALLEST), sigma)
