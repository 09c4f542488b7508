"""The newest nights of many series against those before them, in arrays: a batch of equally long series, one a row.

All levels are turned so that lower is worse.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from pytest_mlhpc.judge.changes.arrays import Floats
from pytest_mlhpc.judge.changes.lasting import Rule
from pytest_mlhpc.judge.fence import MAD_TO_SIGMA, SIGMA_FLOOR

#: The level before is part median, hence a little less sure than a mean: pi / 2 for the median of normal figures, 1 for the mean.
UNSURE = 1.3
#: No likeness of neighbours beyond this is believed: the error would have no bound.
MOST_ALIKE = 0.9


def ends(
    levels: Sequence[Sequence[float]], confirmed: Sequence[bool], best: Sequence[float], rule: Rule
) -> list[tuple[int, float, float] | None]:
    """Return of each row of *levels* (series x nights, tonight last) the surest drop at its end, None where there is none.

    A drop is how many nights it lasted, its share of the level, and how many standard errors that is. *confirmed*: the
    judge's re-runs say that tonight is worse. *best* is the best of tonight's attempts: one night counts alone only if
    even that is worse.
    """
    figures, sure = np.array(levels, dtype=np.float64), np.array(confirmed, dtype=np.bool_)
    unit = np.max(np.abs(figures), axis=1)
    unit = np.where(unit > 0, unit, 1.0)  # squares of what may be any float stay floats
    figures, least = figures / unit[:, None], np.array(best, dtype=np.float64) / unit
    found: list[tuple[int, float, float] | None] = [None] * len(figures)
    for nights in rule.nights:
        if figures.shape[1] - nights >= rule.enough:
            for row, drop in _lasted(figures, sure, least, nights, rule):
                earlier = found[row]
                if earlier is None or drop[2] > earlier[2]:
                    found[row] = drop
    return found


def _lasted(
    figures: Floats, confirmed: NDArray[np.bool_], best: Floats, nights: int, rule: Rule
) -> Iterator[tuple[int, tuple[int, float, float]]]:
    """Yield (row, drop) of the rows that have been worse for *nights*."""
    points = figures.shape[1]
    past, recent = (
        figures[:, max(points - nights - rule.before, 0) : points - nights],
        figures[:, points - nights :],
    )
    centre = np.median(past, axis=1)
    least = rule.smallest * np.abs(centre)
    seen = centre - recent.min(axis=1) > least  # few rows on almost all nights
    if nights == 1:
        usual = np.maximum(np.max(np.abs(past - centre[:, None]), axis=1), SIGMA_FLOOR * np.abs(centre))
        unheard = centre - recent[:, 0] > rule.unheard * usual
        seen &= (confirmed & (centre - best > least)) | unheard
    rows = np.flatnonzero(seen)
    if rows.size:
        fall, error = _compared(past[rows], recent[rows], centre[rows], rule)
        limit = np.where(confirmed[rows], rule.confirmed, rule.alone)
        # Clipping limits what one night says of the noise. The size is what was measured: in a quiet series three sigmas
        # are less than the smallest drop.
        size = centre[rows] - np.median(recent[rows], axis=1)
        for at in np.flatnonzero((size > least[rows]) & (fall > limit * error)):
            row = int(rows[at])
            level, lower = float(abs(centre[row])), float(size[at])
            # Squares of the smallest figures are 0.
            surely = float(fall[at] / error[at]) if error[at] else math.inf
            yield row, (nights, lower / level if level else math.inf, surely)


def _compared(past: Floats, recent: Floats, centre: Floats, rule: Rule) -> tuple[Floats, Floats]:
    """Return by how much *recent* lies below *past*, and the standard error of that."""
    nights = recent.shape[1]
    off = past - centre[:, None]
    floor = SIGMA_FLOOR * np.abs(centre)
    sigma = np.maximum(MAD_TO_SIGMA * np.median(np.abs(off), axis=1), floor)[:, None]
    off = np.clip(off, -rule.clip * sigma, rule.clip * sigma)
    variance = np.mean(off**2, axis=1)
    near = np.mean(off[:, 1:] * off[:, :-1], axis=1)
    alike = np.clip(np.divide(near, variance, out=np.zeros_like(near), where=variance > 0), 0.0, MOST_ALIKE)
    if rule.tail:
        tail = np.maximum(-np.quantile(past - centre[:, None], rule.tail, axis=1) / 1.2816, floor)
        variance = np.maximum(variance, tail**2)
        alike = np.clip(alike + 1 / past.shape[1], 0.0, MOST_ALIKE)
    variance = np.maximum(variance, floor**2)
    lags = np.arange(1, nights)
    inflation = 1 + 2 * np.sum((1 - lags / nights) * alike[:, None] ** lags, axis=1)
    before = UNSURE * (1 + alike) / (1 - alike) / past.shape[1]
    far = sigma * (rule.clip_single if nights == 1 else rule.clip_recent)
    news = np.clip(recent - centre[:, None], -far, far)
    level = news.mean(axis=1)
    if nights > 2:  # one night of several moves a median less
        level = (level + np.median(news, axis=1)) / 2
    return -level, np.sqrt(variance * (inflation / nights + before))
