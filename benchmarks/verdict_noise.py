"""Real noise of benchmarks over nights, read from a folder, with faults planted into it.

The folder has ``series.json``: ``{"series": [{"id", "kind", "sigma", "lag1", "values"}, ...]}``, one value a night, higher is
better. In series of the kind ``screened`` nothing changed, so that a test that fails there fails falsely; in those of a
``fixed program`` the machine may have changed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.history_worlds import ATTEMPTS, RUNS, Floats
from pytest_mlhpc.judge.sensitivity import rerun_deviations

#: Nights of a series that are looked at, the first one that is judged, and the nights in which a fault may begin.
NIGHTS, JUDGED, FAULTS = 160, 30, (45, 75)
#: Nights within which a fault has to be found; a drift takes longer.
SOON, DRIFT_SOON = 14, 44
#: A bad node: so much slower, in so many nights. A drift: so much, over so many nights.
BAD_NODE, BAD_SHARE, DRIFT, DRIFT_NIGHTS = 0.06, 0.2, 0.05, 30
CLASSES = {"tight": 0.005, "medium": 0.015, "noisy": 0.06}


@dataclass(frozen=True)
class Noise:
    """One series of the record."""

    kind: str
    sigma: float
    lag1: float
    values: Floats

    @property
    def size(self) -> str:
        """The class of its noise."""
        return next(name for name, most in CLASSES.items() if self.sigma < most or name == "noisy")


@dataclass(frozen=True)
class Planted:
    """Runs of many series (series x nights x attempts), and the night in which each one's fault begins."""

    noise: Sequence[Noise]
    runs: Floats
    begins: NDArray[np.int64]
    nights: NDArray[np.int64]


def read(folder: Path) -> list[Noise]:
    """Return the series of the record in *folder*."""
    found = json.loads((folder / "series.json").read_text(encoding="utf-8"))["series"]
    return [
        Noise(one["kind"], one["sigma"], one["lag1"], np.array(one["values"], dtype=np.float64))
        for one in found
    ]


def planted(noise: Sequence[Noise], fault: str, seed: int) -> Planted:
    """Return each series with *fault*: clean, step N, drift, bad node, outliers, noise.

    A re-run has the level of its night; of the night's own deviation, at most 3 sigma of it, as much as neighbouring nights
    share; and the rest drawn from the nights around it.
    """
    draw = np.random.default_rng(seed)
    runs = np.full((len(noise), NIGHTS, ATTEMPTS), np.nan)
    begins, lengths = np.zeros(len(noise), dtype=np.int64), np.zeros(len(noise), dtype=np.int64)
    for row, one in enumerate(noise):
        nights = min(len(one.values), NIGHTS)
        first = int(draw.integers(0, len(one.values) - nights + 1))
        values = one.values[first : first + nights]
        begin = int(draw.integers(FAULTS[0], min(FAULTS[1], nights - 20) + 1))
        runs[row, :nights] = planted_runs(replace(one, values=values), fault, begin, draw)
        begins[row], lengths[row] = begin, nights
    return Planted(noise, runs, begins, lengths)


def planted_runs(one: Noise, fault: str, begin: int, draw: np.random.Generator) -> Floats:
    """Return the runs (nights x attempts) of all nights of *one* with a *fault* that begins in the night *begin*."""
    further = draw.spawn(1)[0]
    return np.hstack([_attempts(one, fault, begin, draw), _attempts(one, fault, begin, further)[:, 1:]])


def _attempts(one: Noise, fault: str, begin: int, draw: np.random.Generator) -> Floats:
    values = one.values
    nights, after = len(values), np.arange(len(values)) >= begin
    level = np.array([np.median(values[max(0, at - 25) : at + 26]) for at in range(nights)])
    if one.kind == "screened":
        level[:] = np.median(values)
    own = np.log(values / level)
    sigma = max(1.4826 * float(np.median(np.abs(own - np.median(own)))), 1e-4)
    if fault == "noise":
        own = np.where(after, 2.5 * own, own)
    base: Floats = np.log(level)
    if fault.startswith("step"):
        base = base + np.where(after, np.log(1 - float(fault.split()[1]) / 100), 0.0)
    elif fault == "drift":
        base = base + np.log(
            1 - DRIFT * np.clip(np.arange(nights) - begin + 1, 0, DRIFT_NIGHTS) / DRIFT_NIGHTS
        )
    alike = max(one.lag1, 0.0)
    around = np.array([draw.choice(own[max(0, at - 25) : at + 26], RUNS - 1) for at in range(nights)])
    again = rerun_deviations(own, around, alike, sigma)
    logs: Floats = base[:, None] + np.column_stack([own, again])
    if fault == "bad node":
        logs += np.where((draw.random(logs.shape) < BAD_SHARE) & after[:, None], np.log(1 - BAD_NODE), 0.0)
    elif fault == "outliers":
        hit = draw.choice(np.arange(begin, nights), min(5, nights - begin), replace=False)
        logs[hit, 0] += np.log(1 - draw.uniform(0.08, 0.25, len(hit)))
    return np.exp(logs)
