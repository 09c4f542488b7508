"""A comparison as text of at most 100 columns, JSON, CSV and Markdown. Foreign names obey nothing that opens them."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from pytest_mlhpc.report import keys
from pytest_mlhpc.report.figures import Cell, ComparisonRow, Table
from pytest_mlhpc.report.keys import Benchmark
from pytest_mlhpc.store.text import (
    WIDTH,
    aligned,
    chopped,
    csv_text,
    escaped,
    figure,
    iso,
    markdown_table,
    one_line,
    widest,
    wrapped,
)

#: Most cells of a heading's or a metric's line; longer ones are wrapped, nothing is cut.
_HEADING, _METRIC = 26, 44
#: Most lines that say why cells are empty.
MOST_LINES: Final = 30

#: The lines of one cell of the text.
Lines = list[str]


def text_of(table: Table, head: Sequence[str], *, show_keys: bool = False) -> str:
    """Return the tables, below the sentences *head*, and above what is missing and why."""
    lines = [line for sentence in head for line in textwrap.wrap(one_line(sentence, 1000), WIDTH)]
    benchmarks = list(dict.fromkeys(row.key.benchmark for row in table.rows))
    common, labels = keys.labels(benchmarks)
    if common and table.rows:
        lines += wrapped(f"all rows: {common}", "  ")
    if table.rows:
        for columns, beside in _column_groups(table):
            lines += ["", *_table(table, labels, columns, beside=beside)]
    lines += _missing(table, labels)
    if show_keys:
        lines += ["", "benchmarks:"]
        for benchmark in benchmarks:
            lines += wrapped(f"  {labels[benchmark]}: {benchmark.name}: {benchmark.definition}", "  ")
    return "".join(f"{line.rstrip()}\n" for line in lines)


def names_of(table: Table, labels: dict[Benchmark, str]) -> list[str]:
    """Return each row's benchmark, with cache and kind of data where another row differs in these alone."""
    caches: dict[Benchmark, set[str]] = {}
    kinds: dict[Benchmark, set[str]] = {}
    for row in table.rows:
        caches.setdefault(row.key.benchmark, set()).add(row.key.cache)
        kinds.setdefault(row.key.benchmark, set()).add(row.key.data_kind)
    names = []
    for key in (row.key for row in table.rows):
        cache = f" ({key.cache} cache)" if len(caches[key.benchmark]) > 1 else ""
        kind = f" ({key.data_kind} data)" if len(kinds[key.benchmark]) > 1 else ""
        names.append(f"{labels[key.benchmark]}{cache}{kind}")
    return names


def measured(cell: Cell, *, per_device: bool = False) -> str:
    """Return the cell's figure: median, half the range, number of runs; per device also of how many."""
    if cell.median is None:
        return "-"
    spread = f" \N{PLUS-MINUS SIGN}{cell.spread:.1%}" if cell.spread is not None else ""
    devices = f" on {cell.devices}" if per_device else ""
    return f"{figure(cell.median)}{spread} ({cell.runs}){devices}"


def compared(cell: Cell) -> str:
    """Return the cell's ratio to the first column, and what it means."""
    return "" if cell.ratio is None else f"{cell.ratio:.3g}x {cell.word}".rstrip()


def metric_of(row: ComparisonRow) -> str:
    """Return the row's metric with its unit."""
    key = row.key
    if not key.metric:
        return "(no run that counts)"
    return key.metric if key.unit == "1" else f"{key.metric} [{key.unit}]"


def empty_cells(table: Table) -> list[tuple[str, Benchmark, str]]:
    """Return (columns, benchmark, why) of cells without figure; what is true of several columns and metrics comes once."""
    found: dict[tuple[Benchmark, str], dict[str, None]] = {}
    for row in table.rows:
        for column, cell in zip(table.columns, row.cells, strict=True):
            if cell.missing:
                found.setdefault((row.key.benchmark, cell.why), {})[column.name] = None
    return [(", ".join(columns), benchmark, text) for (benchmark, text), columns in found.items()]


def counted(table: Table) -> str:
    """Return how many cells are empty, by kind of reason."""
    kinds = Counter(cell.missing for row in table.rows for cell in row.cells if cell.missing)
    total = sum(kinds.values())
    many = f"{total} cells are empty" if total > 1 else "1 cell is empty"
    return f"{many}: {', '.join(f'{n} {kind}' for kind, n in kinds.most_common())}" if kinds else ""


def _missing(table: Table, labels: dict[Benchmark, str]) -> Lines:
    counts = counted(table)
    if not counts:
        return []
    lines = ["", *textwrap.wrap(counts, WIDTH)]
    reasons = empty_cells(table)
    for columns, benchmark, text in reasons[:MOST_LINES]:
        lines += wrapped(f"  {one_line(labels[benchmark], 200)}: {columns}: {one_line(text, 400)}", "  ")
    if len(reasons) > MOST_LINES:
        lines.append(f"  and {len(reasons) - MOST_LINES} more; --json has all")
    return lines


