"""The numerics of change points and of the newest nights, in arrays: equally long series without gaps, one a row. Needs NumPy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pytest_mlhpc.judge.fence import MAD_TO_SIGMA, SIGMA_FLOOR, Detector, DropLimits

Floats: TypeAlias = NDArray[np.float64]
Integers: TypeAlias = NDArray[np.int64]


#: Lengths of the blocks that noise is taken from, and how often the longest must fit in.
BLOCKS, ENOUGH_BLOCKS = (1, 2, 4, 8), 10
#: Times the usual spread of a series' windows that one window's may be.
WIDEST = 1.5
#: Noise of a series without any, as a share of its largest figure: rounding.
LEAST = 1e-9


#: Twice the log likelihood by which 95 % of true places of a change lie below the best one: the maximum of a random
#: walk on both sides falls below x with probability (1 - exp(-x / 2))^2 (Yao 1987, the limit for many points).
SURE = 7.35


def scaled(values: Floats) -> Floats:
    """Return *values* with 1 as the largest of each row, so that squares of what may be any float stay floats."""
    unit = np.max(np.abs(values), axis=1, keepdims=True)
    return values / np.where(unit > 0, unit, 1.0)


def winsorised(values: Floats, settings: Detector) -> Floats:
    """Return *values* (series x points) with outliers pulled in to the edge of what is usual around them.

    The centre is the median of the ``window`` nearest points, the scale their median absolute deviation.
    """
    points = values.shape[1]
    width = min(settings.window, points)
    windows = np.lib.stride_tricks.sliding_window_view(values, width, axis=1)
    centre = np.median(windows, axis=2)
    spread = MAD_TO_SIGMA * np.median(np.abs(windows - centre[:, :, None]), axis=2)
    usual = np.median(spread, axis=1, keepdims=True)
    # A window that spans a change is wide, and would let outliers pass.
    spread = np.where(usual > 0, np.minimum(spread, WIDEST * usual), spread)
    spread = np.maximum(spread, settings.floor * np.abs(centre))
    nearest = np.clip(np.arange(points) - width // 2, 0, points - width)
    reach = settings.clip * spread[:, nearest]
    return np.clip(values, centre[:, nearest] - reach, centre[:, nearest] + reach)


def noise(values: Floats, settings: Detector) -> Floats:
    """Return the noise's standard deviation of each row as a change of level has to stand out from it.

    Neighbouring blocks of 1, 2, 4 and 8 points are compared (Allan 1966, "Statistics of atomic frequency standards"),
    scaled to one point, and the largest counts: where nights resemble each other, longer blocks differ by more than
    independent nights would. A median, hence no level's change enters. Blocks that fit in fewer than ten times are left out.
    """
    points = values.shape[1]
    sums = _running(values)
    sigma = np.maximum(settings.floor * np.abs(np.median(values, axis=1)), LEAST)
    for block in BLOCKS:
        if block > 1 and points < ENOUGH_BLOCKS * block:
            break
        means = (sums[:, block:] - sums[:, :-block]) / block
        steps = np.abs(means[:, block:] - means[:, :-block])
        sigma = np.maximum(sigma, MAD_TO_SIGMA * np.median(steps, axis=1) * np.sqrt(block / 2))
    return sigma


def segmented(values: Floats, sigma: Floats, settings: Detector) -> Integers:
    """Return for each row and each end the start of the last level of the best segmentation up to there.

    Optimal partitioning (Jackson et al. 2005): least squares of each level in units of *sigma*, plus a penalty for each
    change. Shape: series x (points + 1); walk it back from the last column.
    """
    rows, points = values.shape
    units = (values - np.median(values, axis=1, keepdims=True)) / sigma[:, None]
    sums, squares = _running(units), _running(units**2)
    whole = squares[:, -1] - sums[:, -1] ** 2 / points
    penalty = np.maximum(settings.penalty * np.log(points), settings.share * whole)
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


def plausible(values: Floats, sigma: float, begin: int, at: int, end: int) -> tuple[int, int]:
    """Return the first and last point at which the change *at* between levels [begin, end) may have come.

    All those where it would explain nearly as much: less than SURE noise variances are lost.
    """
    sums = np.cumsum((values[begin:end] - np.median(values[begin:end])) / sigma)
    left = np.arange(1, end - begin)
    explained = sums[:-1] ** 2 / left + (sums[-1] - sums[:-1]) ** 2 / (end - begin - left)
    near = begin + 1 + np.flatnonzero(explained >= explained[at - begin - 1] - SURE)
    return int(near[0]), int(near[-1])


def _running(values: Floats) -> Floats:
    """Return the sums of the first 0, 1, 2 ... points of each row."""
    return np.concatenate([np.zeros((len(values), 1)), np.cumsum(values, axis=1)], axis=1)


def walked_back(start: Integers) -> list[int]:
    """Return the first points of all levels but the first, of one row of :func:`segmented`."""
    found: list[int] = []
    at = int(start[-1])
    while at > 0:
        found.append(at)
        at = int(start[at])
    return found[::-1]


#: The level before is part median, hence a little less sure than a mean: pi / 2 for the median of normal figures, 1 for the mean.
UNSURE = 1.3
#: Quantile of the nights before whose distance counts as spread too: of normal figures one in twenty lies so many standard
#: deviations below the mean, or farther. Figures of benchmarks have heavier tails.
TAIL, TAIL_SIGMAS = 0.05, 1.6449
#: No likeness of neighbours beyond this is believed: the error would have no bound.
MOST_ALIKE = 0.9


def ends(levels: Sequence[Sequence[float]], rule: DropLimits) -> list[tuple[int, float, float] | None]:
    """Return of each row of *levels* (series x nights, tonight last) the surest drop at its end, None where there is none.

    A drop is how many nights it lasted, its share of the level, and how many standard errors that is.
    """
    figures = scaled(np.array(levels, dtype=np.float64))
    found: list[tuple[int, float, float] | None] = [None] * len(figures)
    for nights in rule.nights:
        if figures.shape[1] - nights >= rule.enough:
            for row, drop in _lasted(figures, nights, rule):
                earlier = found[row]
                if earlier is None or drop[2] > earlier[2]:
                    found[row] = drop
    return found


def _lasted(figures: Floats, nights: int, rule: DropLimits) -> Iterator[tuple[int, tuple[int, float, float]]]:
    """Yield (row, drop) of the rows that have been worse for *nights*."""
    points = figures.shape[1]
    past = figures[:, max(points - nights - rule.before, 0) : points - nights]
    recent = figures[:, points - nights :]
    centre = np.median(past, axis=1)
    least = rule.smallest * np.abs(centre)
    rows = np.flatnonzero(centre - recent.min(axis=1) > least)  # few on almost all nights
    if rows.size:
        fall, error = _compared(past[rows], recent[rows], centre[rows], rule)
        # Clipping limits what one night says of the noise. The size is what was measured: in a quiet series three sigmas
        # are less than the smallest drop.
        size = centre[rows] - np.median(recent[rows], axis=1)
        for at in np.flatnonzero((size > least[rows]) & (fall > rule.score * error)):
            row = int(rows[at])
            level, lower = float(abs(centre[row])), float(size[at])
            # Squares of the smallest figures are 0.
            surely = float(fall[at] / error[at]) if error[at] else math.inf
            yield row, (nights, lower / level if level else math.inf, surely)


def _compared(past: Floats, recent: Floats, centre: Floats, rule: DropLimits) -> tuple[Floats, Floats]:
    """Return by how much *recent* lies below *past*, and the standard error of that."""
    nights = recent.shape[1]
    off = past - centre[:, None]
    floor = SIGMA_FLOOR * np.abs(centre)
    sigma = np.maximum(MAD_TO_SIGMA * np.median(np.abs(off), axis=1), floor)[:, None]
    off = np.clip(off, -rule.clip * sigma, rule.clip * sigma)
    variance = np.mean(off**2, axis=1)
    near = np.mean(off[:, 1:] * off[:, :-1], axis=1)
    alike = np.clip(np.divide(near, variance, out=np.zeros_like(near), where=variance > 0), 0.0, MOST_ALIKE)
    tail = np.maximum(-np.quantile(past - centre[:, None], TAIL, axis=1) / TAIL_SIGMAS, floor)
    variance = np.maximum(variance, tail**2)
    alike = np.clip(alike + 1 / past.shape[1], 0.0, MOST_ALIKE)
    lags = np.arange(1, nights)
    inflation = 1 + 2 * np.sum((1 - lags / nights) * alike[:, None] ** lags, axis=1)
    before = UNSURE * (1 + alike) / (1 - alike) / past.shape[1]
    news = recent - centre[:, None]
    if nights > 1:
        news = np.clip(news, -rule.clip_recent * sigma, rule.clip_recent * sigma)
    level = news.mean(axis=1)
    if nights > 2:  # one night of several moves a median less
        level = (level + np.median(news, axis=1)) / 2
    return -level, np.sqrt(variance * (inflation / nights + before))
