"""The rules of the judge: how one metric of one run gets its verdict. Pure.

Here stands what cannot be judged; a young series against its accepted value, ``new`` for eight nights and then judged though
nobody accepted it; and a series with nights enough, tonight against the nights before. A test fails for a loss that matters
and is certain, from the night on that it is certain until the level is back. What may be such a loss is ``suspect``: the test
passes, and the next nights decide.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pytest_mlhpc.judge import fence, losses
from pytest_mlhpc.judge.baseline_files import TOLERANCE, Entry
from pytest_mlhpc.judge.changes import Attempts
from pytest_mlhpc.judge.judged_metric import Case, Ruling, Setting, busy, speed, usable
from pytest_mlhpc.judge.losses import Loss
from pytest_mlhpc.node.protocol.schema import Measurement, MetricValue
from pytest_mlhpc.store import record
from pytest_mlhpc.store.definition import changed
from pytest_mlhpc.store.record import Epoch, MetricVerdict, Verdict
from pytest_mlhpc.store.text import quantity

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
    if more := _further(case, history):
        return Ruling(_verdict(case, Verdict.INCONCLUSIVE, level, f"{more} further re-runs are needed"), more)
    if loss := losses.certain_losses([(history, case.entry.better)], case.limits)[0]:
        return Ruling(_verdict(case, Verdict.REGRESSED, loss.level, _certain(case, loss)))
    return _undecided_night(case, history, level)


def _excuse(case: Case, history: Sequence[Attempts]) -> str:
    """Return why tonight says nothing about the benchmark: a machine that was busy, or slower; else an empty string."""
    if reason := busy(case.attempts[0]):
        return f"the machine was busy: {reason}"
    if losses.possible_losses([(history, case.entry.better)])[0] is not None:
        return ""
    slower = 1.0 - speed(case.attempts[0], case.reference)
    return f"this machine is {slower:.1%} slower today, and corrected for that nothing is lost"


def _further(case: Case, history: Sequence[Attempts]) -> int:
    """Return how many re-runs to make beyond the usual ones of a loss that these confirm, and that is only just certain."""
    made, by = len(case.attempts) - 1, case.setting.by
    more = min(
        2 * fence.RERUNS - made,
        by.reruns_allowed,
        fence.MOST_TRIES + fence.RERUNS - made - by.reruns_broken,
    )
    if made < fence.RERUNS or more <= 0:
        return 0
    return more if losses.further_reruns([(history, case.entry.better)], case.limits)[0] else 0


def _undecided_night(case: Case, history: Sequence[Attempts], level: float) -> Ruling:
    made, broken = len(case.attempts) - 1, case.setting.by.reruns_broken
    more = min(AT_ONCE, fence.RERUNS - made, case.setting.by.reruns_allowed, fence.MOST_TRIES - made - broken)
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
        AT_ONCE - made,
        case.setting.by.reruns_allowed,
        fence.MOST_TRIES - made - case.setting.by.reruns_broken,
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


#: Clean nights that settle a level: from as many the fence takes a width of its own.
NIGHTS = fence.ENOUGH
#: The reason of a settled entry, as ``mlhpc baseline propose`` writes it.
REASON = f"settled by {NIGHTS} nights"


@dataclass(frozen=True)
class Settling:
    """``entry`` is the settled level; None while fewer than :data:`NIGHTS` clean nights agree, of which ``nights`` are there."""

    nights: int
    entry: Entry | None = None


def settle(nights: Sequence[Attempts], metric: MetricValue, epoch: Epoch) -> Settling:
    """Return what the *nights* of a series, oldest first and all of *epoch*, say about its level.

    The level is the median of the first :data:`NIGHTS` successive clean nights whose later half is not worse or better than
    the earlier half by more than the tolerance: a loss within these nights is not taken for the usual level.
    """
    tolerance = max(TOLERANCE, metric.tolerance or 0.0)
    levels = [
        night.level for night in nights if night.level is not None and night.level > 0 and not night.regressed
    ]
    for begin in range(len(levels) - NIGHTS + 1):
        window = levels[begin : begin + NIGHTS]
        before, after = statistics.median(window[: NIGHTS // 2]), statistics.median(window[NIGHTS // 2 :])
        if abs(after - before) <= tolerance * before:
            return Settling(NIGHTS, _entry(window, metric, epoch, tolerance))
    return Settling(min(len(levels), NIGHTS))


def _entry(window: Sequence[float], metric: MetricValue, epoch: Epoch, tolerance: float) -> Entry:
    value = statistics.median(window)
    return Entry(
        value=value,
        unit=metric.unit,
        better=metric.better,
        tolerance=tolerance,
        definition=epoch.definition,
        device_model=epoch.device_model,
        spread=fence.robust_sigma(window, value),
        runs=len(window),
        reason=REASON,
    )


#: How a reason starts when the quorum could not be had; it is an infrastructure error, not the run's fault.
RERUNS_INCOMPLETE = "too few re-runs ended"

#: How it goes on where a new baseline was taken beside other programs.
MAY_BE_TOO_LOW = "; it may be too low, the machine was busy: "

#: From good to bad. UNJUDGED fails: a metric that cannot be judged has not passed.
SEVERITY = {
    Verdict.PASSED: 0,
    Verdict.NEW: 1,
    Verdict.IMPROVED: 2,
    Verdict.WRONG_BASELINE: 3,
    Verdict.INCONCLUSIVE: 4,
    Verdict.SUSPECT: 5,
    Verdict.UNJUDGED: 6,
    Verdict.DRIFTED: 7,
    Verdict.REGRESSED: 8,
    Verdict.BELOW_REFERENCE: 9,
}


def judge_metric(
    name: str,
    attempts: Sequence[Measurement],
    entry: Entry | None,
    nights: Sequence[Attempts],
    setting: Setting,
    *,
    reference: float | None = None,
) -> Ruling:
    """Judge the metric *name* of a run; *nights* oldest first, without tonight's; *reference* is what it promises."""
    ruling = _judge_baseline(name, attempts, entry, nights, setting)
    metric = attempts[0].metric(name) if attempts else None
    if reference is None or metric is None or usable(metric) is None or metric.better == "none":
        return ruling
    promise = Entry(reference, metric.unit, metric.better, TOLERANCE, setting.epoch.definition)
    case = Case(attempts, setting, promise, metric, nights, fence.Fence(0.0, None, smallest=0.0))
    return _worse(ruling, _judge_reference(case))


