"""Tables for a terminal, Markdown and CSV. Cells are foreign text: no terminal, page or spreadsheet obeys any of it.

Widths are in cells of the terminal, of which wide letters take two. They are rich's (``rich.cells``).
"""

from __future__ import annotations

import csv
import io
import re
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from pytest_mlhpc.node.files import clean
from pytest_mlhpc.store.text import one_line

#: Longest line of a page of several tables, in cells.
WIDTH: Final = 100
#: What a spreadsheet takes for the beginning of a formula (OWASP, "CSV Injection").
_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")


def table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Return *rows* as lines of text, each cell on one line; columns of the numbers *right* end at one place."""
    lines = aligned([[[one_line(cell)] for cell in row] for row in rows], right)
    return "".join(f"{line}\n" for line in lines)


def aligned(
    rows: Sequence[Sequence[Sequence[str]]], right: Collection[int] = (), widths: Sequence[int] = ()
) -> list[str]:
    """Return rows of cells, each of one or more lines, in columns with two blanks between.

    Columns are as wide as their widest line, or as *widths* says.
    """
    from rich.cells import cell_len, set_cell_size

    columns = [[line for cell in column for line in cell] for column in zip(*rows, strict=True)]
    widths = widths or [widest(column) for column in columns]
    lines = []
    for row in rows:
        for at in range(max(map(len, row), default=0)):
            shown = [cell[at] if at < len(cell) else "" for cell in row]
            parts = [
                " " * (width - cell_len(text)) + text if number in right else set_cell_size(text, width)
                for number, (text, width) in enumerate(zip(shown, widths, strict=True))
            ]
            lines.append("  ".join(parts).rstrip())
    return lines


def widest(lines: Iterable[str]) -> int:
    """Return the width of the widest line, in cells."""
    from rich.cells import cell_len

    return max(map(cell_len, lines), default=0)


def chopped(text: str, most: int) -> list[str]:
    """Return *text* in lines of at most *most* cells, broken at blanks where there are some; nothing is cut."""
    from rich.cells import cell_len, chop_cells

    plain = clean(text).replace("\n", " ")
    if cell_len(plain) <= most:
        return [plain]
    if cell_len(plain) != len(plain):
        return chop_cells(plain, most) or [""]
    return textwrap.wrap(plain, most, break_on_hyphens=False) or [""]


def wrapped(text: str, indent: str = "", width: int = WIDTH) -> list[str]:
    """Return *text* in lines of at most *width* cells; from the second on indented by *indent* more than the first."""
    from rich.cells import cell_len

    plain = clean(text).replace("\n", " ")
    if cell_len(plain) <= width:
        return [plain]
    # Wide letters take two cells: half as many fit in the worst case.
    most = width if cell_len(plain) == len(plain) else width // 2
    lead = plain[: len(plain) - len(plain.lstrip())]
    return textwrap.wrap(
        plain.strip(), most, initial_indent=lead, subsequent_indent=lead + indent, break_on_hyphens=False
    )


def markdown_table(
    head: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[int] = ()
) -> list[str]:
    """Return the lines of a table in Markdown; cells are shown as they are."""
    rule = "".join("|---:" if number in right else "|---" for number in range(len(head)))
    return [markdown_row(map(escaped, head)), f"{rule}|", *(markdown_row(map(escaped, row)) for row in rows)]


def markdown_row(cells: Iterable[str]) -> str:
    """Return one row of a table in Markdown; its cells are Markdown."""
    return f"| {' | '.join(cells)} |"


def escaped(text: str) -> str:
    """Return *text* such that Markdown shows it as it is; underscores within words need nothing."""
    plain = clean(text).replace("\n", " ").replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*\[\]|~$#!]|(?<!\w)_|_(?!\w))", r"\\\1", plain)


def csv_text(names: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return one line of CSV for each row, under the line of *names*; what is None or empty stays empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: _plain(value) for name, value in row.items() if value not in (None, "")})
    return out.getvalue()


def _plain(value: Any) -> Any:
    """Return what a spreadsheet shows as it is; figures stay figures."""
    if not isinstance(value, str):
        return value
    text = clean(value).replace("\n", " ")
    return f"'{text}" if value.startswith(_FORMULA) or text.startswith(_FORMULA) else text
