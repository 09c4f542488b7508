"""Whether the newest nights of a series show a loss for which its test must fail. Pure.

The nights are compared with those before them (:mod:`pytest_mlhpc.judge.changes`), in standard errors that know the
spread of the series and how much neighbouring nights resemble each other. A test fails for a loss that matters and is
certain: one night that all re-runs confirm, or several nights. Figures for tests and sites are in docs/judge.md.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pytest_mlhpc.judge.changes import Attempts, Change, Drop, find, lasting_drop, lasting_drops
from pytest_mlhpc.judge.fence import MAD_TO_SIGMA, SIGMA_FLOOR, SMALLEST, DropLimits

#: Nights from which on a series is judged by its own nights; younger ones are judged by the baseline's tolerance.
ENOUGH = DropLimits.enough
#: Nights before the loss that say what the level was, at most.
BEFORE = DropLimits.before
#: ... and at least this many for each night of the loss: the level of a few nights may be a high spell of a noisy series.
BEFORE_EACH = 3
#: Standard errors from which on re-runs are asked for.
GATE = 1.8
#: Standard errors from which on a loss that re-runs left undecided is suspect.
SUSPECT = 3.0
#: A single night must have lost this multiple of what matters, several nights this share: half of all estimates of a loss
#: that just matters lie below it.
SINGLE, SEVERAL = 1.4, 0.6
#: An attempt confirms a loss from this share of its size on; of a loss of several nights, no night and no attempt of tonight
#: may lie below the other share.
CONFIRMS, AGREES = 0.6, 0.3
#: Attempts of tonight that must confirm a loss, and their share: one of five may be off, two of nine.
ATTEMPTS_CONFIRM, SHARE_CONFIRMS = 4, 0.75
#: Nights at both ends of an epoch whose levels say whether it has drifted.
MONTH = 30
#: Standard errors that noise lies farther off where too few re-runs of tonight could confirm a loss.
ALONE = 1.0
#: ... and so many nearer where as many further re-runs confirm it.
FURTHER = 0.5
#: Attempts of tonight from which on further re-runs count as made: one of nine may have broken.
FURTHER_MADE = 8
#: An improvement is a level of its own from this multiple of its nights' spread on, where both levels hardly overlap.
APART = 4.0
#: Nights whose median says whether a level was better for a while.
BLOCK = 8
#: A night that was not run again is reported when it lies so many times as far off as any of the nights before.
UNHEARD = 20.0
#: Nights whose median says that a level is back, when it lies on the better side of the middle of the loss.
BACK = 3


#: Standard errors that noise alone reaches once a month among 600 series, re-runs and nights agreeing (docs/judge.md), and how
#: many more are believed: 1.5 decades farther than the records go.
_OF_600, _BELIEVED = 4.5, 1.5


@dataclass(frozen=True)
class LossLimits:
    """What a loss must be to fail its test.

    ``matters`` is its least size (share of the level), ``score`` its least certainty (standard errors), ``alone`` the least one
    where too few re-runs of tonight could confirm it, ``further`` the least one where twice as many did.
    """

    matters: float = 0.05
    score: float = _OF_600
    alone: float = _OF_600 + ALONE
    further: float = _OF_600 - FURTHER


def limits_for(series: float, matters: float) -> LossLimits:
    """Return the limits for a site that judges so many series for each false loss a month that it accepts.

    On 240,000 nights of 40 series of public records that did not change, each begun at each of its nights, 1.0 spells of red
    began in a month of 600 series at a score of 3.5, 0.45 at 4, 0.07 at 4.25, and none at 4.5. The rule was chosen on these
    series; others show more (docs/judge.md). With further re-runs 0.3 began at 4.0. Each decade of series asks for one more.
    """
    decades = math.log10(max(series, 1.0) / 600)
    score = _OF_600 + decades
    return LossLimits(matters, max(3.5, score), max(4.0, score + ALONE), max(3.5, score - FURTHER))


@dataclass(frozen=True)
class Loss:
    """A loss: how many nights it has lasted, the level before it, its share of that level, standard errors."""

    nights: int
    level: float
    size: float
    score: float


def possible_losses(series: Sequence[tuple[Sequence[Attempts], str]]) -> list[Drop | None]:
    """Return of each (history, better) the loss that re-runs of tonight should confirm or refute, or None."""
    return lasting_drops(
        [(_standing(history, better), better) for history, better in series], DropLimits(GATE, SMALLEST)
    )


def certain_losses(series: Sequence[tuple[Sequence[Attempts], str]], limits: LossLimits) -> list[Loss | None]:
    """Return of each (history, better) the loss that fails its test tonight for the first time, or None.

    Args:
        series: the nights of one epoch, oldest first, tonight last, and which direction is better.
        limits: what the loss must be.
    """
    found: list[Loss | None] = [None] * len(series)
    series = [(_standing(history, better), better) for history, better in series]
    for nights in DropLimits.nights:
        least = limits.matters * (SINGLE if nights == 1 else SEVERAL)
        rule = DropLimits(limits.further, least, (nights,), enough=max(ENOUGH, BEFORE_EACH * nights))
        drops = lasting_drops(series, rule)
        for row, ((history, better), drop) in enumerate(zip(series, drops, strict=True)):
            if drop is not None and found[row] is None:
                found[row] = _agreed(history, better, drop, limits)
    return found


def further_reruns(series: Sequence[tuple[Sequence[Attempts], str]], limits: LossLimits) -> list[bool]:
    """Return of each (history, better) whether as many further re-runs shall confirm or refute what those of tonight confirm.

    A loss that would be certain without any re-run needs none.
    """
    found = certain_losses(series, replace(limits, score=limits.further))
    return [loss is not None and loss.score < limits.alone for loss in found]


def chance_a_month(series: float, score: float, *, confirmed: bool = True, attempts: int = 0) -> float:
    """Return how many losses of that certainty noise alone shows in a month among so many series: the inverse of :func:`limits_for`.

    *confirmed* is whether re-runs agreed, of so many *attempts* in all. No score far beyond what the noise of the records reaches
    is believed.
    """
    nearer = FURTHER if attempts >= FURTHER_MADE else 0.0 if confirmed else -ALONE
    beyond = score - _OF_600 + nearer
    return series / 600 * math.pow(10.0, -min(beyond, _BELIEVED))


def incident_losses(
    series: Sequence[tuple[Sequence[Attempts], str]], limits: LossLimits
) -> list[Loss | None]:
    """Return of each (history, better) the loss that people are notified of tonight, or None; a history has at least one night.

    Beside :func:`certain_losses` that is tonight's verdict of a series too young for it, and a night that nothing confirms but
    lies :data:`UNHEARD` times as far off as any night before.
    """
    series = [([*without_wrong_baseline(history[:-1]), history[-1]], better) for history, better in series]
    found = certain_losses([(_with_open(history), better) for history, better in series], limits)
    return [
        loss or _young(history) or _unheard(history, better)
        for loss, (history, better) in zip(found, series, strict=True)
    ]


def open_loss(history: Sequence[Attempts], better: str) -> Loss | None:
    """Return the loss for which the newest night of *history* failed, if tonight's level is not back; tonight is last.

    A loss lasts until the median of three nights is nearer to the level before it than to the level after it.
    """
    failed = list(itertools.takewhile(lambda night: night.regressed, reversed(history[:-1])))
    if not failed:
        return None
    began = len(history) - 1 - len(failed)
    before = levels(_standing(history[: began + 1], better)[:-1])[-BEFORE:]
    during = levels(history[began:-1])[:BACK]
    now = levels(history[began:])[-BACK:]
    if not before or not during or not now:
        return None
    level = statistics.median(before)
    size = _lost(statistics.median(during), level, better)
    if size < SMALLEST:
        return None  # the test failed for another metric
    loss = Loss(len(failed) + 1, level, size, math.inf)
    return None if is_back(statistics.median(now), loss, better) and len(failed) >= BACK - 1 else loss


def suspected(history: Sequence[Attempts], better: str, limits: LossLimits) -> bool:
    """Return whether tonight's level, after all re-runs, may be a loss that matters."""
    rule = DropLimits(SUSPECT, SEVERAL * limits.matters)
    return lasting_drop(_standing(history, better), better, rule) is not None


