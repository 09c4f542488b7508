"""Sheets about scales: predictions, their errors on scales held back, strong and weak scaling. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from pytest_mlhpc.papers.mlperf import predict, scaling
from pytest_mlhpc.papers.mlperf.points import Point, labels
from pytest_mlhpc.papers.mlperf.sheet import Sheet


def predictions(model: predict.Model, devices: Sequence[int]) -> Sheet:
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
    return Sheet("predictions", "Predicted time to train", columns, rows, (note,))


def held_back(model: predict.Model) -> Sheet:
    """Return each measured scale beside its prediction by all others."""
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


def curves(measured: Sequence[Point]) -> Iterator[Sheet]:
    """Yield strong and weak scaling."""
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
