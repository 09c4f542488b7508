"""Where the level of a series changed: the detector's front door.

A series is figures, oldest first. NaN and infinities are nights without a figure: they are left out, and a change behind
a gap may lie anywhere in it. Fewer than four figures have no change.
"""

from __future__ import annotations

import importlib
import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_mlhpc.judge.changes.settings import Detector

if TYPE_CHECKING:
    from pytest_mlhpc.judge.changes.arrays import Floats

__all__ = ["Change", "Detector", "find", "find_all"]

#: Series of one length are computed together, at most this many: what they need then stays in a core's cache.
BATCH = 64


@dataclass(frozen=True)
class Change:
    """A lasting change of level.

    ``index`` is the first point of the new level as far as one can tell; it lies in [``first``, ``last``], both inclusive,
    nights without a figure counted. ``before`` and ``after`` are the medians of the levels on both sides, up to the next
    change; ``size`` is (after - before) / |before|, infinite from a level of 0. ``confidence`` is in [0, 1).
    """

    index: int
    first: int
    last: int
    before: float
    after: float
    size: float
    confidence: float


def find(values: Sequence[float], settings: Detector | None = None) -> tuple[Change, ...]:
    """Return the changes of level of one series, oldest first."""
    return find_all([values], settings)[0]


def find_all(series: Iterable[Sequence[float]], settings: Detector | None = None) -> list[tuple[Change, ...]]:
    """Return the changes of each series, in their order: the same as :func:`find` says of each, in far less time."""
    arrays = importlib.import_module(f"{__package__}.arrays")  # with NumPy: when it is needed
    import numpy as np

    chosen = settings or Detector()
    every = list(series)
    where = [[i for i, value in enumerate(values) if math.isfinite(value)] for values in every]
    found: list[tuple[Change, ...]] = [()] * len(every)
    lengths: dict[int, list[int]] = {}
    for row, kept in enumerate(where):
        if len(kept) >= 2 * chosen.shortest:
            lengths.setdefault(len(kept), []).append(row)
    for rows in lengths.values():
        for begin in range(0, len(rows), BATCH):
            batch = rows[begin : begin + BATCH]
            values = np.array([[every[row][i] for i in where[row]] for row in batch], dtype=np.float64)
            calm = arrays.winsorised(arrays.scaled(values), chosen)
            sigma = arrays.noise(calm, chosen)
            starts = arrays.segmented(calm, sigma, chosen)
            for number, row in enumerate(batch):
                if at := arrays.walked_back(starts[number]):
                    figures = _Figures(
                        values[number].tolist(), calm[number], float(sigma[number]), where[row]
                    )
                    found[row] = _changes(figures, _large(figures.values, at, chosen))
    return found


@dataclass(frozen=True)
class _Figures:
    """One series without gaps: its figures, the same without outliers and scaled, their noise, where each figure stood."""

    values: list[float]
    calm: Floats
    sigma: float
    where: Sequence[int]


def _large(values: list[float], starts: list[int], settings: Detector) -> list[int]:
    """Return those of *starts* at which a level changes by enough and at once; the least of the others goes first."""
    while starts:
        edges = [0, *starts, len(values)]
        levels = [statistics.median(values[a:b]) for a, b in itertools.pairwise(edges)]
        sizes = [abs(_size(a, b)) for a, b in itertools.pairwise(levels)]
        least, limit = min(enumerate(sizes), key=_second), settings.magnitude
        if least[1] >= limit:
            shares = [
                _share(
                    values[max(edges[i], at - settings.near) : at],
                    values[at : min(edges[i + 2], at + settings.near)],
                    levels[i + 1] - levels[i],
                )
                for i, at in enumerate(starts)
            ]
            least, limit = min(enumerate(shares), key=_second), settings.abrupt
        if least[1] >= limit:
            break
        starts = starts[: least[0]] + starts[least[0] + 1 :]
    return starts


def _second(pair: tuple[int, float]) -> float:
    return pair[1]


def _share(before: list[float], after: list[float], whole: float) -> float:
    """Return which share of the *whole* step lies between the points next to it."""
    return abs(statistics.median(after) - statistics.median(before)) / abs(whole) if whole else 0.0


def _changes(figures: _Figures, starts: list[int]) -> tuple[Change, ...]:
    """Return the changes at *starts*."""
    arrays = importlib.import_module(f"{__package__}.arrays")  # with NumPy: when it is needed
    edges = [0, *starts, len(figures.values)]
    levels = [statistics.median(figures.values[a:b]) for a, b in itertools.pairwise(edges)]
    calm = [statistics.median(figures.calm[a:b].tolist()) for a, b in itertools.pairwise(edges)]
    found = []
    for i, at in enumerate(starts):
        begin, end = edges[i], edges[i + 2]
        first, last = arrays.plausible(figures.calm, figures.sigma, begin, at, end)
        found.append(
            Change(
                index=figures.where[at],
                first=figures.where[first - 1] + 1,
                last=figures.where[last],
                before=levels[i],
                after=levels[i + 1],
                size=_size(levels[i], levels[i + 1]),
                confidence=_confidence(calm[i + 1] - calm[i], figures.sigma, at - begin, end - at),
            )
        )
    return tuple(found)


def _size(before: float, after: float) -> float:
    if before == 0:
        return math.copysign(math.inf, after) if after else 0.0
    return (after - before) / abs(before)


def _confidence(step: float, sigma: float, before: int, after: int) -> float:
    score = abs(step) / (sigma * math.sqrt(1 / before + 1 / after))
    return min(math.erf(score / math.sqrt(2)), 1 - 1e-9)
