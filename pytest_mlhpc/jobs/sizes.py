"""Fields of a job that are sizes in bytes: one, or a list of them."""

from __future__ import annotations

from typing import Any

from pytest_mlhpc.config.quantities import parse_size


def in_bytes(kind: str, value: Any) -> Any:
    """Return *value* of a field of type *kind* as plain JSON, sizes in bytes; *value* was checked before."""
    if kind == "size":
        return parse_size(value)
    if kind == "sizes":
        return [parse_size(one) for one in value]
    return list(value) if isinstance(value, tuple) else value


def wrong_sizes(value: Any, minimum: float) -> str:
    """Return why *value* is no size, or no list of different sizes, of at least *minimum* bytes; or an empty string."""
    if isinstance(value, str | int):
        return _wrong(value, minimum)
    if not value:
        return "is an empty list"
    if found := next((text for one in value if (text := _wrong(one, minimum))), ""):
        return found
    if len({parse_size(one) for one in value}) < len(value):
        return f"{value!r} names a size twice"
    return ""


def _wrong(value: Any, minimum: float) -> str:
    try:
        size = parse_size(value)
    except ValueError as error:
        return str(error)
    return f"{value} is less than {minimum:g} bytes" if size < minimum else ""
