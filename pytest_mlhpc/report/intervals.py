"""A figure of several runs: their median, and how sure it is. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

#: How often the interval of a median holds it, at least. The customary one.
CONFIDENCE: Final = 0.95


@dataclass(frozen=True)
class Estimate:
    """The median of ``runs`` figures, within [low, high].

    ``sure`` says that the interval holds the true median with at least :data:`CONFIDENCE`; else it is the range of the
    runs, which is too few for that. A published figure has ``runs`` 0 and no interval.
    """

    median: float
    low: float | None = None
    high: float | None = None
    runs: int = 0
    sure: bool = False

    def divided(self, by: float) -> Estimate:
        """Return it by unit of something, *by* > 0."""
        low, high = (None if end is None else end / by for end in (self.low, self.high))
        return Estimate(self.median / by, low, high, self.runs, self.sure)


def estimate(values: Sequence[float]) -> Estimate | None:
    """Return the median of *values* with its interval; None where there are none.

    The interval lies between two order statistics (the sign test turned round), so it supposes nothing of the noise but
    that runs do not depend on each other. Six runs are the fewest for which it exists.
    """
    if not values:
        return None
    ordered = sorted(values)
    median = statistics.median(ordered)
    if not math.isfinite(median):  # the mean of two middle ones can overflow
        median = statistics.median_low(ordered)
    rank = lower_rank(len(ordered))
    at = max(rank, 1) - 1
    return Estimate(median, ordered[at], ordered[-1 - at], len(ordered), sure=rank > 0)


def lower_rank(runs: int) -> int:
    """Return r, such that the r-th smallest and the r-th largest of *runs* figures hold the median; 0: there is no r."""
    rank, below = 0, 0.0
    while rank <= runs // 2:
        below += math.exp(
            math.lgamma(runs + 1) - math.lgamma(rank + 1) - math.lgamma(runs - rank + 1) - runs * math.log(2)
        )
        if 2 * below > 1 - CONFIDENCE:
            break
        rank += 1
    return rank
