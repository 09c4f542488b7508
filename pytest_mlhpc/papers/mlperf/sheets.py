"""The report about MLPerf HPC: its sheets, as text, Markdown, a page with pictures, and JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final

from pytest_mlhpc.papers.mlperf import predict
from pytest_mlhpc.papers.mlperf.predict import MEASURED, RUN, ScaleFigure, labels, points
from pytest_mlhpc.papers.mlperf.results import RunGroup, by_rule, groups, references
from pytest_mlhpc.papers.mlperf.trained import CLOSED, QUALITY, FoundRuns, TrainedRun
from pytest_mlhpc.papers.roofline.page import COLOURS, WIDTH, AxisScale, document, line_of
from pytest_mlhpc.store.text import count, escaped, markdown_table, table

Value = str | float | int | None
#: Pixels of pictures: their height, what is left of the vertical axis, what a number below the other axis takes.
_TALL: Final = 300
_LEFT: Final = 70
_LABEL: Final = 40


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


def curves(measured: Sequence[ScaleFigure]) -> Iterator[MlperfSheet]:
    """Yield strong and weak scaling."""
    found = predict.curves(measured)
    names = labels(point.place.training for point in measured)
    for kind, batch, what in (
        (predict.STRONG, "global batch", "the global batch stays the same"),
        (predict.WEAK, "batch of a device", "the batch of a device stays the same"),
    ):
        rows = tuple(
            (
                names[curve.training], curve.machine, curve.batch, step.point.place.devices, step.point.value,
                step.point.value / step.point.place.devices, step.speedup, 100 * step.efficiency, step.point.source,
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


def communication(shares: Sequence[ScaleFigure]) -> MlperfSheet:
    """Return which share of a step waits for other ranks, at each scale."""
    names = labels(one.place.training for one in shares)
    rows = tuple(
        (
            names[one.place.training], one.place.machine, one.place.batch, one.place.devices,
            one.place.batch / one.place.devices, 100 * one.value, one.count, one.source,
        )
        for one in shares
    )  # fmt: skip
    columns = (
        "training", "machine", "global batch", "devices", "batch of a device", "communication [%]", "runs", "from",
    )  # fmt: skip
    note = "Share of a median step that waits for other ranks: a step less the same step without exchange."
    return MlperfSheet("communication", "Communication over scale", columns, rows, (note,))


def make_sheets(found: FoundRuns, devices: Sequence[int] = ()) -> tuple[MlperfSheet, ...]:
    """Return all sheets that have rows; predictions are for so many *devices* where any are given."""
    repeated = groups(found.runs)
    measured = _measured(found)
    model = predict.model_of(found.runs, measured)
    made = (
        results(repeated),
        departures(repeated),
        breakdown(repeated),
        predictions(model, devices),
        leave_one_out(model),
        *curves(measured),
        communication(predict.shares(found.runs, found.windows)),
        *published(repeated),
    )
    return tuple(sheet for sheet in made if sheet.rows)


def _measured(found: FoundRuns) -> tuple[ScaleFigure, ...]:
    """Return the rates of trainings that had runs to a quality target; others have reports of their own."""
    measured = points(found.runs, found.windows)
    trained = {one.place.training for one in measured if one.source == RUN}
    return tuple(one for one in measured if one.place.training in trained)


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


@dataclass(frozen=True)
class PictureCurve:
    """One curve: (x, y, whether it was measured) in the order of x."""

    name: str
    points: tuple[tuple[float, float, bool], ...]


@dataclass(frozen=True)
class LinearScale(AxisScale):
    """One axis from zero."""

    def at(self, value: float) -> float:
        """Return the pixel of *value*, limited to the axis."""
        share = min(max(value / self.high, 0.0), 1.0)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> Iterator[float]:
        """Yield five values or fewer, round ones."""
        step = 10.0 ** math.floor(math.log10(self.high / 2))
        step *= next(times for times in (1, 2, 5) if self.high / (times * step) <= 5)
        yield from (at * step for at in range(int(self.high / step) + 1))


def picture(across: str, up: str, curves: Sequence[PictureCurve], *, linear: bool = False) -> Iterator[str]:
    """Yield an SVG of *curves* over a logarithmic axis of whole numbers, and its legend; hollow points are predicted."""
    some = [point for curve in curves for point in curve.points]
    xs, ys = sorted({x for x, _y, _measured in some}), [y for _x, y, _measured in some]
    x = AxisScale(xs[0] / 1.3, xs[-1] * 1.3, _LEFT, WIDTH - 24)
    y = (LinearScale if linear else AxisScale)(min(ys) / 1.5, max(ys) * 1.2 or 1.0, _TALL - 48, 16)
    yield f'<svg viewBox="0 0 {WIDTH} {_TALL}" role="img" aria-label="{escape(f"{up} over {across}")}">'
    said = 0.0
    for value in xs:
        at = x.at(value)
        yield line_of("grid", at, y.end, at, y.start)
        if at - said >= _LABEL:
            yield f'<text class="tick" x="{at:.1f}" y="{y.start + 18}" text-anchor="middle">{value:g}</text>'
            said = at
    for value in y.ticks():
        yield line_of("grid", x.start, y.at(value), x.end, y.at(value))
        yield f'<text class="tick" x="{x.start - 8}" y="{y.at(value):.1f}" dy="0.32em" text-anchor="end">{value:g}</text>'
    yield f'<text class="axis" x="{(x.start + x.end) / 2:.1f}" y="{_TALL - 8}" text-anchor="middle">{escape(across)}</text>'
    yield f'<text class="axis" x="{x.start}" y="11">{escape(up)}</text>'
    for number, curve in enumerate(curves):
        colour = f"c{number % COLOURS}"
        places = [(x.at(one), y.at(value)) for one, value, _measured in curve.points]
        yield f'<polyline class="curve {colour}" points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in places)}"/>'
        for (one, value, measured), (a, b) in zip(curve.points, places, strict=True):
            title = f"{curve.name}: {value:.4g} at {one:g}{'' if measured else ', predicted'}"
            kind = f"{'point' if measured else 'trained'} {colour}"
            yield f'<circle class="{kind}" cx="{a:.1f}" cy="{b:.1f}" r="5"><title>{escape(title)}</title></circle>'
    yield "</svg>"
    swatch = (
        '<svg viewBox="0 0 10 10" aria-hidden="true"><rect class="swatch c{}" width="10" height="10"/></svg>'
    )
    names = "".join(
        f"<li>{swatch.format(at % COLOURS)} {escape(one.name)}</li>" for at, one in enumerate(curves)
    )
    yield f'<ul class="legend">{names}</ul>'


def _curves(some: Iterable[tuple[str, float, float, bool]]) -> list[PictureCurve]:
    found: dict[str, dict[float, tuple[float, float, bool]]] = {}
    for name, x, y, measured in some:
        found.setdefault(name, {})[x] = (x, y, measured)
    return [PictureCurve(name, tuple(points[x] for x in sorted(points))) for name, points in found.items()]


def page_of(sheets: Sequence[MlperfSheet], found: FoundRuns, devices: Sequence[int] = ()) -> str:
    """Return all sheets as a page of one file: communication over scale, and the axes that are joined on the batch, as pictures."""
    body: list[str] = []
    for sheet in sheets:
        body += ["<section>", f"<h2>{escape(sheet.title)}</h2>"]
        body += [f'<p class="small">{escape(note)}</p>' for note in sheet.notes]
        if sheet.name == "communication":
            body += _communication_pictures(found)
        if sheet.name == "predictions":
            body += _joined_pictures(found, devices)
        body += _table(sheet)
        body.append("</section>")
    return document("MLPerf HPC", body)


def _table(sheet: MlperfSheet) -> Iterator[str]:
    yield '<div class="scroll"><table><thead><tr>'
    yield "".join(f'<th scope="col">{escape(name)}</th>' for name in sheet.columns)
    yield "</tr></thead><tbody>"
    for row in sheet.rows:
        cells = "".join(f'<td class="{_kind(value)}">{escape(_shown(value))}</td>' for value in row)
        yield f"<tr>{cells}</tr>"
    yield "</tbody></table></div>"


def _kind(value: Value) -> str:
    return "n" if isinstance(value, (int, float)) else ""


def _communication_pictures(found: FoundRuns) -> Iterator[str]:
    shares = predict.shares(found.runs, found.windows)
    names = labels(one.place.training for one in shares)
    for (training, machine), some in predict.by_training(shares).items():
        yield f"<h3>{escape(f'{names[training]} on {machine}')}</h3>"
        curves = _curves(
            (f"global batch {one.place.batch}", one.place.devices, 100 * one.value, True) for one in some
        )
        yield from picture("devices", "communication, % of a step", curves, linear=True)


def _joined_pictures(found: FoundRuns, devices: Sequence[int]) -> Iterator[str]:
    """Yield three pictures for each training on a machine, over one axis: the batch."""
    joined = predict.joined(predict.model_of(found.runs, _measured(found)), devices)
    names = labels(training for training, _machine in joined)
    for (training, machine), some in joined.items():
        yield f"<h3>{escape(f'{names[training]} on {machine}: joined on the global batch')}</h3>"
        parts = [(one.predicted, one.measured, count(one.predicted.place.devices, "device")) for one in some]
        for title, rows in (
            ("training epochs to the target", [("any devices", p, p.epochs, p.epochs_from == MEASURED) for p, _m, _d in parts]),
            ("training epoch, s", [(name, p, p.epoch_s, p.epoch_from == MEASURED) for p, _m, name in parts]),
            ("time to train, s", [(name, p, p.seconds if m is None else m, m is not None) for p, m, name in parts]),
        ):  # fmt: skip
            curves = _curves((name, one.place.batch, value, measured) for name, one, value, measured in rows)
            yield from picture("global batch", title, curves)


def _shown(value: Value) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    return str(value)
