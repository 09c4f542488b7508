"""The report about MLPerf HPC: its sheets, as text, Markdown and JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_mlhpc.papers.mlperf import predict
from pytest_mlhpc.papers.mlperf.predict import RUN, ThroughputPoint, labels, points
from pytest_mlhpc.papers.mlperf.results import RunGroup, by_rule, groups, references
from pytest_mlhpc.papers.mlperf.trained import CLOSED, QUALITY, FoundRuns, TrainedRun
from pytest_mlhpc.store.text import escaped, markdown_table, table

Value = str | float | int | None


@dataclass(frozen=True)
class MlperfSheet:
    """One table. ``columns`` name the unit of their figures where they have one; ``notes`` are sentences above it."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]
    notes: tuple[str, ...] = ()


def typical(group: RunGroup) -> TrainedRun:
    """Return a run that reported its scale, if any did."""
    return next((run for run in group.runs if run.devices), group.runs[0])


def scale_of(group: RunGroup) -> str:
    """Return how large the runs of *group* were, for people."""
    run = typical(group)
    staged = f", staging={group.staging}" if group.staging else ""
    return f"{run.devices or '?'} devices, batch {run.global_batch or '?'}{staged}"


def median(some: Sequence[float | None]) -> float | None:
    """Return the median of what is known, None where nothing is."""
    known = [one for one in some if one is not None]
    return statistics.median(known) if known else None


def results(repeated: Sequence[RunGroup]) -> MlperfSheet:
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
    return MlperfSheet("results", "Time to train", columns, tuple(rows), (head, *notes))


def departures(repeated: Sequence[RunGroup]) -> MlperfSheet:
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
        for rule, texts in by_rule(one.departures).items()
    ]
    columns = ("benchmark", "machine", "scale", "rule", "binds", "departure", "where the rule stands")
    return MlperfSheet("departures", "Departures from the rules", columns, tuple(rows), (_DIVISIONS,))


_DIVISIONS = (
    "A run that breaks a rule of the closed division belongs in the open one; one that breaks a rule of both counts in "
    "neither, whatever its log says."
)


def breakdown(repeated: Sequence[RunGroup]) -> MlperfSheet:
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
    return MlperfSheet("breakdown", "Where the time went", columns, tuple(rows), (note,))


def published(repeated: Sequence[RunGroup]) -> Iterator[MlperfSheet]:
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
            f"Not to be compared with published results: {one.name} on {one.machine}: {one.apart}."
            for one in mine
            if one.apart
        )
        yield MlperfSheet(
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


def predictions(model: predict.PredictionModel, devices: Sequence[int]) -> MlperfSheet:
    """Return times to train at scales that were not run."""
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
    return MlperfSheet("predictions", "Predicted time to train", columns, rows, (note,))


def leave_one_out(model: predict.PredictionModel) -> MlperfSheet:
    """Return each measured scale beside its prediction by all others."""
    found = predict.leave_one_out(model)
    names = labels(one.place.training for one in found)
    rows = tuple(
        (
            names[one.place.training], one.place.machine, one.place.devices, one.place.batch, one.runs, one.measured,
            one.predicted.seconds if one.predicted else None, None if one.error is None else 100 * one.error,
        )
        for one in found
    )  # fmt: skip
    errors = [abs(one.error) for one in found if one.error is not None]
    remark = (
        f"Median error {100 * statistics.median(errors):.1f} %, largest {100 * max(errors):.1f} %, of {len(errors)} scales."
        if errors
        else "No scale can be predicted without itself: measure more scales and batches."
    )
    note = "Each scale as all others predict it, with nothing known that was measured at it."
    columns = (
        "training", "machine", "devices", "global batch", "runs", "measured [s]", "predicted [s]", "error [%]",
    )  # fmt: skip
    return MlperfSheet("held_back", "How far predictions are off", columns, rows, (note, remark))


def curves(measured: Sequence[ThroughputPoint]) -> Iterator[MlperfSheet]:
    """Yield strong and weak scaling."""
    found = predict.curves(measured)
    names = labels(point.place.training for point in measured)
    for kind, batch, what in (
        (predict.STRONG, "global batch", "the global batch stays the same"),
        (predict.WEAK, "batch of a device", "the batch of a device stays the same"),
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
        yield MlperfSheet(f"{kind}_scaling", f"{kind.capitalize()} scaling", columns, rows, (note,))


def make_sheets(found: FoundRuns, devices: Sequence[int] = ()) -> tuple[MlperfSheet, ...]:
    """Return all sheets that have rows; predictions are for so many *devices* where any are given."""
    repeated = groups(found.runs)
    measured = points(found.runs, found.windows)
    trained = {one.place.training for one in measured if one.source == RUN}
    measured = tuple(
        one for one in measured if one.place.training in trained
    )  # other trainings have reports of their own
    model = predict.model_of(found.runs, measured)
    made = (
        results(repeated),
        departures(repeated),
        breakdown(repeated),
        predictions(model, devices),
        leave_one_out(model),
        *curves(measured),
        *published(repeated),
    )
    return tuple(sheet for sheet in made if sheet.rows)


def text_of(sheets: Sequence[MlperfSheet]) -> str:
    """Return all sheets for a terminal."""
    parts = []
    for sheet in sheets:
        notes = "".join(f"{note}\n" for note in sheet.notes)
        rows = table([sheet.columns, *(tuple(map(_shown, row)) for row in sheet.rows)])
        parts.append(f"{sheet.title}\n{'-' * len(sheet.title)}\n{notes}{rows}")
    return "\n".join(parts)


def markdown_of(sheets: Sequence[MlperfSheet]) -> str:
    """Return all sheets as Markdown, a heading each."""
    lines: list[str] = []
    for sheet in sheets:
        lines += [f"## {escaped(sheet.title)}", ""]
        lines += [line for note in sheet.notes for line in (escaped(note), "")]
        lines += [*markdown_table(sheet.columns, (tuple(map(_shown, row)) for row in sheet.rows)), ""]
    return "".join(f"{line}\n" for line in lines)


def data_of(sheets: Sequence[MlperfSheet], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return it as one object for programs, figures as they are; *about* says what was asked for."""
    content = {
        sheet.name: {
            "title": sheet.title,
            "notes": list(sheet.notes),
            "rows": [dict(zip(sheet.columns, row, strict=True)) for row in sheet.rows],
        }
        for sheet in sheets
    }
    return {**about, "sheets": content}


def _shown(value: Value) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    return str(value)
