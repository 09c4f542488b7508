"""Where the level of a series changed: the detector's front door.

A series is figures, oldest first. NaN and infinities are nights without a figure: they are left out, and a change behind
a gap may lie anywhere in it. Fewer than four figures have no change.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_mlhpc.errors import UsageError
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
    """Return the changes of level of one series, oldest first.

    Raises:
        UsageError: NumPy is not installed.
    """
    return find_all([values], settings)[0]


def find_all(series: Iterable[Sequence[float]], settings: Detector | None = None) -> list[tuple[Change, ...]]:
    """Return the changes of each series, in their order: the same as :func:`find` says of each, in far less time.

    Raises:
        UsageError: NumPy is not installed.
    """
    try:
        from pytest_mlhpc.judge.changes import arrays
    except ImportError as error:
        if error.name != "numpy":
            raise
        raise UsageError(
            "change points are computed with NumPy, which is not installed: pip install 'pytest-mlhpc[history]'"
        ) from None
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
            calm = arrays.winsorised(values, chosen)
            sigma = arrays.noise(calm, chosen)
            starts = arrays.segmented(calm, sigma, chosen)
            for number, row in enumerate(batch):
                found[row] = _changes(
                    values[number],
                    where[row],
                    arrays.walked_back(starts[number]),
                    float(sigma[number]),
                    chosen,
                )
    return found


def _changes(
    values: Floats, where: Sequence[int], starts: list[int], sigma: float, settings: Detector
) -> tuple[Change, ...]:
    """Return the changes at *starts* that are large enough, smallest ones dropped first."""
    figures = [float(value) for value in values]
    while starts:
        edges = [0, *starts, len(figures)]
        levels = [statistics.median(figures[a:b]) for a, b in itertools.pairwise(edges)]
        sizes = [_size(a, b) for a, b in itertools.pairwise(levels)]
        least = min(range(len(sizes)), key=lambda i: abs(sizes[i]))
        if abs(sizes[least]) >= settings.magnitude:
            break
        starts = starts[:least] + starts[least + 1 :]
    else:
        return ()
    return tuple(
        Change(
            index=where[at],
            first=where[at - 1] + 1,
            last=where[at],
            before=levels[i],
            after=levels[i + 1],
            size=sizes[i],
            confidence=_confidence(levels[i + 1] - levels[i], sigma, at - edges[i], edges[i + 2] - at),
        )
        for i, at in enumerate(starts)
    )


def _size(before: float, after: float) -> float:
    if before == 0:
        return math.copysign(math.inf, after) if after else 0.0
    return (after - before) / abs(before)


def _confidence(step: float, sigma: float, before: int, after: int) -> float:
    score = abs(step) / (sigma * math.sqrt(1 / before + 1 / after))
    return min(math.erf(score / math.sqrt(2)), 1 - 1e-9)
