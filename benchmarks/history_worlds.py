"""Nights that are made up: five kinds of noise, a drop in some of them, and the real judge on top.

All figures are shares: night by night a *run* is 1 + what all runs of that night have in common + its own noise. Re-runs of
one night share the common part and redraw their own. The worlds are those by which the judge's rules were designed.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pytest_mlhpc.judge import fence, losses
from pytest_mlhpc.judge.changes import Attempts
from pytest_mlhpc.judge.losses import LossLimits, limits_for
from pytest_mlhpc.judge.rules import AT_ONCE

Floats = NDArray[np.float64]

#: Nights of a series, and how many of them come first to say what is usual: an alarm there is not counted.
NIGHTS, QUIET = 150, 30
#: Nights before which nothing is judged.
ACCEPTED = 8
TOLERANCE = 0.05
#: Attempts of a night at first; further re-runs are drawn apart, so that they change no other draw.
RUNS, ATTEMPTS = 1 + fence.RERUNS, 1 + 2 * fence.RERUNS


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
    own = np.concatenate([own, WORLDS[world](rows, draw.spawn(1)[0])[1][:, :, 1:]], axis=2)
    runs = 1 + common[:, :, None] + own
    drops = draw.integers(60, NIGHTS - 20, rows) if size else np.full(rows, NIGHTS)
    runs *= np.where(np.arange(NIGHTS)[None, :, None] >= drops[:, None, None], 1 - size, 1.0)
    regressed, made = judged_nights(runs)
    return Nights(runs, drops, regressed, made)


def judged_nights(
    runs: Floats, limits: LossLimits | None = None
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return which nights of *runs* (series x nights x attempts; higher is better) the judge fails, and their re-runs.

    A figure that is NaN is of a night that the series does not have.
    """
    rule = limits or limits_for(len(runs), TOLERANCE)
    failed, made = np.zeros(runs.shape[:2], dtype=np.bool_), np.zeros(runs.shape[:2], dtype=np.int64)
    histories: list[list[Attempts]] = [[] for _ in runs]
    for night in range(runs.shape[1]):
        there = np.flatnonzero(~np.isnan(runs[:, night, 0])).tolist()
        for row in there:
            histories[row].append(Attempts(float(runs[row, night, 0])))
        lost = {row: loss for row in there if (loss := losses.open_loss(histories[row], "higher"))}
        others = [row for row in there if row not in lost]
        for row, loss in lost.items():
            ending = _ending(runs[row, night], loss)
            made[row, night] = len(ending)
            histories[row][-1] = Attempts(float(runs[row, night, 0]), ending)
        open_rows = [row for row, loss in lost.items() if not _is_over(histories[row][-1], loss)]
        gates = losses.possible_losses([(histories[row], "higher") for row in others])
        asked = [
            row for row, gate in zip(others, gates, strict=True) if gate is not None and night >= ACCEPTED
        ]
        for row in asked:
            histories[row][-1] = _rerun(runs[row, night, :RUNS])
        again = losses.further_reruns([(histories[row], "higher") for row in asked], rule)
        for row in itertools.compress(asked, again):
            histories[row][-1] = _rerun(runs[row, night])
        for row in asked:
            made[row, night] = len(histories[row][-1].reruns)
        found = losses.certain_losses([(histories[row], "higher") for row in asked], rule)
        for row in [*open_rows, *(row for row, loss in zip(asked, found, strict=True) if loss)]:
            failed[row, night] = True
            histories[row][-1] = replace(histories[row][-1], regressed=True)
    return failed, made


def _rerun(runs: Floats) -> Attempts:
    return Attempts(float(runs[0]), tuple(runs[1:].tolist()))


def _ending(runs: Floats, loss: losses.Loss) -> tuple[float, ...]:
    """Return the re-runs that are made of a night whose first run says that a loss is over."""
    return tuple(runs[1 : 1 + AT_ONCE].tolist()) if losses.is_back(float(runs[0]), loss, "higher") else ()


def _is_over(night: Attempts, loss: losses.Loss) -> bool:
    """Return whether first run and re-runs agree, as :mod:`pytest_mlhpc.judge.rules` asks."""
    return bool(night.reruns) and all(losses.is_back(value, loss, "higher") for value in night.finite)
