"""The report: all sheets about what was recorded. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_mlhpc.papers.mlperf import predict, sheets_runs, sheets_scales
from pytest_mlhpc.papers.mlperf.groups import groups
from pytest_mlhpc.papers.mlperf.points import RUN, points
from pytest_mlhpc.papers.mlperf.sheet import Sheet
from pytest_mlhpc.papers.mlperf.source import Found


def sheets(found: Found, devices: Sequence[int] = ()) -> tuple[Sheet, ...]:
    """Return all sheets that have rows; predictions are for so many *devices* where any are given."""
    repeated = groups(found.runs)
    measured = points(found.runs, found.windows)
    trained = {one.place.training for one in measured if one.source == RUN}
    measured = tuple(
        one for one in measured if one.place.training in trained
    )  # other trainings have reports of their own
    model = predict.model_of(found.runs, measured)
    made = (
        sheets_runs.results(repeated),
        sheets_runs.departures(repeated),
        sheets_runs.breakdown(repeated),
        sheets_scales.predictions(model, devices),
        sheets_scales.held_back(model),
        *sheets_scales.curves(measured),
        *sheets_runs.published(repeated),
    )
    return tuple(sheet for sheet in made if sheet.rows)
