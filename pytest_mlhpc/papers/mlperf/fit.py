"""Two lines through measured points: the time of a step, and the training epochs that a batch needs. Pure.

* A step of ``b`` samples on each device takes ``overhead + b * each`` seconds: work that grows with the samples, and what
  does not (exchange of gradients, launches, the update). What grows with the number of devices is in neither, so a
  prediction far beyond the largest scale measured is too good.
* Training epochs to a target grow in a straight line with the batch: ``least * (1 + batch / critical)``, which is what
  (S/Smin - 1)(E/Emin - 1) = 1 with S = E/B comes to (McCandlish, Kaplan, Amodei et al.: An Empirical Model of Large-Batch
  Training, arXiv 1812.06162, equation 2.11).

Both lines have no negative part: where least squares give one, it is zero and the other is fitted alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """``constant + slope * x``, both at least zero. ``low`` and ``high`` are the x between which it was fitted."""

    constant: float
    slope: float
    low: float
    high: float

    def at(self, x: float) -> float:
        """Return its value at *x*."""
        return self.constant + self.slope * x


def line(points: Sequence[tuple[float, float]]) -> Line | None:
    """Return the line nearest to *points* (x, y), all positive; None where they have fewer than two x.

    Squares of relative errors are least, so that the fastest scale counts as much as the slowest.
    """
    xs = {x for x, _y in points}
    if len(xs) < 2 or any(x <= 0 or y <= 0 for x, y in points):
        return None
    weights = [1 / (y * y) for _x, y in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _y) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_x, y) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _y) in zip(weights, points, strict=True))
    slope = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True)) / spread
    constant = mean_y - slope * mean_x
    if slope < 0:
        constant, slope = mean_y, 0.0
    elif constant < 0:
        squares = sum(w * x * x for w, (x, _y) in zip(weights, points, strict=True))
        constant, slope = 0.0, sum(w * x * y for w, (x, y) in zip(weights, points, strict=True)) / squares
    return Line(constant, slope, min(xs), max(xs))
