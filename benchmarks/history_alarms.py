"""Who cries when: quorum and nights together, and rivals at equal false alarms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.history_worlds import ACCEPTED, NIGHTS, QUIET, Floats, Nights
from pytest_mlhpc.judge.changes import Attempts
from pytest_mlhpc.judge.fence import SMALLEST
from pytest_mlhpc.judge.losses import SEVERAL, incident_losses, limits_for

Alarms = NDArray[np.bool_]  # series x nights

#: An alarm within so many nights of one that was counted is the same one; a drop is found within so many nights.
SAME, SOON = 5, 14
#: Nights, at most, after which half of the drops of 5 % are told. Where a fifth of the nights is as slow as that by itself, a
#: drop that is told at once would be told falsely as well.
LATE = {"slow nodes": 3}
#: Most false alarms in 100 nights.
MOST_FALSE = 0.4


@dataclass(frozen=True)
class Found:
    """Share of drops found within 14 nights, and the median delay in nights of those found."""

    share: float
    delay: float


def together(nights: Nights) -> Alarms:
    """Return the nights in which :func:`incident_losses` tells of a loss, with the limits of a site of one series."""
    rows, attempts = nights.runs.tolist(), nights.reruns.tolist()
    told = [
        [
            Attempts(runs[0], tuple(runs[1 : 1 + made]), bool(regressed))
            for runs, made, regressed in zip(series, again, said, strict=True)
        ]
        for series, again, said in zip(rows, attempts, nights.regressed, strict=True)
    ]
    limits = limits_for(1, SMALLEST / SEVERAL)
    alarms = np.zeros(nights.regressed.shape, dtype=np.bool_)
    for night in range(ACCEPTED, NIGHTS):
        found = incident_losses([(series[: night + 1], "higher") for series in told], limits)
        alarms[:, night] = [loss is not None for loss in found]
    return alarms


def false_alarms(alarms: Alarms) -> float:
    """Return false alarms in 100 nights of series without a drop."""
    count = 0
    for series in alarms:
        last = -NIGHTS
        for night in np.flatnonzero(series[QUIET:]):
            if night - last > SAME:
                count, last = count + 1, int(night)
    return 100 * count / alarms[:, QUIET:].size


def found(alarms: Alarms, drops: NDArray[np.int64]) -> Found:
    """Return how many of the *drops* are found and when."""
    delays = [
        int(later[0])
        for series, night in zip(alarms, drops, strict=True)
        if (later := np.flatnonzero(series[night : night + SOON])).size
    ]
    return Found(len(delays) / len(drops), float(np.median(delays)) if delays else np.inf)


Score = Callable[[Floats], Floats]


def _moving(count: int, clip: float) -> Score:
    def score(falls: Floats) -> Floats:
        sums = np.cumsum(np.clip(falls, -clip, clip), axis=1)
        sums[:, count:] = sums[:, count:] - sums[:, :-count]
        return sums / count

    return score


def _cusum(slack: float, clip: float) -> Score:
    def score(falls: Floats) -> Floats:
        total, out = np.zeros(len(falls)), np.zeros_like(falls)
        for night in range(falls.shape[1]):
            total = np.maximum(total + np.clip(falls[:, night], -clip, clip) - slack, 0.0)
            out[:, night] = total
        return out

    return score


def rivals() -> dict[str, Score]:
    """Return scores that grow with a drop: means of the last nights and CUSUMs, with and without clipping."""
    clips = {"": 9.0, ", clipped at 6 %": 0.06}
    means = {f"mean of {n}{word}": _moving(n, clip) for n in (1, 2, 3, 5, 7) for word, clip in clips.items()}
    sums = {
        f"CUSUM k = {100 * k:g} %{word}": _cusum(k, clip)
        for k in (0.005, 0.01, 0.014, 0.02)
        for word, clip in clips.items()
    }
    return {**means, **sums}


def best_rival(quiet: Nights, dropped: Nights, *, knows: bool) -> tuple[str, Found]:
    """Return the rival that finds most drops with a limit chosen for at most 0.4 false alarms on *quiet*.

    The limit is chosen on the very nights that it is held to, which is in their favour. Those that *know* are told the true level, as no tool is; others have what is in git, as the judge does. All
    see first attempts only.
    """
    results = [(name, _at_equal(score, quiet, dropped, knows)) for name, score in rivals().items()]
    return max(results, key=lambda result: result[1].share)


def _at_equal(score: Score, quiet: Nights, dropped: Nights, knows: bool) -> Found:
    falls = score(_falls(quiet, knows))
    for limit in _limits(falls):
        if false_alarms(falls > limit) <= MOST_FALSE:
            return found(score(_falls(dropped, knows)) > limit, dropped.drops)
    return Found(0.0, np.inf)


def _falls(nights: Nights, knows: bool) -> Floats:
    first = nights.runs[:, :, 0]
    return 1 - first / (1.0 if knows else np.median(first[:, :ACCEPTED], axis=1, keepdims=True))


def _limits(falls: Floats) -> Iterator[float]:
    shares: Sequence[float] = (0.98, 0.985, 0.99, 0.9925, 0.995, 0.996, 0.997, 0.998, 0.999, 1.0)
    return (float(np.quantile(falls, share)) for share in shares)