def _judge_reference(case: Case) -> Ruling:
    """Return whether the metric is what its test promises; re-runs decide as they do about a baseline."""
    if case.drop(case.metric.value) <= 0:
        return Ruling(case.verdict(Verdict.PASSED))
    gate = _gate(case)
    if gate.metric.verdict is not Verdict.REGRESSED:
        return gate
    reason = f"the reference; {gate.metric.reason}"
    return Ruling(replace(gate.metric, verdict=Verdict.BELOW_REFERENCE, reason=reason))


def _worse(one: Ruling, other: Ruling) -> Ruling:
    """Return the worse of both, *one* where they are equal, with the re-runs that both want."""
    worst = max(one, other, key=lambda ruling: SEVERITY[ruling.metric.verdict])
    if worst is other and one.metric.baseline is not None and one.metric.width:
        worst = replace(worst, metric=replace(worst.metric, fence=(one.metric.baseline, one.metric.width)))
    return replace(worst, reruns_wanted=max(one.reruns_wanted, other.reruns_wanted))


def _judge_baseline(
    name: str,
    attempts: Sequence[Measurement],
    entry: Entry | None,
    nights: Sequence[Attempts],
    setting: Setting,
) -> Ruling:
    metric = attempts[0].metric(name) if attempts else None
    if metric is None:
        return Ruling(_unjudged(name, None, entry, "metric_missing: the run did not report it"))
    if usable(metric) is None:
        reason = f"metric_invalid: {metric.value} cannot be compared; only positive figures can"
        return Ruling(_unjudged(metric.name, metric, entry, reason))
    mismatch = _mismatch(metric, entry)
    accepted = entry
    if entry is None or mismatch or changed(entry.epoch, setting.epoch):
        settling = (
            settle(nights, metric, setting.epoch) if _settles(metric, setting, mismatch) else Settling(0)
        )
        if settling.entry is None:
            verdict = _without_baseline(metric, entry, setting, mismatch, busy(attempts[0]))
            return Ruling(_recorded(verdict, settling.nights, setting))
        entry = settling.entry
    if not setting.by.local:  # there thirty runs may be of one day
        nights = losses.without_wrong_baseline(nights)
    figures = [
        night.value
        for night in nights
        if not night.regressed and math.isfinite(night.value) and night.value > 0
    ]
    width = fence.make_fence(figures, entry.value, setting.tolerance(entry))
    case = Case(attempts, setting, entry, metric, nights, width)
    if setting.by.mode == "update" and abs(case.drop(metric.value)) > case.fence.width:
        reason = f"accepted instead of {quantity(entry.value, entry.unit)} (--mlhpc-baseline=update)"
        return Ruling(case.verdict(Verdict.NEW, reason))
    ruling = judge_night(case) if enough(nights) else _young(case)
    return _of_wrong_baseline(case, ruling) if entry is accepted else ruling


