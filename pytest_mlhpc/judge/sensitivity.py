"""What the nightly judge can find in a series: the smallest loss that fails its test within some nights. Pure.

The nights of the series itself are drawn anew, in blocks of a week, so that neighbouring nights resemble each other as they
did. A loss is planted into the newest of them, and each is judged as :mod:`pytest_mlhpc.judge.rules` judges it, with the
re-runs that it asks for.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_mlhpc.judge import fence, losses
from pytest_mlhpc.judge.changes import Attempts, find
from pytest_mlhpc.judge.losses import LossLimits

if TYPE_CHECKING:
    import numpy as np

    from pytest_mlhpc.judge.arrays import Floats

#: Nights within which a loss shall be found.
WITHIN = (1, 3, 14)
#: Share of the losses of one size that shall be found, and how often each size is tried: 90 % are then known to 4 points.
SURE, TRIALS = 0.9, 60
#: Nights of a series, at least, of which others can be drawn; the judge of nights itself starts at 17.
FEWEST = 20
#: Nights that are drawn together.
BLOCK = 7
#: Losses that are tried, as shares of the level: from 0.5 % in steps of an eighth to 90 %.
SIZES = tuple(0.005 * 1.125**step for step in range(45))
#: Of a night's own deviation, re-runs share at most so many standard deviations: an outlier is not repeated.
REPEATED = 3.0


@dataclass(frozen=True)
class Sensitivity:
    """What can be found in one series.

    ``smallest`` has for each of :data:`WITHIN` the smallest loss, a share of the level, of which nine of ten are found; None
    where that is more than the largest of :data:`SIZES`. ``noise`` is the robust relative deviation of the nights. Of
    ``simulated`` nights without a loss ``red`` failed.
    """

    nights: int
    noise: float
    smallest: tuple[float | None, ...]
    red: int
    simulated: int


def sensitivity(
    values: Sequence[float], better: str, limits: LossLimits, *, noise: float = 1.0, seed: int = 0
) -> Sensitivity | None:
    """Return what the judge finds in a series with these nights, oldest first; None where they are too few.

    Args:
        values: the figures of its nights, of one epoch.
        better: ``higher`` or ``lower``.
        limits: what a loss must be.
        noise: factor of all deviations: 0.5 is a benchmark that varies half as much.
        seed: of the draws; the same seed gives the same answer.
    """
    usable = [value for value in values if math.isfinite(value) and value > 0]
    if len(usable) < FEWEST or better not in {"higher", "lower"}:
        return None
    import numpy as np

    own = np.array(deviations(usable)) * noise
    nights = SimulatedNights(own, better, limits, np.random.default_rng(seed))
    without = nights.failing(0.0)
    return Sensitivity(
        len(usable),
        _robust_deviation(own),
        tuple(_smallest(nights, within) for within in WITHIN),
        sum(math.isfinite(night) for night in without),
        sum(min(int(night), WITHIN[-1]) if math.isfinite(night) else WITHIN[-1] for night in without),
    )


def deviations(values: Sequence[float]) -> list[float]:
    """Return how far each figure is from the level that it has between two changes, as a logarithm."""
    starts = [0, *(change.index for change in find(values)), len(values)]
    return [
        math.log(value / statistics.median(values[begin:end]))
        for begin, end in itertools.pairwise(starts)
        for value in values[begin:end]
    ]


def rerun_deviations(own: Floats, around: Floats, alike: float, sigma: float) -> Floats:
    """Return the deviations of re-runs.

    Args:
        own: deviation of each night's first run (nights).
        around: deviations of other nights (nights x re-runs).
        alike: correlation of neighbouring nights: so much of a night's deviation its re-runs share.
        sigma: spread of the nights.
    """
    import numpy as np

    shared = alike * np.clip(own, -REPEATED * sigma, REPEATED * sigma)[..., None]
    again: Floats = shared + math.sqrt(1 - alike**2) * around
    return again


def _robust_deviation(own: Floats) -> float:
    """Return the robust standard deviation of deviations from a level."""
    import numpy as np

    return fence.MAD_TO_SIGMA * float(np.median(np.abs(own)))


def correlation_of_neighbours(own: Floats) -> float:
    """Return the correlation of neighbouring nights, at least 0."""
    import numpy as np

    before, after = own[:-1] - own.mean(), own[1:] - own.mean()
    power = float(np.sum((own - own.mean()) ** 2))
    return min(max(float(np.sum(before * after)) / power, 0.0), 0.99) if power else 0.0


class SimulatedNights:
    """Nights that were drawn once, into which losses of all sizes are planted."""

    def __init__(self, own: Floats, better: str, limits: LossLimits, draw: np.random.Generator) -> None:
        import numpy as np

        self._better, self._limits = better, limits
        self._before = min(len(own), losses.BEFORE)
        count = self._before + WITHIN[-1]
        blocks = draw.integers(0, len(own), (TRIALS, -(-count // BLOCK)))
        where = (blocks[:, :, None] + np.arange(BLOCK)) % len(own)
        first = own[where.reshape(TRIALS, -1)[:, :count]]
        around = draw.choice(own, (TRIALS, count, 2 * fence.RERUNS))
        self._runs = np.exp(
            np.concatenate(
                [
                    first[..., None],
                    rerun_deviations(first, around, correlation_of_neighbours(own), _robust_deviation(own)),
                ],
                axis=2,
            )
        )
        self._history = [
            [Attempts(value) for value in row] for row in self._runs[:, : self._before, 0].tolist()
        ]
        self._known: dict[float, list[float]] = {}

    def failing(self, size: float) -> list[float]:
        """Return for each trial in which night a loss of *size* fails the test, from 1; infinite where it does not."""
        if size not in self._known:
            self._known[size] = self._judged(size)
        return self._known[size]

    def _judged(self, size: float) -> list[float]:
        factor = 1.0 - size if self._better == "higher" else 1.0 + size
        runs = (self._runs[:, self._before :] * factor).tolist()
        night_of = [math.inf] * TRIALS
        histories = [list(history) for history in self._history]
        for night in range(WITHIN[-1]):
            rows = [row for row in range(TRIALS) if math.isinf(night_of[row])]
            for row in rows:
                histories[row].append(Attempts(runs[row][night][0]))
            gates = losses.possible_losses([(histories[row], self._better) for row in rows])
            asked = [row for row, gate in zip(rows, gates, strict=True) if gate is not None]
            for row in asked:
                histories[row][-1] = _rerun(runs[row][night][: 1 + fence.RERUNS])
            again = losses.further_reruns([(histories[row], self._better) for row in asked], self._limits)
            for row in itertools.compress(asked, again):
                histories[row][-1] = _rerun(runs[row][night])
            certain = losses.certain_losses([(histories[row], self._better) for row in asked], self._limits)
            for row, loss in zip(asked, certain, strict=True):
                if loss is not None:
                    night_of[row] = night + 1
        return night_of


def _rerun(runs: Sequence[float]) -> Attempts:
    return Attempts(runs[0], tuple(runs[1:]))


def _smallest(nights: SimulatedNights, within: int) -> float | None:
    """Return the smallest of the sizes of which enough are found within so many nights: larger ones are found more often."""
    low, high = 0, len(SIZES)
    while low < high:
        middle = (low + high) // 2
        share = sum(night <= within for night in nights.failing(SIZES[middle])) / TRIALS
        low, high = (low, middle) if share >= SURE else (middle + 1, high)
    return SIZES[low] if low < len(SIZES) else None
