"""Dates as people write them (ISO 8601), times as records hold them (integer nanoseconds UTC)."""

from __future__ import annotations

import datetime as dt


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


def iso(moment_ns: int) -> str:
    """Return nanoseconds UTC as an ISO 8601 date with seconds."""
    return dt.datetime.fromtimestamp(moment_ns / 1e9, tz=dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def minutes(moment_ns: int) -> str:
    """Return nanoseconds UTC as people read them."""
    return dt.datetime.fromtimestamp(moment_ns / 1e9, tz=dt.UTC).strftime("%Y-%m-%d %H:%M UTC")
