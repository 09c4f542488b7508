"""The detector in arrays: a batch of equally long series without gaps, one series a row.

All of it is deterministic and works row by row, so that a series has the same changes alone and among ten thousand.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pytest_mlhpc.judge.changes.settings import Detector
from pytest_mlhpc.judge.fence import MAD_TO_SIGMA

Floats: TypeAlias = NDArray[np.float64]
Integers: TypeAlias = NDArray[np.int64]


def winsorised(values: Floats, settings: Detector) -> Floats:
    """Return *values* (series x points) with outliers pulled in to the edge of what is usual around them.

    The centre is the median of the ``window`` nearest points, the scale their median absolute deviation.
    """
    points = values.shape[1]
    width = min(settings.window, points)
    windows = np.lib.stride_tricks.sliding_window_view(values, width, axis=1)
    centre = np.median(windows, axis=2)
    spread = MAD_TO_SIGMA * np.median(np.abs(windows - centre[:, :, None]), axis=2)
    spread = np.maximum(spread, settings.floor * np.abs(centre))
    nearest = np.clip(np.arange(points) - width // 2, 0, points - width)
    reach = settings.clip * spread[:, nearest]
    return np.clip(values, centre[:, nearest] - reach, centre[:, nearest] + reach)


def noise(values: Floats, settings: Detector) -> Floats:
    """Return the noise's standard deviation of each row, from differences of neighbours, which no level enters."""
    level = np.abs(np.median(values, axis=1))
    steps = np.abs(np.diff(values, axis=1))
    sigma = MAD_TO_SIGMA * np.median(steps, axis=1) / np.sqrt(2) if steps.shape[1] else np.zeros(len(values))
    tiny = np.finfo(np.float64).tiny
    return np.maximum(np.maximum(sigma, settings.floor * level), tiny)


def segmented(values: Floats, sigma: Floats, settings: Detector) -> Integers:
    """Return for each row and each end the start of the last level of the best segmentation up to there.

    Optimal partitioning (Jackson et al. 2005): least squares of each level in units of *sigma*, plus a penalty for each
    change. Shape: series x (points + 1); walk it back from the last column.
    """
    rows, points = values.shape
    scaled = (values - np.median(values, axis=1, keepdims=True)) / sigma[:, None]
    sums = np.concatenate([np.zeros((rows, 1)), np.cumsum(scaled, axis=1)], axis=1)
    squares = np.concatenate([np.zeros((rows, 1)), np.cumsum(scaled**2, axis=1)], axis=1)
    penalty = settings.penalty * np.log(max(points, 2))
    best = np.full((rows, points + 1), np.inf)
    best[:, 0] = -penalty
    start = np.zeros((rows, points + 1), dtype=np.int64)
    least = settings.shortest
    for end in range(least, points + 1):
        stop = end - least + 1
        length = end - np.arange(stop)
        cost = squares[:, end, None] - squares[:, :stop] - (sums[:, end, None] - sums[:, :stop]) ** 2 / length
        total = best[:, :stop] + cost
        start[:, end] = np.argmin(total, axis=1)
        best[:, end] = total[np.arange(rows), start[:, end]] + penalty
    return start


def walked_back(start: Integers) -> list[int]:
    """Return the first points of all levels but the first, of one row of :func:`segmented`."""
    found: list[int] = []
    at = int(start[-1])
    while at > 0:
        found.append(at)
        at = int(start[at])
    return found[::-1]
