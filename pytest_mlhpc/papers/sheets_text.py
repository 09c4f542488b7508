"""The tables of throughput for a terminal: at most 100 columns where names allow it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Final

from pytest_mlhpc.papers.sheets import Sheet, common, explained, remarks, sheets
from pytest_mlhpc.papers.throughput import Tables
from pytest_mlhpc.store.text import clean

WIDTH: Final = 100
#: A system's name has what the figures leave of a line, within these; longer ones are wrapped.
_LEAST, _MOST = 16, 40


def text_of(tables: Tables, head: Sequence[str]) -> str:
    """Return the tables, below the sentences *head*, and above what is not comparable and the sources."""
    lines = [line for sentence in [*head, *explained(tables)] for line in _wrapped(sentence, "")]
    lines += [line for sentence in common(tables) for line in _wrapped(sentence, "  ")]
    for sheet in sheets(tables):
        lines += ["", *_wrapped(sheet.title, "  "), *_table(sheet)]
    for heading, told in remarks(tables):
        lines += ["", f"{heading}:"]
        for line in told:
            lines += [f"  {part}" for part in _wrapped(line, "  ", WIDTH - 2)]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _table(sheet: Sheet) -> list[str]:
    from rich.cells import cell_len

    rows = [row for block in sheet.blocks for row in block.rows]
    figures = [
        max(cell_len(row[at]) for row in [sheet.headings, *rows]) for at in range(1, len(sheet.headings))
    ]
    most = min(_MOST, max(_LEAST, WIDTH - 2 - sum(width + 2 for width in figures)))
    widths = [max(cell_len(part) for row in rows for part in _chopped(row[0], most)), *figures]
    lines = [_line(sheet.headings, widths)]
    for block in sheet.blocks:
        lines += ["", *_wrapped(block.heading, "  ")]
        lines += _wrapped(f"  apart from the first: {block.apart}", "    ") if block.apart else []
        for row in block.rows:
            *before, last = _chopped(row[0], most)
            lines += [f"  {part}" for part in before]
            lines.append(_line((last, *row[1:]), widths))
    return lines


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    from rich.cells import cell_len, set_cell_size

    right = (
        f"{' ' * (width - cell_len(cell))}{cell}" for cell, width in zip(cells[1:], widths[1:], strict=True)
    )
    return "  ".join(["  " + set_cell_size(cells[0], widths[0]), *right]).rstrip()


def _chopped(text: str, most: int) -> list[str]:
    """Return a name in parts of at most *most* cells, broken at blanks where there are some."""
    from rich.cells import cell_len, chop_cells

    plain = clean(text).replace("\n", " ")
    if cell_len(plain) <= most:
        return [plain]
    if cell_len(plain) != len(plain):
        return chop_cells(plain, most) or [""]
    return textwrap.wrap(plain, most, break_on_hyphens=False) or [""]


def _wrapped(text: str, indent: str, width: int = WIDTH) -> list[str]:
    """Return *text* in lines of at most *width* cells, the second and later ones indented."""
    from rich.cells import cell_len

    plain = clean(text).replace("\n", " ")
    # Wide letters take two cells: half as many fit in the worst case.
    most = width if cell_len(plain) == len(plain) else width // 2
    lead = plain[: len(plain) - len(plain.lstrip())]
    return textwrap.wrap(
        plain.strip(), most, initial_indent=lead, subsequent_indent=lead + indent, break_on_hyphens=False
    )