def wrong_level(nights: Sequence[Attempts], entry: Entry, tolerance: float) -> float | None:
    """Return the level of a month of *nights* in which it did not change, if the accepted value is another one; else None."""
    month = losses.unchanged_month(nights)
    level = statistics.median(month) if month else entry.value
    return level if abs(fence.drop(level, entry.value, entry.better)) > tolerance else None


def corrected(entry: Entry, nights: Sequence[Attempts]) -> Entry | None:
    """Return *entry* with the level of the first month of its *nights*, where it is wrong; else None."""
    level = wrong_level(nights, entry, entry.tolerance)
    if level is None:
        return None
    spread = fence.robust_sigma(losses.unchanged_month(nights), level)
    return replace(
        entry, value=level, spread=spread, runs=losses.MONTH, reason=f"level of {losses.MONTH} nights"
    )


def _of_wrong_baseline(case: Case, ruling: Ruling) -> Ruling:
    """Say once, of the night after the first month, that the accepted value is wrong, if the test passes all the same."""
    by, over = case.setting.by, len(losses.levels(case.nights)) == losses.MONTH
    if not over or not by.nightly or by.local or ruling.metric.verdict not in _PASSES:
        return ruling
    level = wrong_level(case.nights, case.entry, case.setting.tolerance(case.entry))
    if level is None:
        return ruling
    text = f"the baseline is wrong: {losses.MONTH} nights without a change lie at {quantity(level, case.entry.unit)}"
    return Ruling(case.verdict(Verdict.WRONG_BASELINE, text))


#: Verdicts of tonight beside which a wrong baseline is worth a word.
_PASSES = frozenset({Verdict.PASSED, Verdict.IMPROVED})


def _settles(metric: MetricValue, setting: Setting, mismatch: str) -> bool:
    """Return whether its nights may settle the level of a series without accepted baseline; `local` has provisional ones."""
    return setting.by.mode == "record" and not (setting.by.local or mismatch) and metric.better != "none"


def _recorded(verdict: MetricVerdict, nights: int, setting: Setting) -> MetricVerdict:
    """Say of a new series how many nights it has of those that settle its level."""
    if verdict.verdict is not Verdict.NEW or setting.by.mode != "record" or setting.by.local:
        return verdict
    return replace(verdict, settling=min(nights + setting.by.nightly, NIGHTS))


def _young(case: Case) -> Ruling:
    """Judge a series that has too few nights by the baseline and its tolerance."""
    tonight = case.drop(case.metric.value)
    return _gate(case) if tonight > case.fence.width else Ruling(_inside(case, tonight))


def _inside(case: Case, tonight: float) -> MetricVerdict:
    if -tonight <= case.fence.width:
        return case.verdict(Verdict.PASSED)
    ratio = speed(case.attempts[0], case.reference)
    corrected = case.drop(record.scaled(case.metric.value, case.metric.unit, ratio))
    if ratio > 1.0 and -corrected <= case.fence.width:
        return case.verdict(Verdict.PASSED, f"this machine is {ratio - 1.0:.1%} faster today")
    return case.verdict(Verdict.IMPROVED)


def _gate(case: Case) -> Ruling:
    """The gate is open: was it the machine, and do re-runs confirm it?"""
    first = case.attempts[0]
    if reason := busy(first):
        return Ruling(case.verdict(Verdict.INCONCLUSIVE, f"the machine was busy: {reason}"))
    ratio = speed(first, case.reference)
    corrected = _excused_drop(case, first)
    if ratio < 1.0 and corrected is not None and corrected <= case.fence.width:
        reason = f"this machine is {1.0 - ratio:.1%} slower today; corrected for that, {_percent(corrected)}"
        return Ruling(case.verdict(Verdict.INCONCLUSIVE, reason))
    drops, dropped = _rerun_drops(case)
    made = len(case.attempts) - 1
    width = case.fence.width
    decision = fence.confirmed(drops, width, case.fence.smallest)
    if decision is False:
        return Ruling(case.verdict(Verdict.PASSED, f"{len(drops)} re-runs did not agree"))
    if decision is True:
        beyond_count = sum(drop > fence.SHARE * width for drop in drops)
        reason = f"{beyond_count} of {len(drops)} re-runs agree"
        return Ruling(case.verdict(Verdict.REGRESSED, reason))
    if dropped and made >= fence.RERUNS:
        reason = f"the machine was busy during {dropped} of {made} re-runs: {_contention(case)}"
        return Ruling(case.verdict(Verdict.INCONCLUSIVE, reason))
    return _undecided(case, drops, made)


