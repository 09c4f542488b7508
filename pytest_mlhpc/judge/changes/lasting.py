"""Whether a drop that shows tonight is there to stay: the quorum of re-runs and the change point at the series' end together.

The quorum is quick, but all it asks is asked in one night, so that it cannot tell a bad night from a bad week; a change point
needs nights. Here the newest 1 to 12 nights are compared with the 60 before them, in standard errors that know how much
neighbouring nights resemble each other. Where the judge's re-runs confirm the drop, less is asked of the nights; where they
did not, nothing is said tonight.
"""

from __future__ import annotations

import importlib
import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pytest_mlhpc.judge import quorum
from pytest_mlhpc.judge.fence import FENCE_SIGMAS, SMALLEST, WINDOW, robust_sigma


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
class Rule:
    """The limits, in standard errors; chosen by the simulation of ``benchmarks/history.py`` (docs/change-points.md)."""

    confirmed: float = 3.1  #: that a drop must have when re-runs confirm it tonight
    alone: float = 3.9  #: ... and when nothing was re-run, of two nights at least
    nights: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12)  #: how long the drop may have lasted
    before: int = 60  #: nights before it that say what is usual, at most
    enough: int = 16  #: ... and at least; with fewer, the quorum decides alone
    unheard: float = 20.0  #: ... one night alone: so many times as far off as any of the nights before
    smallest: float = SMALLEST  #: share of the level; nothing below it is a drop
    clip: float = 3.0  #: sigmas that one night of those before may count at most
    clip_recent: float = 3.0  #: ... one of several new nights
    tail: float = 0.0  #: quantile of the nights before whose distance counts as spread too
    quorum: bool = True  #: tonight's re-runs must agree by themselves; else their median counts alone
    clip_single: float = 6.0  #: ... a night that stands alone

    @property
    def longest(self) -> int:
        """Nights of history that are looked at."""
        return self.before + max(self.nights)


@dataclass(frozen=True)
class Drop:
    """A drop that lasts: since how many nights, by which share of the level before, and how many standard errors that is.

    Where there is too little history and the quorum decided alone, ``size`` is NaN and ``score`` infinite.
    """

    nights: int
    size: float
    score: float


def lasting_drop(history: Sequence[Attempts], better: str, rule: Rule | None = None) -> Drop | None:
    """Return the drop at the end of *history* that quorum and nights agree on, the surest one; None when there is none.

    Args:
        history: the nights of one baseline epoch, oldest first, tonight last. Nights without a finite figure are left
            out; without one tonight there is no drop.
        better: higher or lower; for another word there is no worse, hence no drop.
        rule: the limits.
    """
    return lasting_drops([(history, better)], rule)[0]


def lasting_drops(
    series: Sequence[tuple[Sequence[Attempts], str]], rule: Rule | None = None
) -> list[Drop | None]:
    """Return what :func:`lasting_drop` says of each (history, better), in their order and in far less time."""
    limits = rule or Rule()
    arrays = importlib.import_module(f"{__package__}.ends")  # with NumPy: when it is needed
    found: list[Drop | None] = [None] * len(series)
    lengths: dict[int, list[_End]] = {}
    for number, (history, better) in enumerate(series):
        if better not in {"higher", "lower"} or not history or not history[-1].finite:
            continue
        end = _End(number, *_turned(history, 1.0 if better == "higher" else -1.0, limits))
        if len(end.levels) <= limits.enough:
            found[number] = Drop(1, math.nan, math.inf) if history[-1].regressed else None
        elif end.confirmed or not history[-1].reruns:
            lengths.setdefault(len(end.levels), []).append(end)
    for same in lengths.values():
        drops = arrays.ends(
            [end.levels for end in same], [end.confirmed for end in same], [end.best for end in same], limits
        )
        for end, drop in zip(same, drops, strict=True):
            found[end.number] = Drop(*drop) if drop else None
    return found


def confirmed(history: Sequence[Attempts], better: str) -> bool:
    """Return whether the re-runs of tonight, the last of *history*, confirm a drop below the nights before."""
    if not history or not history[-1].finite:
        return False
    return _turned(history, 1.0 if better == "higher" else -1.0, Rule())[2]


@dataclass(frozen=True)
class _End:
    """The end of one series, turned so that lower is worse; ``best`` of tonight's attempts."""

    number: int
    levels: list[float]
    best: float
    confirmed: bool


def _turned(history: Sequence[Attempts], sign: float, rule: Rule) -> tuple[list[float], float, bool]:
    known = (sign * night.level for night in reversed(history) if night.level is not None)
    newest = list(itertools.islice(known, rule.longest))
    tonight = history[-1]
    confirmed = not rule.quorum or _agree(newest[1:], tonight, sign)
    return newest[::-1], max(sign * value for value in tonight.finite), confirmed


def _agree(before: Sequence[float], tonight: Attempts, sign: float) -> bool:
    """Return whether the re-runs of tonight confirm a drop below the levels *before*, all turned so that lower is worse."""
    again = [sign * value for value in tonight.reruns if math.isfinite(value)]
    if not again or not before:
        return False
    centre = statistics.median(before)
    if not centre:
        return False
    width = max(FENCE_SIGMAS * robust_sigma(before[:WINDOW], abs(centre)), SMALLEST)
    return quorum.confirmed([(centre - value) / abs(centre) for value in again], width) is not False
