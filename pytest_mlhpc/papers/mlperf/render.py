"""Sheets as text, Markdown and JSON. Names of unknown origin obey nothing that opens them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pytest_mlhpc.papers.mlperf.sheet import Sheet, Value
from pytest_mlhpc.report.compare_files import escaped
from pytest_mlhpc.store.text import table


def text_of(sheets: Sequence[Sheet]) -> str:
    """Return all sheets for a terminal."""
    parts = []
    for sheet in sheets:
        notes = "".join(f"{note}\n" for note in sheet.notes)
        rows = table([sheet.columns, *(tuple(map(_shown, row)) for row in sheet.rows)])
        parts.append(f"{sheet.title}\n{'-' * len(sheet.title)}\n{notes}{rows}")
    return "\n".join(parts)


def markdown_of(sheets: Sequence[Sheet]) -> str:
    """Return all sheets as Markdown, a heading each."""
    lines: list[str] = []
    for sheet in sheets:
        lines += [f"## {escaped(sheet.title)}", ""]
        lines += [line for note in sheet.notes for line in (escaped(note), "")]
        lines += [_line(sheet.columns), "|---" * len(sheet.columns) + "|"]
        lines += [_line(tuple(map(_shown, row))) for row in sheet.rows]
        lines.append("")
    return "".join(f"{line}\n" for line in lines)


def data_of(sheets: Sequence[Sheet], about: Mapping[str, Any]) -> dict[str, Any]:
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


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(escaped, cells))} |"
