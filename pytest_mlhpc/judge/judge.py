"""The judge: attempts of one run against baselines and history. Pure: no I/O, no clock."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pytest_mlhpc.judge import evidence
from pytest_mlhpc.judge.baseline_files import LOCAL_TOLERANCE, TOLERANCE, Entry
from pytest_mlhpc.judge.changes import Attempts
from pytest_mlhpc.judge.fence import robust_sigma
from pytest_mlhpc.judge.judged_metric import Ruling, Setting, usable
from pytest_mlhpc.judge.rules import RERUNS_INCOMPLETE, SEVERITY, judge_metric
from pytest_mlhpc.node.protocol.schema import Measurement
from pytest_mlhpc.store.definition import changed
from pytest_mlhpc.store.record import (
    WORSE,
    Epoch,
    Failure,
    JudgedBy,
    Judgement,
    MetricVerdict,
    Record,
    RecordedFence,
    Verdict,
    calibration_rate,
)
from pytest_mlhpc.store.text import iso

#: Verdicts after which a test's new value may be what someone wants.
_ACCEPTED_BY_HAND = frozenset({Verdict.IMPROVED, Verdict.WRONG_BASELINE, Verdict.DRIFTED, Verdict.REGRESSED})


class JudgedTest(Protocol):
    """What the judge asks of a test: its id, the metrics to judge, what is computed, and what each metric promises."""

    @property
    def node_id(self) -> str: ...  # noqa: D102
    @property
    def judged(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def definition(self) -> str: ...  # noqa: D102
    @property
    def references(self) -> Mapping[str, float]: ...  # noqa: D102


@dataclass(frozen=True)
class JudgeInputs:
    """What a verdict follows from beside the measurements: baselines, nights, terms, and what explains a loss.

    Args:
        entries: metric -> baseline (:meth:`BaselineBook.for_spec`).
        nights: metric -> the nights of its present epoch, oldest first (:meth:`JudgeHistory.nights`), tonight not among them.
        by: the terms, as a record has them.
        last_good: the last record of this benchmark that passed, for the explanation.
        noted: lines of what people noted since then.
        newest: the epoch of the newest record of the benchmark: a metric without baseline may begin another.
    """

    entries: Mapping[str, Entry]
    nights: Mapping[str, Sequence[Attempts]]
    by: JudgedBy
    last_good: Record | None = None
    noted: tuple[str, ...] = ()
    newest: Epoch | None = None


def judge(
    attempts: Sequence[Measurement],
    spec: JudgedTest,
    inputs: JudgeInputs,
    *,
    commit: str = "",
    accept_options: Sequence[str] = (),
) -> Judgement:
    """Judge one run.

    Args:
        attempts: valid measurements, attempt 0 first, then the re-runs that ended well.
        spec: what the test declared; ``spec.judged`` are the metrics to judge.
        inputs: what they are compared with, and by which terms.
        commit: the commit under test, for the explanation.
        accept_options: what the command that accepts the value needs to find state and baselines.

    Returns:
        A judgement, provisional while ``reruns_wanted`` is positive: run that many more and call again with all attempts.
    """
    if not spec.judged:
        return Judgement(Verdict.UNJUDGED)
    epoch = Epoch(spec.definition, attempts[0].device_model if attempts else "")
    rulings = [_ruling(name, attempts, spec, inputs, epoch) for name in spec.judged]
    metrics = tuple(ruling.metric for ruling in rulings)
    verdict = max((metric.verdict for metric in metrics), key=SEVERITY.__getitem__)
    explanation = evidence.explain(attempts, metrics, last_good=inputs.last_good, commit=commit)
    new = next((metric.epoch for metric in metrics if metric.epoch), "")
    begun = "" if new or inputs.newest is None else changed(inputs.newest, epoch)
    return Judgement(
        verdict=verdict,
        metrics=metrics,
        explanation=(*explanation, *inputs.noted, *([f"a new epoch begins: {begun}"] if begun else [])),
        epoch=new or begun,
        accept_command=accept_command(spec.node_id, accept_options) if verdict in _ACCEPTED_BY_HAND else "",
        reruns_wanted=_reruns_needed(rulings),
    )


def _ruling(
    name: str, attempts: Sequence[Measurement], spec: JudgedTest, inputs: JudgeInputs, epoch: Epoch
) -> Ruling:
    nights, reference = inputs.nights.get(name, ()), spec.references.get(name)
    setting = Setting(inputs.by, epoch)
    return judge_metric(name, attempts, inputs.entries.get(name), nights, setting, reference=reference)


def _reruns_needed(rulings: Sequence[Ruling]) -> int:
    """Return how many to run next: none once one metric has failed for good."""
    if any(ruling.metric.verdict in {Verdict.REGRESSED, Verdict.BELOW_REFERENCE} for ruling in rulings):
        return 0
    return max(ruling.reruns_wanted for ruling in rulings)


def accept_command(target: str, options: Sequence[str] = ()) -> str:
    """Return the command that accepts what was measured by a test, or all that is new in a session, by its id."""
    return shlex.join(["mlhpc", "baseline", "accept", target, "--reason", "TEXT", *options])


def failure_of(judgement: Judgement) -> Failure | None:
    """Return the failure that a final judgement means for its test, or None when the test may pass.

    below_reference, regressed, drifted -> the same names; a judged metric without baseline -> ``no_baseline``; absent ->
    ``metric_missing``; not a number -> ``metric_invalid``; too few re-runs ended -> ``reruns_incomplete``
    (infrastructure). passed, improved, wrong_baseline, new, suspect and inconclusive (machine slower or busy) are no failures.
    """
    if not judgement.metrics:
        return None
    worst = max(judgement.metrics, key=lambda metric: (SEVERITY[metric.verdict], _incomplete(metric)))
    text = "; ".join(
        _sentence(metric)
        for metric in judgement.metrics
        if metric.verdict is worst.verdict and _incomplete(metric) == _incomplete(worst)
    )
    if worst.verdict in WORSE:
        return Failure(worst.verdict.value, text)
    if worst.verdict is Verdict.UNJUDGED:
        return Failure(worst.reason.partition(":")[0], text)
    if _incomplete(worst):
        return Failure("reruns_incomplete", text)
    return None


def fences_of(judgement: Judgement) -> dict[str, RecordedFence]:
    """Return with what each metric was compared, by name; none of those without a baseline."""
    found = {}
    for metric in judgement.metrics:
        accepted, width = metric.fence or (metric.baseline, metric.width)
        if accepted is not None and width > 0:
            found[metric.name] = RecordedFence(accepted, width)
    return found


def _incomplete(metric: MetricVerdict) -> bool:
    return metric.verdict is Verdict.INCONCLUSIVE and metric.reason.startswith(RERUNS_INCOMPLETE)


def _sentence(metric: MetricVerdict) -> str:
    if metric.verdict is Verdict.UNJUDGED:
        return f"{metric.name}: {metric.reason.partition(': ')[2]}"
    return evidence.headline(metric)


def entries_to_put(
    attempts: Sequence[Measurement],
    judgement: Judgement,
    baselines: Mapping[str, Entry],
    *,
    local: bool,
    accepted_by: str,
    reason: str,
    now_ns: int,
    environment: str = "",
    definition: str,
) -> dict[str, Entry]:
    """Return metric -> entry to put in the book: for metrics that are ``new``, or that ``--mlhpc-baseline=update`` accepts.

    Entries that the result agrees with (inside the fence) are not touched, so that diffs show news only.
    """
    date = iso(now_ns)
    return {
        metric.name: make_entry(
            metric.name,
            attempts,
            baselines.get(metric.name),
            local=local,
            accepted_by=accepted_by,
            reason=reason,
            date=date,
            environment=environment,
            definition=definition,
        )
        for metric in judgement.metrics
        if metric.verdict is Verdict.NEW
    }


def make_entry(
    name: str,
    attempts: Sequence[Measurement],
    old: Entry | None,
    *,
    local: bool,
    accepted_by: str,
    reason: str,
    date: str,
    environment: str = "",
    definition: str,
) -> Entry:
    """Return the entry that accepts the median of *attempts*; it starts a baseline epoch of its own.

    The tolerance of *old* stays: somebody may have chosen it. Otherwise it is that of the metric where it names one
    that is wider than usual.

    Raises:
        ValueError: no attempt has a usable figure of that name.
    """
    found = [
        metric for attempt in attempts if (metric := attempt.metric(name)) is not None and usable(metric)
    ]
    if not found:
        raise ValueError(f"no run reports a usable {name}")
    values = [metric.value for metric in found]
    rates = [rate for attempt in attempts if (rate := calibration_rate(attempt))] if local else []
    value = statistics.median(values)
    usual = LOCAL_TOLERANCE if local else TOLERANCE
    return Entry(
        value=value,
        unit=found[0].unit,
        better=found[0].better,
        tolerance=old.tolerance if old else max(usual, *(metric.tolerance or 0.0 for metric in found)),
        definition=definition,
        device_model=attempts[0].device_model,
        spread=robust_sigma(values, value) if len(values) > 1 else None,
        runs=len(values),
        accepted_by=accepted_by,
        reason=reason,
        date=date,
        environment=environment,
        calibration=statistics.median(rates) if rates else None,
    )
