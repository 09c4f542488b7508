"""Ledgers of sessions that are over, for tests of claiming and reaping."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pytest_mlhpc.jobs.ledger import Adoption, Ledger, adopt
from pytest_mlhpc.jobs.ledger_entry import LedgerEntry
from pytest_mlhpc.jobs.ledger_files import DEAD_S, open_entries

HOUR_NS = 3600 * 10**9


def later(hours: float = 1) -> int:
    """Return the time so many hours from now, in nanoseconds."""
    return time.time_ns() + int(hours * HOUR_NS)


def entry(name: str, **other: Any) -> LedgerEntry:
    """Return what a ledger says of a Slurm job of this user."""
    values = {"partition": "sys:part", "scheduler": "slurm", "job_name": f"mlhpc-{name}", "uid": os.getuid()}
    return LedgerEntry(id=name, **{**values, **other})


def left_behind(
    state: Path, name: str, *entries: LedgerEntry, until_ns: int | None = None, **owner: Any
) -> Path:
    """Write the ledger of a session that is over: detached if *until_ns* says so, its owner dead, or as *owner* says.

    Return the session's own file.
    """
    ledger = Ledger(state, name)
    ledger.start()
    for one in entries:
        ledger.submitted(one)
    if until_ns is not None:
        ledger.detach(until_ns)
    rewrite_owner(ledger.path, **owner or {"start": 1})
    return ledger.path


def rewrite_owner(path: Path, **owner: Any) -> None:
    """Let the owner of a session's file be another process."""
    first, rest = path.read_text().split("\n", 1)
    opened = json.loads(first)
    opened["owner"].update(owner)
    path.write_text(json.dumps(opened) + "\n" + rest)


def claim(
    state: Path, name: str = "me", wanted: Callable[[LedgerEntry], bool] = lambda _entry: True
) -> Adoption:
    """Let a new session claim what is wanted of the ledgers in *state*."""
    return adopt(Ledger(state, name), wanted)


def file_of(state: Path, name: str) -> Path:
    """Return the file of the allocation *name*, whichever session holds it."""
    (path,) = (state / "ledger").glob(f"{name}@*.jsonl")
    return path


def grow_old(state: Path) -> None:
    """Let all files of the ledger be untouched for so long that a session without an owner, or of another host, is dead."""
    for path in (state / "ledger").glob("*.jsonl"):
        os.utime(path, (time.time() - DEAD_S - 5,) * 2)


def ids(entries: Iterable[LedgerEntry]) -> list[str]:
    return sorted(one.id for one in entries)


def states(state: Path, me: str = "") -> dict[str, str]:
    """Return what is open, and the state of each."""
    return {one.submitted.id: one.state for one in open_entries(state, me).entries}
