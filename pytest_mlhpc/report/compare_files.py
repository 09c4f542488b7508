"""A comparison for other programs: JSON, CSV, Markdown. Names of unknown origin obey nothing that opens them."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from typing import Any, Final

from pytest_mlhpc.report import keys
from pytest_mlhpc.report.compare_text import compared, counted, empty_cells, measured, metric_of, names_of
from pytest_mlhpc.report.figures import Cell, Row, Table
from pytest_mlhpc.report.machines import Column
from pytest_mlhpc.store.text import clean, iso

_CSV: Final = (
    "benchmark", "definition", "metric", "unit", "better", "data_kind", "cache", "system", "partition", "environment", "device_model",
    "fingerprint", "median", "spread", "runs", "busy_runs", "newest", "devices", "measured_definition", "ratio", "word", "missing",
    "why",
)  # fmt: skip
#: What a spreadsheet takes for the beginning of a formula (OWASP, "CSV Injection").
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")


def data_of(table: Table, about: dict[str, Any]) -> dict[str, Any]:
    """Return it as one object for programs; *about* says what was asked for."""
    columns = [_machine(column) | {"name": column.name} for column in table.columns]
    rows = [_row(row) | {"cells": [_figures(cell) for cell in row.cells]} for row in table.rows]
    notes = list(table.notes)
    return {**about, "columns": columns, "rows": rows, "notes": notes}


def csv_of(table: Table) -> str:
    """Return one line for each cell, under a line of headings."""
    out = io.StringIO()
    writer = csv.DictWriter(out, _CSV, lineterminator="\n")
    writer.writeheader()
    for row in table.rows:
        for column, cell in zip(table.columns, row.cells, strict=True):
            values = {**_row(row), **_machine(column), **_figures(cell)}
            writer.writerow({name: plain(value) for name, value in values.items() if value is not None})
    return out.getvalue()


def markdown_of(table: Table, head: Sequence[str]) -> str:
    """Return one table, with the sentences above and below it."""
    common, labels = keys.labels([row.key.benchmark for row in table.rows])
    lines = [escaped(sentence) for sentence in head]
    lines += [escaped(f"all rows: {common}")] if common and table.rows else []
    if table.rows:
        lines += ["", _line(["benchmark", "metric", *(column.name for column in table.columns)])]
        lines.append("|---" * (2 + len(table.columns)) + "|")
    for row, name in zip(table.rows, names_of(table, labels), strict=True):
        figures = (
            ", ".join(filter(None, (measured(cell, per_device=table.per_device), compared(cell))))
            for cell in row.cells
        )
        lines.append(_line([name, metric_of(row), *figures]))
    if told := counted(table):
        lines += ["", escaped(told), ""]
        lines += [f"* {escaped(f'{labels[b]}: {columns}: {why}')}" for columns, b, why in empty_cells(table)]
    return "".join(f"{line}\n" for line in lines)


def _row(row: Row) -> dict[str, Any]:
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


def _machine(column: Column) -> dict[str, Any]:
    machine = column.machine
    return {
        "system": machine.system,
        "partition": machine.partition,
        "environment": machine.environment,
        "device_model": machine.device_model,
        "fingerprint": machine.fingerprint,
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


def plain(value: Any) -> Any:
    """Return what a spreadsheet shows as it is; figures stay figures."""
    if not isinstance(value, str):
        return value
    text = clean(value).replace("\n", " ")
    return f"'{text}" if value.startswith(_FORMULA) or text.startswith(_FORMULA) else text


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(escaped, cells))} |"


def escaped(text: str) -> str:
    """Return *text* such that Markdown shows it as it is; underscores within words need nothing."""
    plain = clean(text).replace("\n", " ").replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*\[\]|~$#!]|(?<!\w)_|_(?!\w))", r"\\\1", plain)