def gained(history: Sequence[Attempts], better: str, limits: LossLimits) -> bool:
    """Return whether the newest nights are better than those before, tonight alone or several."""
    other = "lower" if better == "higher" else "higher"
    return lasting_drop(_standing(history, better), other, DropLimits(limits.alone, SMALLEST)) is not None


def drift(history: Sequence[Attempts], better: str, limits: LossLimits) -> Loss | None:
    """Return by how much the last month of an epoch is worse than its first, if that matters and is certain."""
    known = [night for night in history[:-1] if night.level is not None and not night.regressed]
    known += history[-1:]
    if not history[-1].finite or len(known) < 2 * MONTH:
        return None
    ends = [*known[:MONTH], *known[-MONTH:]]
    rule = DropLimits(limits.alone, SEVERAL * limits.matters, (MONTH,), before=MONTH)
    drop = lasting_drop(ends, better, rule)
    level = statistics.median(levels(known[:MONTH]))
    return Loss(MONTH, level, drop.size, drop.score) if drop else None


def is_back(value: float, loss: Loss, better: str) -> bool:
    """Return whether *value* is nearer to the level before *loss* than to the level after it."""
    return _lost(value, loss.level, better) < loss.size / 2


def unchanged_month(nights: Sequence[Attempts]) -> list[float]:
    """Return the levels of the first month of an epoch, if it is over and no change of level lies in it; else nothing."""
    month = levels(nights)[:MONTH]
    return month if len(month) == MONTH and not find(month) else []


