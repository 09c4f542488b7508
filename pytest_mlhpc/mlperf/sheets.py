"""The report's sheets: what each says, in rows of plain values. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pytest_mlhpc.mlperf import predict, rules, scaling
from pytest_mlhpc.mlperf.groups import Group, groups
from pytest_mlhpc.mlperf.limits import CLOSED, QUALITY
from pytest_mlhpc.mlperf.points import Point, labels, points
from pytest_mlhpc.mlperf.reference import references
from pytest_mlhpc.mlperf.source import Found
from pytest_mlhpc.mlperf.trained import Trained

Value = str | float | int | None


@dataclass(frozen=True)
class Sheet:
    """One table. ``columns`` name the unit of their figures where they have one; ``notes`` are sentences above it."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]
    notes: tuple[str, ...] = ()


def sheets(found: Found, devices: Sequence[int] = ()) -> tuple[Sheet, ...]:
    """Return all sheets that have rows; predictions are for so many *devices* where any are given."""
    repeated = groups(found.runs)
    measured = points(found.runs, found.windows)
    trained = {one.place.training for one in measured if one.source == "run"}
    measured = tuple(
        one for one in measured if one.place.training in trained
    )  # other trainings have reports of their own
    model = predict.Model(found.runs, measured)
    made = (
        _results(repeated),
        _departures(repeated),
        _breakdown(repeated),
        _predictions(model, devices),
        _held_back(model),
        *_scaling(measured),
        *_published(repeated),
    )
    return tuple(sheet for sheet in made if sheet.rows)


def _results(repeated: Sequence[Group]) -> Sheet:
    rows, notes = [], []
    for one in repeated:
        score, run = one.score, _typical(one)
        if score.seconds is None:
            notes.append(f"{one.name} on {one.machine}, {_scale(one)}: no result, {score.why}")
        target = (
            run.target
            if run.target is not None
            else QUALITY[one.workload].target
            if one.workload in QUALITY
            else None
        )
        rows.append(
            (
                one.name, one.machine, run.devices or None, run.global_batch, target, score.runs, score.lost, score.seconds,
                None if score.spread is None else 100 * score.spread, _median([each.epochs for each in one.runs if each.reached]),
                one.division,
            )
        )  # fmt: skip
    columns = (
        "benchmark", "machine", "devices", "global batch", "target", "runs", "did not converge", "time to train [s]",
        "\N{PLUS-MINUS SIGN} [%]", "training epochs", "division",
    )  # fmt: skip
    head = "Olympic mean: the fastest and the slowest run are left out (MLPerf Training rules, 'Benchmark Results')."
    return Sheet("results", "Time to train", columns, tuple(rows), (head, *notes))


def _departures(repeated: Sequence[Group]) -> Sheet:
    rows = [
        (
            one.name,
            one.machine,
            _scale(one),
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


def _breakdown(repeated: Sequence[Group]) -> Sheet:
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
        rows.append((one.name, one.machine, _scale(one), len(whole), *parts, *shares))
    columns = (
        "benchmark", "machine", "scale", "runs", "staging [s]", "training [s]", "evaluation [s]", "other [s]", "staging [%]",
        "training [%]", "evaluation [%]",
    )  # fmt: skip
    note = "Medians of the runs, between run_start and run_stop; training is without the evaluations in it."
    return Sheet("breakdown", "Where the time went", columns, tuple(rows), (note,))


def _predictions(model: predict.Model, devices: Sequence[int]) -> Sheet:
    found = predict.predictions(model, devices)
    names = labels(one.place.training for one in found)
    rows = tuple(
        (
            names[one.place.training], one.place.machine, one.place.devices, one.place.batch, one.epochs, one.epochs_from,
            one.epoch_s, one.epoch_from, one.staging, one.extra, one.seconds,
        )
        for one in found
    )  # fmt: skip
    columns = (
        "training", "machine", "devices", "global batch", "training epochs", "epochs are", "epoch [s]", "epoch time is",
        "staging [s]", "evaluation, other [s]", "predicted time to train [s]",
    )  # fmt: skip
    note = "Training epochs (of the batch, on any machine) times epoch time (of machine, devices and batch), at scales not run."
    return Sheet("predictions", "Predicted time to train", columns, rows, (note,))


def _held_back(model: predict.Model) -> Sheet:
    found = predict.held_back(model)
    names = labels(one.place.training for one in found)
    rows = tuple(
        (
            names[one.place.training], one.place.machine, one.place.devices, one.place.batch, one.runs, one.measured,
            one.predicted.seconds if one.predicted else None, None if one.error is None else 100 * one.error,
        )
        for one in found
    )  # fmt: skip
    errors = [abs(one.error) for one in found if one.error is not None]
    told = (
        f"Median error {100 * statistics.median(errors):.1f} %, largest {100 * max(errors):.1f} %, of {len(errors)} scales."
        if errors
        else "No scale can be predicted without itself: measure more scales and batches."
    )
    note = "Each scale as all others predict it, with nothing known that was measured at it."
    columns = (
        "training", "machine", "devices", "global batch", "runs", "measured [s]", "predicted [s]", "error [%]",
    )  # fmt: skip
    return Sheet("held_back", "How far predictions are off", columns, rows, (note, told))


def _scaling(measured: Sequence[Point]) -> Iterator[Sheet]:
    found = scaling.curves(measured)
    names = labels(point.place.training for point in measured)
    for kind, batch, what in (
        (scaling.STRONG, "global batch", "the global batch stays the same"),
        (scaling.WEAK, "batch of a device", "the batch of a device stays the same"),
    ):
        rows = tuple(
            (
                names[curve.training], curve.machine, curve.batch, step.point.place.devices, step.point.rate,
                step.point.rate / step.point.place.devices, step.speedup, 100 * step.efficiency, step.point.source,
            )
            for curve in found
            if curve.kind == kind
            for step in curve.steps
        )  # fmt: skip
        columns = (
            "training", "machine", batch, "devices", "samples/s", "samples/s of a device", "speed-up", "efficiency [%]", "from",
        )  # fmt: skip
        note = f"Training epochs only; {what}. Efficiency is the rate of a device over that at the fewest devices."
        yield Sheet(f"{kind}_scaling", f"{kind.capitalize()} scaling", columns, rows, (note,))


def _published(repeated: Sequence[Group]) -> Iterator[Sheet]:
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
            rate = _median(
                [run.samples_per_s / run.devices for run in one.runs if run.samples_per_s and run.devices]
            )
            seconds = one.score.seconds
            rows.append(
                ("ours", one.machine, one.division, _typical(one).devices or None, None if seconds is None else seconds / 60, rate, one.name)
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


def _typical(group: Group) -> Trained:
    """Return a run that told its scale, if any did."""
    return next((run for run in group.runs if run.devices), group.runs[0])


def _scale(group: Group) -> str:
    run = _typical(group)
    return f"{run.devices or '?'} devices, batch {run.global_batch or '?'}"


def _median(some: Sequence[float | None]) -> float | None:
    known = [one for one in some if one is not None]
    return statistics.median(known) if known else None
