"""One judged metric of a series that has nights enough: tonight against the nights before, not against one accepted value.

A test fails for a loss that matters and is certain, from the night on that it is certain until the level is back. What may be
such a loss is ``suspect``: the test passes, and the next nights decide. Pure.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pytest_mlhpc.judge import fence, losses
from pytest_mlhpc.judge.case import Case, Ruling, busy, speed
from pytest_mlhpc.judge.changes import Attempts
from pytest_mlhpc.judge.losses import Loss
from pytest_mlhpc.store.verdict import MetricVerdict, Verdict

#: Re-runs that are asked for at once.
AT_ONCE = 2


def enough(nights: Sequence[Attempts]) -> bool:
    """Return whether a series of these nights is judged by them: those that failed say nothing about what is usual."""
    return sum(night.level is not None and not night.regressed for night in nights) > losses.ENOUGH


def judge_night(case: Case) -> Ruling:
    """Judge tonight's attempts of a series with :func:`enough` nights."""
    if loss := losses.open_loss([*case.nights, case.tonight()], case.entry.better):
        return _still(case, loss)
    level = statistics.median(losses.levels(case.usual)[-losses.BEFORE :])
    if losses.possible_losses([([*case.nights, case.tonight()], case.entry.better)])[0] is None:
        return Ruling(_without_loss(case, level))
    history = [*case.nights, case.tonight(excused=True)]
    if excuse := _excuse(case, history):
        return Ruling(_verdict(case, Verdict.INCONCLUSIVE, level, excuse))
    if loss := losses.certain_losses([(history, case.entry.better)], case.limits)[0]:
        return Ruling(_verdict(case, Verdict.REGRESSED, loss.level, _certain(case, loss)))
    return _undecided(case, history, level)


def _excuse(case: Case, history: Sequence[Attempts]) -> str:
    """Return why tonight says nothing about the benchmark: a machine that was busy, or slower; else an empty string."""
    if reason := busy(case.attempts[0]):
        return f"the machine was busy: {reason}"
    if losses.possible_losses([(history, case.entry.better)])[0] is not None:
        return ""
    slower = 1.0 - speed(case.attempts[0], case.reference)
    return f"this machine is {slower:.1%} slower today, and corrected for that nothing is lost"


def _undecided(case: Case, history: Sequence[Attempts], level: float) -> Ruling:
    made, broken = len(case.attempts) - 1, case.setting.reruns_broken
    more = min(AT_ONCE, fence.RERUNS - made, case.setting.reruns_allowed, fence.MOST_TRIES - made - broken)
    if more > 0:
        reason = f"{more} more re-runs are needed"
        return Ruling(_verdict(case, Verdict.INCONCLUSIVE, level, reason), more)
    if not losses.suspected(history, case.entry.better, case.limits):
        return Ruling(_verdict(case, Verdict.PASSED, level))
    reason = f"{made} re-runs do not settle it" if made else "no re-runs were possible"
    return Ruling(_verdict(case, Verdict.SUSPECT, level, f"{reason}; the next nights decide"))


def _without_loss(case: Case, level: float) -> MetricVerdict:
    history, better = [*case.nights, case.tonight()], case.entry.better
    if drift := losses.drift(history, better, case.limits):
        count = losses.MONTH
        reason = f"the last {count} nights are {drift.size:.1%} worse than the first {count} of this epoch"
        return _verdict(case, Verdict.DRIFTED, drift.level, reason)
    made = len(case.attempts) - 1
    if made:
        return _verdict(case, Verdict.PASSED, level, f"{made} re-runs did not agree")
    if losses.gained([*case.nights, case.tonight(excused=True)], better, case.limits):
        return _verdict(case, Verdict.IMPROVED, level)
    return _verdict(case, Verdict.PASSED, level)


def _still(case: Case, loss: Loss) -> Ruling:
    """Tonight's level is not back, or has just come back, which re-runs may confirm."""
    back = [losses.is_back(value, loss, case.entry.better) for value in case.tonight(excused=True).finite]
    made = len(back) - 1
    if all(back) and made >= AT_ONCE:
        return Ruling(
            _verdict(case, Verdict.PASSED, loss.level, f"the level is back, as {made} re-runs agree")
        )
    allowed = min(
        AT_ONCE - made, case.setting.reruns_allowed, fence.MOST_TRIES - made - case.setting.reruns_broken
    )
    if all(back) and allowed > 0:
        text = "the level may be back; re-runs are needed"
        return Ruling(_verdict(case, Verdict.INCONCLUSIVE, loss.level, text), allowed)
    return Ruling(_verdict(case, Verdict.REGRESSED, loss.level, f"for {loss.nights} nights now"))


def _certain(case: Case, loss: Loss) -> str:
    lasted = "tonight" if loss.nights == 1 else f"for {loss.nights} nights"
    made = len(case.attempts) - 1
    return f"{lasted}, {loss.score:.1f} standard errors" + (f", {made} re-runs counted" if made else "")


def _verdict(case: Case, verdict: Verdict, level: float, reason: str = "") -> MetricVerdict:
    return case.verdict(verdict, reason, level=level)
