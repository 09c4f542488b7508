"""Plain text for users: figures, counts and dates; foreign text made safe for a terminal; what commands print."""

from __future__ import annotations

import calendar
import datetime as dt
import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any

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
