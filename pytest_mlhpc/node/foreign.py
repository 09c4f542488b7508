"""PAYLOAD. JSON that others wrote: files that were found, lines of peers, answers of servers, output of programs."""

from __future__ import annotations

import json
import math
from typing import Any

#: Most digits of a whole number: each that is shorter is a float too (the largest has 309).
_DIGITS = 300


def read_json(text: str | bytes | bytearray) -> Any:
    """Return what *text* holds.

    Raises:
        ValueError: it is no JSON (RFC 8259, so no NaN and no Infinity either), nested too deeply for the parser, or holds a
            number that no float holds.
    """
    try:
        return json.loads(text, parse_constant=_constant, parse_float=_float, parse_int=_integer)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _constant(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large a number")
    return value


def _integer(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"{text[:40]}... is too large a number")
    return int(text)
