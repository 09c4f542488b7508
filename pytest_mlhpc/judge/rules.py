"""One judged metric of one run: gate, quorum, verdict. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_mlhpc.judge import fence as fences
from pytest_mlhpc.judge import machine, quorum
from pytest_mlhpc.judge.entry import Entry
from pytest_mlhpc.judge.verdict import MetricVerdict, Verdict
from pytest_mlhpc.results import calibration
from pytest_mlhpc.results.schema import Measurement, Metric

#: How a reason starts when the quorum could not be had; it is an infrastructure error, not the run's fault.
RERUNS_INCOMPLETE = "too few re-runs ended"

#: Tries at the four re-runs, broken ones counted.
MOST_TRIES = quorum.RERUNS + 2

#: From good to bad. UNJUDGED fails: a metric that cannot be judged has not passed.
SEVERITY = {
    Verdict.PASSED: 0,
    Verdict.NEW: 1,
    Verdict.IMPROVED: 2,
    Verdict.INCONCLUSIVE: 3,
    Verdict.UNJUDGED: 4,
    Verdict.DRIFTED: 5,
    Verdict.REGRESSED: 6,
}


@dataclass(frozen=True)
class Setting:
    """What holds for all metrics of a run; see :func:`pytest_mlhpc.judge.judge.judge`."""

    local: bool
    update: bool
    reruns_allowed: int
    in_ci: bool
    calibration_reference: float | None
    reruns_broken: int = 0


@dataclass(frozen=True)
class Ruling:
    """A metric's verdict and how many more re-runs it needs."""

    metric: MetricVerdict
    reruns_wanted: int = 0


@dataclass(frozen=True)
class _Case:
    """One metric with a baseline: tonight's figure, the drops, the fence."""

    attempts: Sequence[Measurement]
    setting: Setting
    entry: Entry
    metric: Metric
    fence: fences.Fence
    past: tuple[float, ...]  #: drops of earlier records, oldest first

    @property
    def reference(self) -> float | None:
        if not self.setting.local:
            return None
        return self.entry.calibration or self.setting.calibration_reference

    def drop(self, value: float) -> float:
        return fences.drop(value, self.entry.value, self.entry.better)

    def excused_drop(self, attempt: Measurement) -> float | None:
        """Return the drop of one attempt, corrected for a slower machine; None where it has no such figure."""
        value = usable(attempt.metric(self.metric.name))
        if value is None:
            return None
        ratio = machine.speed(attempt, self.reference)
        return self.drop(calibration.excused(value, self.metric.unit, ratio))

    def verdict(self, verdict: Verdict, reason: str = "") -> MetricVerdict:
        reruns = [usable(attempt.metric(self.metric.name)) for attempt in self.attempts[1:]]
        return MetricVerdict(
            name=self.metric.name,
            value=self.metric.value,
            unit=self.metric.unit,
            better=self.metric.better,
            baseline=self.entry.value,
            change=-self.drop(self.metric.value),
            width=self.fence.width,
            verdict=verdict,
            reruns=tuple(value for value in reruns if value is not None),
            reason=reason,
        )


def usable(metric: Metric | None) -> float | None:
    """Return the figure of *metric* when it is one that can be compared: finite and positive."""
    if metric is None or not math.isfinite(metric.value) or metric.value <= 0:
        return None
    return metric.value


def judge_metric(
    name: str,
    attempts: Sequence[Measurement],
    entry: Entry | None,
    history: Sequence[float],
    setting: Setting,
) -> Ruling:
    """Judge the metric *name* of a run; *history* oldest first, without tonight's."""
    metric = attempts[0].metric(name) if attempts else None
    if metric is None:
        return Ruling(_unjudged(name, None, entry, "metric_missing: the run did not report it"))
    if usable(metric) is None:
        reason = f"metric_invalid: {metric.value} cannot be compared; only positive figures can"
        return Ruling(_unjudged(metric.name, metric, entry, reason))
    mismatch = _mismatch(metric, entry)
    if entry is None or mismatch:
        return Ruling(_without_baseline(metric, entry, setting, mismatch, machine.busy(attempts[0])))
    figures = [value for value in history if math.isfinite(value) and value > 0]
    fence = fences.make_fence(figures, entry.value, entry.tolerance)
    past = tuple(fences.drop(value, entry.value, entry.better) for value in figures)
    return _with_baseline(_Case(attempts, setting, entry, metric, fence, past))


def _with_baseline(case: _Case) -> Ruling:
    tonight = case.drop(case.metric.value)
    nights = fences.nights_median(case.past, tonight)
    beyond = tonight > case.fence.width
    gate = beyond or (nights is not None and nights > case.fence.half)
    drifted = _drift(case, tonight)
    outside = gate or drifted is not None or -tonight > case.fence.width
    if case.setting.update and outside:
        reason = f"accepted instead of {case.entry.value:g} {case.entry.unit} (--update-baselines)"
        return Ruling(case.verdict(Verdict.NEW, reason))
    ruling = _gate(case, beyond=beyond) if gate else Ruling(_inside(case, tonight))
    if drifted is None or SEVERITY[ruling.metric.verdict] > SEVERITY[Verdict.DRIFTED]:
        return ruling
    return Ruling(case.verdict(Verdict.DRIFTED, drifted))  # a median of many nights needs no re-runs


def _inside(case: _Case, tonight: float) -> MetricVerdict:
    if -tonight <= case.fence.width:
        return case.verdict(Verdict.PASSED)
    ratio = machine.speed(case.attempts[0], case.reference)
    corrected = case.drop(calibration.scaled(case.metric.value, case.metric.unit, ratio))
    if ratio > 1.0 and -corrected <= case.fence.width:
        return case.verdict(Verdict.PASSED, f"this machine is {ratio - 1.0:.1%} faster today")
    return case.verdict(Verdict.IMPROVED, "better than the baseline; accept the new value to keep it")