def without_wrong_baseline(nights: Sequence[Attempts]) -> Sequence[Attempts]:
    """Return *nights*, those of the first month as usual ones if their test failed from the first nights on and the level did not change.

    Nothing was lost in such a month: the accepted value was another level than that of the nights. A loss that began after
    a few nights stays one.
    """
    known = [number for number, night in enumerate(nights) if night.level is not None]
    if sum(not nights[number].regressed for number in known) > ENOUGH:
        return nights
    failed = sum(nights[number].regressed for number in known[:BLOCK])
    if failed <= BLOCK // 2 or not unchanged_month(nights):
        return nights
    end = known[MONTH - 1] + 1
    return [*(replace(night, regressed=False) for night in nights[:end]), *nights[end:]]


def levels(nights: Sequence[Attempts]) -> list[float]:
    """Return the levels of the nights that have one."""
    return [night.level for night in nights if night.level is not None]


def _lost(value: float, level: float, better: str) -> float:
    """Return the share of *level* that *value* lacks, negative where it is better."""
    if not level:
        return 0.0
    return (level - value if better == "higher" else value - level) / abs(level)


def _standing(history: Sequence[Attempts], better: str) -> list[Attempts]:
    """Return the nights that say what is usual, and tonight: not those of losses that are over, nor those before an improvement."""
    usual = [night for night in history[:-1] if not night.regressed]
    return [*usual[_improved(usual, better) :], history[-1]]


def _improved(usual: Sequence[Attempts], better: str) -> int:
    """Return the night from which on a level is better that has lasted for enough nights to be compared with; 0 where none is.

    Nobody may have accepted it, and yet the level before is usual no more: whoever falls back to it has lost something. Where
    the nights of both levels overlap, they stay one level: a noisy record rises for weeks and returns without a change.
    """
    at = [number for number, night in enumerate(usual) if night.level is not None][-(BEFORE + ENOUGH) :]
    values = [usual[number].level or 0.0 for number in at]
    if len(values) < 2 * ENOUGH or better not in {"higher", "lower"} or not _rose(values, better):
        return 0
    gains = [
        change
        for change in find(values)
        if len(values) - change.last >= ENOUGH
        and _lost(change.after, change.before, better) < -SMALLEST
        and _stands_apart(values, change)
    ]
    return at[gains[-1].last] if gains else 0


