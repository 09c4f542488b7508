"""Ledgers of sessions that are over, for tests of claiming and reaping."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pytest_mlhpc.jobs.ledger import Ledger
from pytest_mlhpc.jobs.submitted import Submitted


def left_behind(
    state: Path, name: str, *entries: Submitted, until_ns: int | None = None, **owner: Any
) -> Path:
    """Write the ledger of a session that is over: detached if *until_ns* says so, its owner dead, or as *owner* says."""
    ledger = Ledger(state, name)
    ledger.start()
    for one in entries:
        ledger.submitted(one)
    if until_ns is not None:
        ledger.detach(until_ns)
    elif ledger._file is not None:
        os.close(ledger._file)
    rewrite_owner(ledger.path, **owner or {"start": 1})
    return ledger.path


def rewrite_owner(path: Path, **owner: Any) -> None:
    """Let a ledger's owner be another process."""
    first, rest = path.read_text().split("\n", 1)
    opened = json.loads(first)
    opened["owner"].update(owner)
    path.write_text(json.dumps(opened) + "\n" + rest)
