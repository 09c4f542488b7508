"""Plain text tables, and text of unknown origin made safe for a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def clean(text: str) -> str:
    """Return *text* without anything that a terminal would obey; line ends stay."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


def one_line(text: str, width: int | None = 160) -> str:
    """Return the first line of *text*, safe to print, cut to *width* characters; None: whole."""
    first = clean(text).strip().partition("\n")[0]
    return first if width is None or len(first) <= width else f"{first[: width - 3]}..."


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return *rows* in columns as wide as their widest cell, two blanks between."""
    cells = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)
    return "".join(f"{line.rstrip()}\n" for line in lines)
