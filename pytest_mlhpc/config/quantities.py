"""Sizes, durations and budgets as people write them: ``768GiB``, ``1h30m``, ``20 node-hours``."""

from __future__ import annotations

import re
from typing import Final

from pytest_mlhpc.store.text import nanoseconds

#: Factors of IEC 80000-13 (binary) and SI (decimal) prefixes.
_SIZES: Final = {
    "B": 1,
    "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50,
}  # fmt: skip
_SECONDS: Final = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([kKMGTP]?i?B)\Z")
_PART = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?(min|[smhd])")
_DURATION = re.compile(rf"(?:{_PART.pattern} ?)+\Z")
_CALENDAR = re.compile(r"([0-9]{1,4}) ?(y|years?|months?)\Z")
_BUDGET = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) (node|device|core)-hours?\Z")
#: No node has more memory, no file set more bytes: an exbibyte and more is a slip of the pen.
_LARGEST_SIZE: Final = 2**60
#: A year; schedulers allow days.
_LONGEST_S: Final = 366 * 86400


def parse_size(value: object) -> int:
    """Return bytes. Takes ``768GiB``, ``1.5 TB``, ``4096B``, or a whole number of bytes.

    Raises:
        ValueError: not a size, not above zero, or an exbibyte and more.
    """
    if isinstance(value, str) and (match := _SIZE.match(value.strip())) and match[2] in _SIZES:
        number, unit = match[1], _SIZES[match[2]]
        size = int(number) * unit if number.isdigit() else round(float(number) * unit)
    elif isinstance(value, str) and re.match(r"[0-9]{1,20}\Z", value.strip()):
        size = int(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        raise ValueError(f"{_short(value)} is not a size; write it like 768GiB, 1.5TB or 4096B")
    if not 0 < size < _LARGEST_SIZE:
        raise ValueError(f"{_short(value)} is not a size above 0 and below 1024 PiB")
    return size


def parse_memory(value: object) -> int:
    """Return bytes of memory, as :func:`parse_size`. Slurm counts in MiB where no unit is given, so that a small bare number is a slip.

    Raises:
        ValueError: not a size, or a number without a unit that is less than a MiB.
    """
    size = parse_size(value)
    bare = isinstance(value, int) or str(value).strip().isdigit()
    if bare and size < _SIZES["MiB"]:
        raise ValueError(f"{_short(value)} without a unit is {format_size(size)}; did you mean {size}MiB?")
    return size


def parse_months(text: str) -> int:
    """Return months. Takes ``2y``, ``2 years``, ``18 months``; ``m`` is minutes everywhere, so it is none of them.

    Raises:
        ValueError: not years or months, not above zero, or more than a century.
    """
    match = _CALENDAR.match(text.strip())
    months = int(match[1]) * (12 if match[2].startswith("y") else 1) if match else 0
    if not 0 < months <= 1200:
        raise ValueError(f"{_short(text)} is not a time like 2y or 18 months")
    return months


def parse_duration(value: object, longest_s: float = _LONGEST_S) -> float:
    """Return seconds. Takes ``1h``, ``30m``, ``1h30m``, ``2d``, or a number of seconds.

    Raises:
        ValueError: not a duration, not above zero, or longer than a year, or than *longest_s*.
    """
    seconds: float
    if isinstance(value, str) and _DURATION.match(value.strip()):
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(value))
    elif _is_number(value):
        seconds = float(value) if isinstance(value, str) else value  # type: ignore[assignment]  # _is_number has looked
    else:
        raise ValueError(f"{_short(value)} is not a duration; write it like 1h, 30m, 1h30m or 3600 (seconds)")
    if not 0 < seconds <= longest_s:
        raise ValueError(f"{_short(value)} is not a duration above 0 and up to a year")
    return float(seconds)  # only now: a whole number of 400 digits is no float


def parse_budget(value: object) -> tuple[float, str]:
    """Return the amount and what is counted (``node``, ``device`` or ``core``) of ``20 node-hours``.

    Raises:
        ValueError: anything else.
    """
    match = _BUDGET.match(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"{_short(value)} is not a budget; write it like '20 node-hours'")
    return float(match[1]), match[2]


def canonical_budget(value: object) -> str:
    """Return *value* as ``20 node-hours``, checked by :func:`parse_budget`."""
    amount, what = parse_budget(value)
    return f"{amount:g} {what}-hours"


#: Months in what a rate may be said of: 30 days, as limits of the judge count them.
_MONTHS: Final = {"night": 1 / 30, "week": 7 / 30, "month": 1.0, "year": 365 / 30}
_RATE = re.compile(rf"([0-9]{{1,6}}(?:\.[0-9]{{1,6}})?) per ({'|'.join(_MONTHS)})\Z")


def parse_rate(value: object) -> float:
    """Return how often a month. Takes ``1 per month``, ``1 per week``, ``4 per year`` or ``0.1 per night``.

    Raises:
        ValueError: anything else, or zero.
    """
    match = _RATE.match(value.strip()) if isinstance(value, str) else None
    if match is None or not float(match[1]):
        raise ValueError(
            f"{_short(value)} is not a rate above 0; write it like '1 per month' or '4 per year'"
        )
    return float(match[1]) / _MONTHS[match[2]]


def parse_share(value: object) -> float:
    """Return a share between 0 and 1, as ``0.03`` for ``3 %``.

    Raises:
        ValueError: anything else, 0 % and 100 % among it.
    """
    match = (
        re.fullmatch(r"([0-9]{1,2}(?:\.[0-9]{1,6})?) ?%", value.strip()) if isinstance(value, str) else None
    )
    if match is None or not float(match[1]):
        raise ValueError(f"{_short(value)} is no share between 0 % and 100 %; write it like '3 %'")
    return float(match[1]) / 100


def format_size(size: int) -> str:
    """Return *size* bytes as a text for people that :func:`parse_size` reads, exact or with one decimal."""
    for unit in ("PiB", "TiB", "GiB", "MiB", "KiB"):
        if size >= _SIZES[unit]:
            amount = size / _SIZES[unit]
            return f"{amount:.0f}{unit}" if amount == int(amount) else f"{amount:.1f}{unit}"
    return f"{size}B"


def _is_number(value: object) -> bool:
    if isinstance(value, str):
        return re.match(r"[0-9]{1,9}(\.[0-9]{1,9})?\Z", value.strip()) is not None
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def parse_moment(value: object) -> int:
    """Return ns UTC. Takes ``2026-12-24`` and ``2026-12-24T08:00``, UTC unless it says otherwise.

    Raises:
        ValueError: not such a date.
    """
    try:
        return nanoseconds(value.strip()) if isinstance(value, str) and value.strip() else int("")
    except (ValueError, OverflowError, OSError):
        raise ValueError(f"{_short(value)} is no date; write it like 2026-12-24T08:00") from None