def _undecided(case: Case, drops: Sequence[float], made: int) -> Ruling:
    broken = case.setting.by.reruns_broken
    tried = made + broken
    allowed = min(case.setting.by.reruns_allowed, fence.MOST_TRIES - tried)
    if allowed > 0:
        more = min(fence.reruns_needed(drops, case.fence.width, case.fence.smallest), allowed)
        return Ruling(case.verdict(Verdict.INCONCLUSIVE, f"{more} more re-runs are needed"), more)
    if tried:
        ended = f"{made} of {tried} ended well" if broken else f"{made} of {fence.RERUNS}"
        reason = f"{RERUNS_INCOMPLETE}: {ended}, and they do not settle it"
        return Ruling(case.verdict(Verdict.INCONCLUSIVE, reason))
    return Ruling(case.verdict(Verdict.REGRESSED, "one run, as no re-runs were possible"))


def _rerun_drops(case: Case) -> tuple[list[float], int]:
    """Return drops of the re-runs that count, and how many do not: slow ones on a busy machine prove nothing."""
    drops, dropped = [], 0
    for attempt in case.attempts[1:]:
        drop = _excused_drop(case, attempt)
        if drop is None or (drop > fence.SHARE * case.fence.width and busy(attempt)):
            dropped += 1
        else:
            drops.append(drop)
    return drops, dropped


def _contention(case: Case) -> str:
    return next((load for attempt in case.attempts[1:] if (load := busy(attempt))), "metric not reported")


def _excused_drop(case: Case, attempt: Measurement) -> float | None:
    """Return the drop of one attempt, corrected for a slower machine; None where it has no such figure."""
    value = case.figure(attempt, excused=True)
    return None if value is None else case.drop(value)


def _mismatch(metric: MetricValue, entry: Entry | None) -> str:
    if entry is None or (entry.unit, entry.better) == (metric.unit, metric.better):
        return ""
    return (
        f"the baseline is in {entry.unit} ({entry.better} is better), "
        f"the run reports {metric.unit} ({metric.better} is better)"
    )


def _without_baseline(
    metric: MetricValue, entry: Entry | None, setting: Setting, mismatch: str, busy: str
) -> MetricVerdict:
    if metric.better == "none":
        reason = "metric_invalid: it has no direction (better: none) and cannot be judged"
        return _unjudged(metric.name, metric, entry, reason)
    epoch = changed(entry.epoch, setting.epoch) if entry else ""
    if setting.by.mode == "update" or (setting.by.mode == "record" and (epoch or not mismatch)):
        what = "recorded: this series has no accepted baseline"
        if setting.by.mode == "update":
            what = "accepted (--mlhpc-baseline=update)"
        elif epoch:
            what = f"recorded: a new epoch begins, as since its baseline {epoch}"
        elif setting.by.local:
            what = "first run on this machine: provisional baseline"
        return MetricVerdict(
            name=metric.name,
            value=metric.value,
            unit=metric.unit,
            better=metric.better,
            baseline=None,
            change=None,
            width=0.0,
            verdict=Verdict.NEW,
            reason=what + (f"{MAY_BE_TOO_LOW}{busy}" if busy else ""),
            epoch=epoch,
        )
    if epoch:
        mismatch = f"its baseline is of an earlier epoch ({epoch})"
    reason = f"no_baseline: {mismatch or 'there is none for this series'}"
    return replace(_unjudged(metric.name, metric, entry, reason), epoch=epoch)


def _unjudged(name: str, metric: MetricValue | None, entry: Entry | None, reason: str) -> MetricVerdict:
    return MetricVerdict(
        name=name,
        value=metric.value if metric else math.nan,
        unit=metric.unit if metric else "1",
        better=metric.better if metric else "none",
        baseline=entry.value if entry else None,
        change=None,
        width=0.0,
        verdict=Verdict.UNJUDGED,
        reason=reason,
    )


def _percent(drop: float) -> str:
    return f"{abs(drop):.1%} {'worse' if drop > 0 else 'better'} than the baseline"
