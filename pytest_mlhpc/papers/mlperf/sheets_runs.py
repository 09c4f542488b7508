"""Sheets about what was run: results, departures, breakdown, published results beside ours. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from pytest_mlhpc.papers.mlperf import rules
from pytest_mlhpc.papers.mlperf.groups import Group
from pytest_mlhpc.papers.mlperf.limits import CLOSED, QUALITY
from pytest_mlhpc.papers.mlperf.reference import references
from pytest_mlhpc.papers.mlperf.sheet import Sheet, Value, median, scale_of, typical


def results(repeated: Sequence[Group]) -> Sheet:
    """Return the result of each group, and why some have none."""
    rows, notes = [], []
    for one in repeated:
        score, run = one.score, typical(one)
        if score.seconds is None:
            notes.append(f"{one.name} on {one.machine}, {scale_of(one)}: no result, {score.why}")
        target = (
            run.target
            if run.target is not None
            else QUALITY[one.workload].target
            if one.workload in QUALITY
            else None
        )
        rows.append(
            (
                one.name, one.machine, run.devices or None, run.global_batch, one.staging or None, target, score.runs, score.lost, score.seconds,
                None if score.spread is None else 100 * score.spread, median([each.epochs for each in one.runs if each.reached]),
                one.division,
            )
        )  # fmt: skip
    columns = (
        "benchmark", "machine", "devices", "global batch", "staging", "target", "runs", "did not converge", "time to train [s]",
        "\N{PLUS-MINUS SIGN} [%]", "training epochs", "division",
    )  # fmt: skip
    head = "Olympic mean: the fastest and the slowest run are left out (MLPerf Training rules, 'Benchmark Results')."
    return Sheet("results", "Time to train", columns, tuple(rows), (head, *notes))


def departures(repeated: Sequence[Group]) -> Sheet:
    """Return each group's departures, with the rules that they break."""
    rows = [
        (
            one.name,
            one.machine,
            scale_of(one),
            rule.name,
            "both" if rule.both else "closed",
            "; ".join(texts),
            str(rule),
        )
        for one in repeated
        for rule, texts in rules.by_rule(one.departures).items()
    ]
    columns = ("benchmark", "machine", "scale", "rule", "binds", "departure", "where the rule stands")
    return Sheet("departures", "Departures from the rules", columns, tuple(rows), (_DIVISIONS,))


_DIVISIONS = (
    "A run that breaks a rule of the closed division belongs in the open one; one that breaks a rule of both counts in "
    "neither, whatever its log says."
)


def breakdown(repeated: Sequence[Group]) -> Sheet:
    """Return where the time went: staging, training, evaluation, the rest."""
    rows: list[tuple[Value, ...]] = []
    for one in repeated:
        whole = [(run.phases, run.time_s) for run in one.runs if run.phases and run.time_s]
        if not whole:
            continue
        parts = [
            statistics.median(getattr(phases, name) for phases, _s in whole)
            for name in ("staging", "training", "evaluation", "other")
        ]
        total = sum(parts)
        shares = [100 * part / total if total else 0.0 for part in parts[:3]]
        rows.append((one.name, one.machine, scale_of(one), len(whole), *parts, *shares))
    columns = (
        "benchmark", "machine", "scale", "runs", "staging [s]", "training [s]", "evaluation [s]", "other [s]", "staging [%]",
        "training [%]", "evaluation [%]",
    )  # fmt: skip
    note = "Medians of the runs, between run_start and run_stop; training is without the evaluations in it."
    return Sheet("breakdown", "Where the time went", columns, tuple(rows), (note,))


def published(repeated: Sequence[Group]) -> Iterator[Sheet]:
    """Yield published results of each workload beside ours, and why ours do not compare."""
    columns = (
        "whose",
        "system",
        "division",
        "devices",
        "minutes to train",
        "samples/s of a device",
        "source",
    )
    for workload in CLOSED:
        mine = [one for one in repeated if one.workload == workload]
        if not mine:
            continue
        rows: list[tuple[Value, ...]] = []
        for one in mine:
            rate = median(
                [run.samples_per_s / run.devices for run in one.runs if run.samples_per_s and run.devices]
            )
            seconds = one.score.seconds
            rows.append(
                ("ours", one.machine, one.division, typical(one).devices or None, None if seconds is None else seconds / 60, rate, one.name)
            )  # fmt: skip
        rows += [
            ("published", one.system, one.division, one.devices, one.minutes, one.per_device, one.source)
            for one in references(workload)
        ]
        notes = dict.fromkeys(
            f"Not to be compared with published results: {one.name} on {one.machine}: {apart}."
            for one in mine
            if (apart := _apart(one))
        )
        yield Sheet(
            f"published_{workload}",
            f"Published results of {workload}",
            columns,
            tuple(rows),
            (*notes, *_ABOUT[workload]),
        )


#: What is to be known of published results.
_ABOUT = {
    "cosmoflow": ("The minutes are of round v0.7: kernel 2, 262,144 training samples; today's closed division has kernel 3, 524,288.",),
    "deepcam": (),
}  # fmt: skip


def _apart(group: Group) -> str:
    """Return why times of *group* do not compare: another model, data, or target than the rules demand."""
    kinds = (rules.DATA_SET, rules.MODEL, rules.QUALITY_TARGET)
    return "; ".join(
        text for rule, texts in rules.by_rule(group.departures).items() if rule in kinds for text in texts
    )
