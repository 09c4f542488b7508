"""Which records a pipeline is about: of one system, since its job began or for some days, the newest of each benchmark."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

from pytest_mlhpc.results.dates import nanoseconds
from pytest_mlhpc.results.index import Index
from pytest_mlhpc.results.record import Record
from pytest_mlhpc.statedir import default_state_dir
from pytest_mlhpc.system.quantities import parse_duration


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--system``, ``--since``, ``--commit``, ``--changes`` and ``--state-dir``."""
    parser.add_argument("--system", default="", metavar="NAME", help="only of this system (default: of all)")
    parser.add_argument(
        "--since",
        type=moment,
        default="1d",
        metavar="TIME",
        help="only what was recorded since then: 2d, or 2026-11-21T22:00:00Z (default: 1d)",
    )
    parser.add_argument("--commit", default="", metavar="SHA", help="only of this commit, or how it begins")
    parser.add_argument("--changes", action="store_true", help="only of merge requests, not of nights")
    parser.add_argument("--state-dir", type=Path, metavar="DIR", help="default: $MLHPC_STATE")


def moment(text: str) -> int:
    """Return nanoseconds UTC of a date (ISO 8601) or of so long ago.

    Raises:
        argparse.ArgumentTypeError: It is neither.
    """
    with contextlib.suppress(ValueError):
        return time.time_ns() - int(parse_duration(text) * 1e9)
    with contextlib.suppress(ValueError, OverflowError, OSError):
        if text.strip():
            return nanoseconds(text)
    raise argparse.ArgumentTypeError(
        f"{text!r} is neither a duration such as 2d nor a date such as 2026-11-21T22:00:00Z"
    )


def state_dir_of(args: argparse.Namespace) -> Path:
    """Return where the records lie."""
    given: Path | None = args.state_dir
    return given or default_state_dir(os.environ)


def chosen(index: Index, args: argparse.Namespace) -> list[Record]:
    """Return what the options above choose, in the order in which it was recorded.

    Raises:
        StoreError: The records cannot be read.
    """
    records = index.since(args.since)
    return newest(
        one
        for one in records
        if (not args.system or one.system == args.system)
        and one.commit.startswith(args.commit)
        and (not args.changes or one.purpose == "change")
    )


def newest(records: Iterable[Record]) -> list[Record]:
    """Return the newest first attempt of each benchmark of each commit on each machine, oldest first.

    Args:
        records: Newest first.
    """
    found: dict[tuple[str, ...], Record] = {}
    for one in records:
        if one.attempt == 0:
            # A run that failed before it had a device would else stand beside the one that was made again.
            found.setdefault(
                (one.commit, one.system, one.partition, one.environment, one.benchmark, one.node_id), one
            )
    return list(found.values())[::-1]
