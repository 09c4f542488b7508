"""Plain text and tables for users: figures, counts and dates; foreign text made safe for a terminal; what commands print.

Widths are in cells of the terminal, of which wide letters take two. They are rich's (``rich.cells``).
"""

from __future__ import annotations

import calendar
import csv
import datetime as dt
import io
import json
import re
import sys
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from pytest_mlhpc.node.files import clean

#: Units that take a prefix, and whether small figures of them do.
_PREFIXED = {
    "B": False,
    "B/s": False,
    "FLOP": False,
    "FLOP/s": False,
    "Hz": False,
    "s": True,
    "J": True,
    "W": True,
}
_LARGE = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_SMALL = ((1e-3, "m"), (1e-6, "u"), (1e-9, "n"))
#: From here on four digits are rounded to the next power of ten.
_NEARLY = 0.99995


def figure(value: float | None) -> str:
    """Return a figure for people: four significant digits, ``185,200``; ``-`` for None."""
    if value is None:
        return "-"
    rounded = f"{value:.4g}"
    return f"{float(rounded):,.0f}" if "e+0" in rounded and abs(value) < 1e9 else rounded


def quantity(value: float | None, unit: str) -> str:
    """Return a figure with its unit for people: ``5.561 GB/s``, ``12.3 ms``, ``185,200 samples/s``, ``0.93``; ``-`` for None."""
    if value is None or unit == "1":
        return figure(value)
    if (small := _PREFIXED.get(unit)) is not None:
        steps = (*(_LARGE if unit != "s" else ()), (1.0, ""), *(_SMALL if small else ()))
        size = abs(value)
        factor, prefix = next((one for one in steps if size >= _NEARLY * one[0]), (1.0, ""))
        return f"{figure(value / factor)} {prefix}{unit}"
    return f"{figure(value)} {unit}"


def quantities(values: Iterable[float], unit: str) -> str:
    """Return figures of one unit, which is said once where they share its prefix: ``85.1, 84.9 samples/s``."""
    texts = [quantity(value, unit) for value in values]
    ends = {text.partition(" ")[2] for text in texts}
    if len(ends) > 1:
        return ", ".join(texts)
    return f"{', '.join(text.partition(' ')[0] for text in texts)} {''.join(ends)}".strip()


def from_to(before: float, after: float, unit: str, between: str = " -> ") -> str:
    """Return how a figure changed, the unit once where both share its prefix: ``100 -> 92.8 samples/s``."""
    first, last = quantity(before, unit), quantity(after, unit)
    number, _, end = first.partition(" ")
    return f"{number if end == last.partition(' ')[2] else first}{between}{last}"


def count(number: int, noun: str, plural: str = "") -> str:
    """Return ``1 run``, ``12,340 runs``, ``2 series``; *plural* where an s at the end is not enough."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {plural or (noun if noun.endswith('series') else f'{noun}s')}"


def written_out(text: str) -> str:
    """Return *text* with each byte of a name that is no UTF-8 (half of a surrogate pair in Python) as its escape.

    Neither databases nor YAML hold such halves.
    """
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def one_line(text: str, width: int | None = 160) -> str:
    """Return the first line of *text*, safe to print, cut to *width* characters; None: whole.

    Words at its end that announce the next lines are left out with them.
    """
    first, _, rest = clean(text).strip().partition("\n")
    first = first.removesuffix("; its last lines:") if rest else first
    return first if width is None or len(first) <= width else f"{first[: width - 3]}..."


def nanoseconds(date: str) -> int:
    """Return an ISO 8601 date as nanoseconds UTC, whole seconds; 0 for an empty text.

    Raises:
        ValueError: it is no such date, or none that 64 bits hold (1678 to 2262).
    """
    if not date:
        return 0
    moment = dt.datetime.fromisoformat(date)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=dt.UTC)
    found = int(moment.timestamp()) * 1_000_000_000
    if not -(2**63) <= found < 2**63:
        raise ValueError(f"{date} is not between the years 1678 and 2262")
    return found


def months_before(moment_ns: int, months: int) -> int:
    """Return the same hour of the same day so many months earlier; of a shorter month, that of its last day."""
    moment = dt.datetime.fromtimestamp(moment_ns // 10**9, tz=dt.UTC)
    year, month = divmod(moment.year * 12 + moment.month - 1 - months, 12)
    day = min(moment.day, calendar.monthrange(year, month + 1)[1])
    return int(moment.replace(year=year, month=month + 1, day=day).timestamp()) * 10**9


def iso(moment_ns: int) -> str:
    """Return nanoseconds UTC as an ISO 8601 date with seconds."""
    return dt.datetime.fromtimestamp(moment_ns / 1e9, tz=dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def minutes(moment_ns: int) -> str:
    """Return nanoseconds UTC as people read them."""
    return dt.datetime.fromtimestamp(moment_ns / 1e9, tz=dt.UTC).strftime("%Y-%m-%d %H:%M UTC")


def tell(text: str) -> None:
    """Print a sentence for the user."""
    sys.stderr.write(f"{clean(text)}\n")


def object_text(command: str, data: Mapping[str, Any]) -> str:
    """Return *data* as one JSON object with the ``schema`` of a command, such as ``records list``."""
    schema = f"mlhpc/{command.replace(' ', '-')}/1"
    return f"{json.dumps({'schema': schema, **data}, indent=1, allow_nan=False)}\n"


def write(text: str) -> None:
    """Write a report; letters that the terminal does not know are shown as question marks."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(clean(text).encode(encoding, "replace").decode(encoding))


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
