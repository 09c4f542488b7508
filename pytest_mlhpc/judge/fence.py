"""How far from its baseline a figure may lie, how many re-runs must confirm that it lies farther, and the limits of change points. Statistics without input or output."""

from __future__ import annotations

import math
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
    smallest: float = SMALLEST  #: that the median of the re-runs must lose; a promise allows nothing


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


RERUNS, CONFIRMATIONS = 4, 3
#: Tries at the re-runs, broken ones counted.
MOST_TRIES = RERUNS + 2
#: A re-run confirms when it lies beyond this share of the fence's distance.
SHARE = 0.6


def confirmed(drops: Sequence[float], width: float, smallest: float = SMALLEST) -> bool | None:
    """Return whether the re-runs' *drops* confirm a regression; None = more are needed."""
    missing = RERUNS - len(drops)
    if missing <= 0:
        return _verdict(drops[:RERUNS], width, smallest)
    best = _verdict([*drops, *[-math.inf] * missing], width, smallest)
    worst = _verdict([*drops, *[math.inf] * missing], width, smallest)
    return best if best == worst else None


def reruns_needed(drops: Sequence[float], width: float, smallest: float = SMALLEST) -> int:
    """Return the fewest further re-runs that may settle it, 0 when it is settled."""
    if confirmed(drops, width, smallest) is not None:
        return 0
    beyond = sum(drop > SHARE * width for drop in drops)
    inside = len(drops) - beyond
    return max(1, min(CONFIRMATIONS - beyond, RERUNS - CONFIRMATIONS + 1 - inside))


def _verdict(drops: Sequence[float], width: float, smallest: float) -> bool:
    beyond = sum(drop > SHARE * width for drop in drops)
    return beyond >= CONFIRMATIONS and statistics.median(drops) > smallest


@dataclass(frozen=True)
class Detector:
    """Settings of the detector; the defaults are for nightly benchmarks, chosen by ``benchmarks/history.py``.

    Shares are of the level: 0.015 is 1.5 %. Lengths are in points that have a figure; gaps do not count.
    """

    penalty: float = 3.0  #: a change must explain more than this times log(points), in variances of the noise
    #: ... and this share of all that the series varies; for series that wander, not for nights
    share: float = 0.0
    #: smallest change of level; nothing below 1.5 % is called one (``judge.fence.SMALLEST``)
    magnitude: float = 0.015
    abrupt: float = 0.3  #: share of a change that must have come within ``near`` points; the rest is drift
    near: int = 10  #: points on each side of a change
    floor: float = 0.004  #: no series is quieter than this share of its level (``judge.fence.SIGMA_FLOOR``)
    window: int = 21  #: points around each one that say what is an outlier there
    clip: float = 3.0  #: points farther from their window's median than this many sigmas are pulled in to it
    shortest: int = 3  #: points of a level, at least; two may be one bad spell


@dataclass(frozen=True)
class DropLimits:
    """What a drop at the end of a series must be; chosen on real noise by ``benchmarks/verdicts.py`` (docs/judge.md)."""

    score: float = 4.5  #: standard errors
    smallest: float = SMALLEST  #: share of the level; nothing below it is a drop
    nights: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12)  #: how long the drop may have lasted
    before: int = 60  #: nights before it that say what is usual, at most
    enough: int = 16  #: ... and at least
    clip: float = 3.0  #: sigmas that one night of those before may count at most
    clip_recent: float = 6.0  #: ... one of several new nights; a night alone counts in full

    @property
    def longest(self) -> int:
        """Nights of history that are looked at."""
        return self.before + max(self.nights)
