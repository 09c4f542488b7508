"""Nights that are made up: five kinds of noise, a drop in some of them, and the judge's real gate and quorum on top.

All figures are shares: night by night a *run* is 1 + what all runs of that night have in common + its own noise. Re-runs of
one night share the common part and redraw their own. The worlds are those by which the judge's rules were designed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pytest_mlhpc.judge import fence, quorum

Floats = NDArray[np.float64]

#: Nights of a series, and how many of them come first to say what is usual: an alarm there is not counted.
NIGHTS, QUIET = 150, 30
#: The value in git is the median of so many first nights; until then the judge has nothing to compare with.
ACCEPTED = 8
TOLERANCE = 0.05
RUNS = 1 + quorum.RERUNS


def white(rows: int, draw: np.random.Generator) -> tuple[Floats, Floats]:
    """1 % of independent noise."""
    return np.zeros((rows, NIGHTS)), 0.01 * draw.standard_normal((rows, NIGHTS, RUNS))


def correlated(rows: int, draw: np.random.Generator) -> tuple[Floats, Floats]:
    """Nights that resemble the night before: AR(0.5) with innovations of 1.2 %, and 0.6 % of each run's own."""
    common = 0.012 * draw.standard_normal((rows, NIGHTS))
    common[:, 0] /= np.sqrt(1 - 0.5**2)
    for night in range(1, NIGHTS):
        common[:, night] += 0.5 * common[:, night - 1]
    return common, 0.006 * draw.standard_normal((rows, NIGHTS, RUNS))


def slow_nodes(rows: int, draw: np.random.Generator) -> tuple[Floats, Floats]:
    """0.8 %, and one run in five lands on a node that is 5 % slow."""
    shape = (rows, NIGHTS, RUNS)
    return np.zeros(shape[:2]), 0.008 * draw.standard_normal(shape) - 0.05 * (draw.random(shape) < 0.2)


def outliers(rows: int, draw: np.random.Generator) -> tuple[Floats, Floats]:
    """1 %, and one run in twenty loses 10 to 40 %."""
    shape = (rows, NIGHTS, RUNS)
    lost = draw.uniform(0.1, 0.4, shape) * (draw.random(shape) < 0.05)
    return np.zeros(shape[:2]), 0.01 * draw.standard_normal(shape) - lost


def drifting(rows: int, draw: np.random.Generator) -> tuple[Floats, Floats]:
    """A sine of 1 % over 180 nights, one of 0.6 % over a week, and 0.8 % of noise."""
    night, phase = np.arange(NIGHTS), 2 * np.pi * draw.random((2, rows, 1))
    slow, weekly = (np.sin(2 * np.pi * night / days + at) for days, at in zip((180, 7), phase, strict=True))
    return 0.01 * slow + 0.006 * weekly, 0.008 * draw.standard_normal((rows, NIGHTS, RUNS))


WORLDS = {
    "white": white,
    "AR": correlated,
    "slow nodes": slow_nodes,
    "outliers": outliers,
    "drift + weekly": drifting,
}


@dataclass(frozen=True)
class Nights:
    """Series of nights: ``runs`` (series x nights x attempts), the night of each drop (NIGHTS: none), what the judge did."""

    runs: Floats
    drops: NDArray[np.int64]
    regressed: NDArray[np.bool_]
    reruns: NDArray[np.int64]


def nights(world: str, rows: int, size: float, seed: int) -> Nights:
    """Return *rows* series of *world*; with a *size* each drops by that share in one of its nights 60 to 129."""
    draw = np.random.default_rng([seed, list(WORLDS).index(world), round(size * 1000)])
    common, own = WORLDS[world](rows, draw)
    runs = 1 + common[:, :, None] + own
    drops = draw.integers(60, NIGHTS - 20, rows) if size else np.full(rows, NIGHTS)
    runs *= np.where(np.arange(NIGHTS)[None, :, None] >= drops[:, None, None], 1 - size, 1.0)
    ruled = [_judged(series) for series in runs]
    return Nights(
        runs, drops, np.array([regressed for regressed, _ in ruled]), np.array([made for _, made in ruled])
    )


def _judged(runs: Floats) -> tuple[list[bool], list[int]]:
    """Return for each night whether the judge calls it regressed, and how many re-runs it asked for."""
    base = float(np.median(runs[:ACCEPTED, 0]))
    accepted: list[float] = []
    drops: list[float] = []
    regressed, made = [False] * NIGHTS, [0] * NIGHTS
    for night, attempts in enumerate(runs.tolist()):
        first, *again = ((base - value) / base for value in attempts)
        limits = fence.make_fence(accepted, base, TOLERANCE)
        median = fence.nights_median(drops, first)
        if night >= ACCEPTED and (first > limits.width or (median is not None and median > limits.half)):
            while (decision := quorum.confirmed(again[: made[night]], limits.width)) is None:
                made[night] += quorum.wanted(again[: made[night]], limits.width)
            regressed[night] = decision
        if not regressed[night]:  # only what passed is history
            accepted = [*accepted, attempts[0]][-fence.WINDOW :]
            drops = [*drops, first][-fence.WINDOW :]
    return regressed, made
