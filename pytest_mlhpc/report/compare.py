"""The comparison of machines: each benchmark and metric in a row, each machine in a column. Pure; from compact records.

An empty cell says why it is empty; nothing is compared that is not comparable (``report/figures.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from pytest_mlhpc.errors import UsageError, nearest
from pytest_mlhpc.report import missing
from pytest_mlhpc.report.figures import (
    Cell,
    Row,
    RowKey,
    Runs,
    Series,
    Table,
    beside_scales,
    cells_of,
    gather,
    metric_names,
    with_ratios,
)
from pytest_mlhpc.report.keys import Benchmark
from pytest_mlhpc.report.machines import Column, Seen


def compare(
    columns: Sequence[Column],
    runs: Runs,
    seen: Sequence[Seen],
    *,
    benchmarks: Collection[Benchmark],
    metrics: Sequence[str] = (),
    per_device: bool = False,
) -> Table:
    """Return the table.

    Args:
        columns: the machines, the first one being what the others are compared with.
        runs: (place of the column, benchmark) -> accepted runs, newest first.
        seen: all that was recorded on these columns; what is nearest to a missing benchmark is named from it.
        benchmarks: those that are compared.
        metrics: the metrics to show; none: those that each benchmark judges.
        per_device: divide work per time by the number of devices, and set runs of other scales beside each other.

    Raises:
        UsageError: no run reports one of *metrics*; names the nearest that is reported.
    """
    known = metric_names(runs.values())
    for metric in metrics:
        if runs and metric not in known:
            hint = nearest(metric, known)
            meant = f" (did you mean {hint!r}?)" if hint else ""
            raise UsageError(f"no run that is compared reports a metric {metric!r}{meant}")
    series = gather(runs, metrics, per_device=per_device)
    if per_device:
        series = beside_scales(series)
    history = missing.history_of(columns, seen)
    rows = []
    for key, found in series.items():
        cells = _explained(key, cells_of(found, len(columns)), runs, history, per_device=per_device)
        rows.append(Row(key, with_ratios(cells, key.better)))
    if not metrics and not per_device:
        for benchmark in _without_figures(runs, history, benchmarks):
            cells = [Cell()] * len(columns)
            key = RowKey(benchmark, "")
            rows.append(Row(key, tuple(_explained(key, cells, runs, history, per_device=False))))
    notes = (*_notes(series, runs, metrics, per_device=per_device), *_busy(columns, runs))
    return Table(tuple(columns), tuple(rows), notes, per_device)


def _explained(
    key: RowKey, cells: Sequence[Cell], runs: Runs, history: missing.History, *, per_device: bool
) -> list[Cell]:
    made = []
    for place, cell in enumerate(cells):
        if cell.median is None:
            kind, text = missing.why(key, place, runs, history, per_device=per_device)
            made.append(replace(cell, missing=kind, why=text))
        else:
            made.append(cell)
    return made


def _without_figures(
    runs: Runs, history: missing.History, benchmarks: Collection[Benchmark]
) -> list[Benchmark]:
    """Return benchmarks that were tried and of which no run counts, on no column."""
    counted = {benchmark for _, benchmark in runs}
    tried = {
        benchmark
        for (_, benchmark), past in history.past.items()
        if past.failed and benchmark in benchmarks and benchmark not in counted
    }
    return sorted(tried)


def _notes(series: Series, runs: Runs, metrics: Sequence[str], *, per_device: bool) -> tuple[str, ...]:
    notes = []
    if per_device:
        notes.append(
            "per device: work per time is divided by the number of devices (on N), and the nearest scale stands in where a"
            " column has not the row's. Runs of different scale are different benchmarks: more devices also pay for"
            " communication. Other metrics are left out"
        )
    shown = {key.benchmark for key in series}
    unjudged = {
        run.benchmark
        for found in runs.values()
        for run in found
        if not run.judged and run.benchmark not in shown
    }
    if unjudged and not metrics and not per_device:
        judge = "benchmarks judge" if len(unjudged) > 1 else "benchmark judges"
        notes.append(f"{len(unjudged)} {judge} no metric; name one by --metric to see it")
    return tuple(notes)


def _busy(columns: Sequence[Column], runs: Runs) -> Iterator[str]:
    """Say of each column in how many of its runs the machine did something else as well, and what in the newest one."""
    for place, column in enumerate(columns):
        found = [run for (at, _), made in runs.items() if at == place for run in made]
        busy = [run for run in found if run.busy]
        if busy:
            newest = max(busy, key=lambda run: run.created_ns)
            yield (
                f"{column.name} was busy with something else in {len(busy)} of {len(found)} runs ({newest.busy}): repeat them "
                "when it is quiet"
            )
