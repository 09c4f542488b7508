"""Repeated runs and their result: fastest and slowest dropped, mean of the rest. Pure.

MLPerf Training rules, "Benchmark Results": one run that did not converge may be dropped as the slowest; with more there is no
result.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

#: Runs below which nothing is left when fastest and slowest are dropped.
FEWEST: Final = 3


@dataclass(frozen=True)
class Score:
    """The result of a set of runs. ``seconds`` is None where there is none, and ``why`` says so.

    ``dropped`` are the fastest and the slowest (None: one that did not converge); ``kept`` the others, in order of time.
    """

    seconds: float | None
    runs: int
    lost: int
    kept: tuple[float, ...] = ()
    dropped: tuple[float | None, float | None] | None = None
    why: str = ""

    @property
    def spread(self) -> float | None:
        """Half the range of the runs kept, relative to the result."""
        if self.seconds is None or len(self.kept) < 2:
            return None
        return (max(self.kept) - min(self.kept)) / 2 / self.seconds


def olympic(times: Sequence[float | None]) -> Score:
    """Return the score of runs that took *times* seconds; None stands for one that did not converge."""
    converged = sorted(time for time in times if time is not None and math.isfinite(time))
    runs, lost = len(times), len(times) - len(converged)
    if lost > 1:
        return Score(None, runs, lost, why=f"{lost} of {runs} runs did not converge; a result allows one")
    if runs < FEWEST:
        return Score(
            None, runs, lost, tuple(converged), why=f"{runs} of the {FEWEST} runs that an olympic mean takes"
        )
    ordered: list[float | None] = [*converged, *([None] if lost else [])]
    kept = tuple(time for time in ordered[1:-1] if time is not None)
    return Score(statistics.fmean(kept), runs, lost, kept, (ordered[0], ordered[-1]))
