"""Change points of a series, and by how much its newest nights lie below those before. Pure; NumPy is imported when it is needed."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from pytest_mlhpc.judge.fence import Detector, DropLimits

if TYPE_CHECKING:
    from pytest_mlhpc.judge.arrays import Floats


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
    import numpy as np

    from pytest_mlhpc.judge import arrays

    chosen = settings or Detector()
    every = list(series)
    where = [[i for i, value in enumerate(values) if math.isfinite(value)] for values in every]
    found: list[tuple[Change, ...]] = [()] * len(every)
    lengths: dict[int, list[int]] = {}
    for row, places in enumerate(where):
        if len(places) >= 2 * chosen.shortest:
            lengths.setdefault(len(places), []).append(row)
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
    from pytest_mlhpc.judge import arrays

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


@dataclass(frozen=True)
class Attempts:
    """What one night measured: the first attempt, its re-runs, and whether the judge failed the test for it."""

    value: float
    reruns: tuple[float, ...] = ()
    regressed: bool = False

    @cached_property
    def finite(self) -> tuple[float, ...]:
        """The figures that can be compared."""
        return tuple(value for value in (self.value, *self.reruns) if math.isfinite(value))

    @cached_property
    def level(self) -> float | None:
        """The median of them, None where there are none."""
        return statistics.median(self.finite) if self.finite else None


@dataclass(frozen=True)
class Drop:
    """A drop that lasts: since how many nights, by which share of the level before, and how many standard errors that is."""

    nights: int
    size: float
    score: float


def lasting_drop(history: Sequence[Attempts], better: str, rule: DropLimits | None = None) -> Drop | None:
    """Return the drop at the end of *history*, the surest one; None when there is none.

    Args:
        history: the nights of one baseline epoch, oldest first, tonight last. Nights without a finite figure are left
            out; without one tonight there is no drop.
        better: higher or lower; for another word there is no worse, hence no drop.
        rule: the limits.
    """
    return lasting_drops([(history, better)], rule)[0]


def lasting_drops(
    series: Sequence[tuple[Sequence[Attempts], str]], rule: DropLimits | None = None
) -> list[Drop | None]:
    """Return what :func:`lasting_drop` says of each (history, better), in their order and in far less time."""
    limits = rule or DropLimits()
    from pytest_mlhpc.judge import arrays

    found: list[Drop | None] = [None] * len(series)
    lengths: dict[int, list[tuple[int, list[float]]]] = {}
    for number, (history, better) in enumerate(series):
        if better not in {"higher", "lower"} or not history or not history[-1].finite:
            continue
        levels = _turned(history, 1.0 if better == "higher" else -1.0, limits.longest)
        if len(levels) > limits.enough:
            lengths.setdefault(len(levels), []).append((number, levels))
    for same in lengths.values():
        drops = arrays.ends([levels for _number, levels in same], limits)
        for (number, _levels), drop in zip(same, drops, strict=True):
            found[number] = Drop(*drop) if drop else None
    return found


def _turned(history: Sequence[Attempts], sign: float, longest: int) -> list[float]:
    """Return the newest levels of *history*, oldest first, turned so that lower is worse."""
    known = (sign * night.level for night in reversed(history) if night.level is not None)
    return list(itertools.islice(known, longest))[::-1]