def _column_groups(table: Table) -> list[tuple[list[int], bool]]:
    """Return which columns stand in which table, the first one in each, and whether ratios stand beside figures."""
    everything = list(range(len(table.columns)))
    for beside in (True, False):
        if _width(table, everything, beside=beside) <= WIDTH:
            return [(everything, beside)]
    parts: list[list[int]] = []
    for place in everything[1:]:
        if parts and _width(table, [*parts[-1], place], beside=False) <= WIDTH:
            parts[-1].append(place)
        else:
            parts.append([0, place])
    return [(part, False) for part in parts or [[0]]]


def _width(table: Table, columns: Sequence[int], *, beside: bool) -> int:
    return sum(width + 2 for width in _widths(table, columns, beside=beside)) - 2


def _widths(table: Table, columns: Sequence[int], *, beside: bool) -> list[int]:
    widths = [widest([line for row in table.rows for line in _metric(row)])]
    for place in columns:
        lines = _heading(table, place)
        for row in table.rows:
            lines += _cell(row.cells[place], beside=beside, per_device=table.per_device)
        widths.append(widest(lines))
    return widths


def _table(table: Table, labels: dict[Benchmark, str], columns: Sequence[int], *, beside: bool) -> Lines:
    widths = _widths(table, columns, beside=beside)
    lines = aligned([[[], *(_heading(table, place) for place in columns)]], widths=widths)
    last = ""
    for row, name in zip(table.rows, names_of(table, labels), strict=True):
        if name != last:
            lines += wrapped(name, "    ")
            last = name
        shown = [_cell(row.cells[place], beside=beside, per_device=table.per_device) for place in columns]
        lines += aligned([[_metric(row), *shown]], widths=widths)
    return lines


def _heading(table: Table, place: int) -> Lines:
    return [line for part in table.columns[place].heading for line in chopped(part, _HEADING)]


def _metric(row: ComparisonRow) -> Lines:
    return [f"  {line}" for line in chopped(metric_of(row), _METRIC)]


def _cell(cell: Cell, *, beside: bool, per_device: bool) -> Lines:
    first, second = measured(cell, per_device=per_device), compared(cell)
    if not second:
        return [first]
    return [f"{first}  {second}"] if beside else [first, second]


_CSV: Final = (
    "benchmark", "definition", "metric", "unit", "better", "data_kind", "cache", "system", "partition", "environment", "device_model",
    "fingerprint", "median", "spread", "runs", "busy_runs", "newest", "devices", "measured_definition", "ratio", "word", "missing",
    "why",
)  # fmt: skip


def data_of(table: Table, about: dict[str, Any]) -> dict[str, Any]:
    """Return it as one object for programs; *about* says what was asked for."""
    columns = [asdict(column.machine) | {"name": column.name} for column in table.columns]
    rows = [_row(row) | {"cells": [_figures(cell) for cell in row.cells]} for row in table.rows]
    notes = list(table.notes)
    return {**about, "columns": columns, "rows": rows, "notes": notes}


def csv_of(table: Table) -> str:
    """Return one line for each cell, under a line of headings."""
    return csv_text(
        _CSV,
        (
            {**_row(row), **asdict(column.machine), **_figures(cell)}
            for row in table.rows
            for column, cell in zip(table.columns, row.cells, strict=True)
        ),
    )


def markdown_of(table: Table, head: Sequence[str]) -> str:
    """Return one table, with the sentences above and below it."""
    common, labels = keys.labels([row.key.benchmark for row in table.rows])
    lines = [escaped(sentence) for sentence in head]
    lines += [escaped(f"all rows: {common}")] if common and table.rows else []
    rows = [
        [name, metric_of(row), *(_cell_text(cell, per_device=table.per_device) for cell in row.cells)]
        for row, name in zip(table.rows, names_of(table, labels), strict=True)
    ]
    if rows:
        head_row = ["benchmark", "metric", *(column.name for column in table.columns)]
        lines += ["", *markdown_table(head_row, rows)]
    if counts := counted(table):
        lines += ["", escaped(counts), ""]
        lines += [f"* {escaped(f'{labels[b]}: {columns}: {why}')}" for columns, b, why in empty_cells(table)]
    return "".join(f"{line}\n" for line in lines)


def _cell_text(cell: Cell, *, per_device: bool) -> str:
    return ", ".join(filter(None, (measured(cell, per_device=per_device), compared(cell))))


def _row(row: ComparisonRow) -> dict[str, Any]:
    key = row.key
    return {
        "benchmark": key.benchmark.name,
        "definition": key.benchmark.definition,
        "metric": key.metric,
        "unit": key.unit,
        "better": key.better,
        "data_kind": key.data_kind,
        "cache": key.cache,
    }


def _figures(cell: Cell) -> dict[str, Any]:
    if cell.median is None:
        return {"median": None, "missing": cell.missing, "why": cell.why}
    return {
        "median": cell.median,
        "spread": cell.spread,
        "runs": cell.runs,
        "busy_runs": cell.busy,
        "newest": iso(cell.newest_ns),
        "devices": cell.devices,
        "measured_definition": cell.benchmark.definition if cell.benchmark else "",
        "ratio": cell.ratio,
        "word": cell.word,
    }