def _stands_apart(values: Sequence[float], change: Change) -> bool:
    """Return whether both levels of *change* differ by more than their nights do."""
    off = [abs(value - change.before) for value in values[: change.index]]
    off += [abs(value - change.after) for value in values[change.index :]]
    return abs(change.after - change.before) > APART * MAD_TO_SIGMA * statistics.median(off)


def _rose(values: Sequence[float], better: str) -> bool:
    """Return whether some nights together are better than others before them: else no change of level needs to be looked for.

    Levels that are :data:`APART` spreads apart have blocks that are half as far apart.
    """
    blocks = [values[begin : begin + BLOCK] for begin in range(0, len(values) - BLOCK + 1, BLOCK)]
    medians = [statistics.median(block) for block in blocks]
    off = [abs(value - median) for block, median in zip(blocks, medians, strict=True) for value in block]
    least = APART / 2 * MAD_TO_SIGMA * statistics.median(off)
    return any(
        _lost(late, early, better) < -SMALLEST and abs(late - early) > least
        for early, late in itertools.combinations(medians, 2)
    )


def _with_open(history: Sequence[Attempts]) -> list[Attempts]:
    """Return the nights with those of a loss that lasts until tonight: a test that is red already asks for no re-runs."""
    began = len(history)
    while began and history[began - 1].regressed:
        began -= 1
    return [*history[:began], *(replace(night, regressed=False) for night in history[began:])]


def _young(history: Sequence[Attempts]) -> Loss | None:
    """Return the loss for which the test of a young series failed tonight."""
    known = sum(night.level is not None for night in history)
    failed = history[-1].regressed and history[-1].finite and known <= ENOUGH
    return Loss(1, math.nan, math.nan, math.inf) if failed else None


def _unheard(history: Sequence[Attempts], better: str) -> Loss | None:
    """Return the loss of a night without re-runs that is far beyond all nights before."""
    known, tonight = levels(history[:-1])[-BEFORE:], history[-1]
    if better not in {"higher", "lower"} or len(known) < ENOUGH or tonight.reruns or not tonight.finite:
        return None
    level = statistics.median(known)
    farthest = max(SIGMA_FLOOR, *(abs(_lost(value, level, better)) for value in known))
    size = _lost(tonight.value, level, better)
    return Loss(1, level, size, math.inf) if size > max(SMALLEST, UNHEARD * farthest) else None


def _agreed(history: Sequence[Attempts], better: str, drop: Drop, limits: LossLimits) -> Loss | None:
    """Return the loss if tonight's attempts and the nights since it began agree with its size."""
    known = levels(history)
    level = statistics.median(known[: -drop.nights][-BEFORE:])
    tonight = [_lost(value, level, better) for value in history[-1].finite]
    nights = [_lost(value, level, better) for value in known[-drop.nights :]]
    if len(tonight) >= ATTEMPTS_CONFIRM:
        certain = limits.further if len(tonight) >= FURTHER_MADE else limits.score
        least = max(ATTEMPTS_CONFIRM, math.ceil(SHARE_CONFIRMS * len(tonight)))
        agreed = sum(one > CONFIRMS * drop.size for one in tonight) >= least
    else:
        certain, agreed = limits.alone, drop.nights > 1
    agreed = agreed and drop.score >= certain
    if drop.nights > 1:
        agreed = agreed and min(*nights, *tonight) > AGREES * drop.size
    return Loss(drop.nights, level, drop.size, drop.score) if agreed else None