def _gate(case: _Case, *, beyond: bool) -> Ruling:
    """The gate is open: was it the machine, and do re-runs confirm it?"""
    first = case.attempts[0]
    if reason := machine.busy(first):
        return Ruling(case.verdict(Verdict.INCONCLUSIVE, f"the machine was busy: {reason}"))
    ratio = machine.speed(first, case.reference)
    corrected = case.excused_drop(first)
    limit = case.fence.width if beyond else case.fence.half
    if ratio < 1.0 and corrected is not None and corrected <= limit:
        reason = f"this machine is {1.0 - ratio:.1%} slower today; corrected for that, {_percent(corrected)}"
        return Ruling(case.verdict(Verdict.INCONCLUSIVE, reason))
    drops, dropped = _rerun_drops(case)
    made = len(case.attempts) - 1
    width = case.fence.width
    decision = quorum.confirmed(drops, width)
    if decision is False:
        return Ruling(case.verdict(Verdict.PASSED, f"{len(drops)} re-runs did not confirm it"))
    if decision is True:
        beyond_count = sum(drop > quorum.SHARE * width for drop in drops)
        reason = f"{beyond_count} of {len(drops)} re-runs confirm it, beyond {quorum.SHARE * width:.1%}"
        return Ruling(case.verdict(Verdict.REGRESSED, reason))
    if dropped and made >= quorum.RERUNS:
        reason = f"the machine was busy during {dropped} of {made} re-runs: {_busy_words(case)}"
        return Ruling(case.verdict(Verdict.INCONCLUSIVE, reason))
    return _undecided(case, drops, made, beyond=beyond)


def _undecided(case: _Case, drops: Sequence[float], made: int, *, beyond: bool) -> Ruling:
    broken = case.setting.reruns_broken
    tried = made + broken
    allowed = min(case.setting.reruns_allowed, MOST_TRIES - tried)
    if allowed > 0:
        more = min(quorum.wanted(drops, case.fence.width), allowed)
        return Ruling(case.verdict(Verdict.INCONCLUSIVE, f"{more} more re-runs are needed"), more)
    if tried:
        ended = f"{made} of {tried} ended well" if broken else f"{made} of {quorum.RERUNS}"
        reason = f"{RERUNS_INCOMPLETE}: {ended}, and they do not settle it"
        return Ruling(case.verdict(Verdict.INCONCLUSIVE, reason))
    if beyond:
        return Ruling(case.verdict(Verdict.REGRESSED, "one run; no re-runs were to be had to confirm it"))
    reason = f"the median of the last {fences.NIGHTS} runs is worse, and no re-runs were to be had"
    return Ruling(case.verdict(Verdict.INCONCLUSIVE, reason))


def _rerun_drops(case: _Case) -> tuple[list[float], int]:
    """Return drops of the re-runs that count, and how many do not: slow ones on a busy machine prove nothing."""
    drops, dropped = [], 0
    for attempt in case.attempts[1:]:
        drop = case.excused_drop(attempt)
        if drop is None or (drop > quorum.SHARE * case.fence.width and machine.busy(attempt)):
            dropped += 1
        else:
            drops.append(drop)
    return drops, dropped


def _busy_words(case: _Case) -> str:
    return next(
        (words for attempt in case.attempts[1:] if (words := machine.busy(attempt))), "metric not reported"
    )


def _drift(case: _Case, tonight: float) -> str | None:
    """Return why this series has drifted, or None.

    On `local` the limit grows with the noise: the baseline is one run on a shared machine, and the median of many
    runs differs from one by as much as runs differ from each other.
    """
    trailing = fences.trailing_drop((*case.past, tonight)) if len(case.past) >= fences.ENOUGH else None
    limit = max(fences.DRIFT, case.fence.half) if case.setting.local else fences.DRIFT
    if trailing is None or trailing <= limit:
        return None
    count = min(len(case.past) + 1, fences.WINDOW)
    return (
        f"the median of the last {count} runs is {trailing:.1%} worse than the baseline (limit {limit:.1%})"
    )


def _mismatch(metric: Metric, entry: Entry | None) -> str:
    if entry is None or (entry.unit, entry.better) == (metric.unit, metric.better):
        return ""
    return (
        f"the baseline is in {entry.unit} ({entry.better} is better), "
        f"the run reports {metric.unit} ({metric.better} is better)"
    )


def _without_baseline(
    metric: Metric, entry: Entry | None, setting: Setting, mismatch: str, busy: str
) -> MetricVerdict:
    if metric.better == "none":
        reason = "metric_invalid: it has no direction (better: none) and cannot be judged"
        return _unjudged(metric.name, metric, entry, reason)
    if setting.update or (setting.local and not setting.in_ci and not mismatch):
        what = (
            "accepted (--update-baselines)"
            if setting.update
            else "first run on this machine: provisional baseline"
        )
        return MetricVerdict(
            name=metric.name,
            value=metric.value,
            unit=metric.unit,
            better=metric.better,
            baseline=None,
            change=None,
            width=0.0,
            verdict=Verdict.NEW,
            reason=what + (f"; it may be too low, the machine was busy: {busy}" if busy else ""),
        )
    reason = f"no_baseline: {mismatch or 'there is none for this series'}"
    return _unjudged(metric.name, metric, entry, reason)


def _unjudged(name: str, metric: Metric | None, entry: Entry | None, reason: str) -> MetricVerdict:
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
