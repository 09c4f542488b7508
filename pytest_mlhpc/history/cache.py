"""Changes that were computed before, kept for the next pass: never the truth, lost at no cost but time.

A SQLite file beside the store's index. An entry says of which figures it is, so that what is stale is never used; whatever
is wrong with the file (locked, read-only, damaged, killed in the middle of a write), the pass computes everything anew.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sqlite3
import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple
from pathlib import Path

from pytest_mlhpc.judge import changes as detection
from pytest_mlhpc.judge.changes import Change
from pytest_mlhpc.judge.fence import Detector
from pytest_mlhpc.node.files import read_json
from pytest_mlhpc.store.files import index_path
from pytest_mlhpc.store.record import SeriesKey

#: Part of what an entry is of: another detector never reads ours.
VERSION = 1
#: What nobody has asked for so long is taken away, in seconds.
KEPT_S = 60 * 86_400
#: Another process may write as long as this, in seconds; then we go on without.
WAIT_S = 2.0

_TABLE = "CREATE TABLE IF NOT EXISTS changes (series TEXT PRIMARY KEY, figures BLOB, found TEXT, used INTEGER) WITHOUT ROWID"


def cache_path(state_dir: Path) -> Path:
    """Return this user's cache of a state directory: on a local disk, as its index."""
    return index_path(state_dir).with_name(f"changes-v{VERSION}-{os.getuid()}.sqlite")


class Cache:
    """What *detector* found in series, by key and figures. No method raises: what fails is as if it were empty."""

    def __init__(self, path: Path, detector: Detector) -> None:
        self._path = path
        self._detector = f"{_code()} {astuple(detector)}"
        self._database: sqlite3.Connection | None = None
        if not self._open():
            self._open()

    def _open(self) -> bool:
        """Return False where a damaged file was in the way, which is gone now."""
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._database = sqlite3.connect(self._path, timeout=WAIT_S, isolation_level=None)
            self._database.execute("PRAGMA synchronous = OFF")  # what is lost is computed again
            self._database.execute(_TABLE)
        except (
            sqlite3.OperationalError
        ):  # it cannot be written here, or somebody else is writing: go on without
            self.close()
        except sqlite3.DatabaseError:
            self._forget()
            return False
        return True

    def get(
        self, keys: Sequence[SeriesKey], values: Sequence[Sequence[float]]
    ) -> list[tuple[Change, ...] | None]:
        """Return the changes of each series, None where they are not known."""
        return [self._one(key, figures) for key, figures in zip(keys, values, strict=True)]

    def put(self, found: Iterable[tuple[SeriesKey, Sequence[float], tuple[Change, ...]]]) -> None:
        """Keep the changes of series with these figures."""
        now = int(time.time())
        rows = [
            (self._name(key), _digest(figures), json.dumps([asdict(change) for change in changes]), now)
            for key, figures, changes in found
        ]
        if self._database is None or not rows:
            return
        try:
            self._database.execute("BEGIN IMMEDIATE")
            self._database.executemany("INSERT OR REPLACE INTO changes VALUES (?, ?, ?, ?)", rows)
            self._database.execute("DELETE FROM changes WHERE used < ?", (now - KEPT_S,))
            self._database.execute("COMMIT")
        except (sqlite3.Error, ValueError):
            self.close()

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._database is not None:
            with contextlib.suppress(sqlite3.Error):
                self._database.close()
            self._database = None

    def _one(self, key: SeriesKey, figures: Sequence[float]) -> tuple[Change, ...] | None:
        if self._database is None:
            return None
        query = "SELECT figures, found FROM changes WHERE series = ?"
        try:
            row = self._database.execute(query, (self._name(key),)).fetchone()
            if row is None or row[0] != _digest(figures):
                return None
            return tuple(Change(**change) for change in read_json(row[1]))
        except sqlite3.DatabaseError:
            self._forget()
        except (ValueError, TypeError):  # damaged: it is written anew
            pass
        return None

    def _name(self, key: SeriesKey) -> str:
        return hashlib.sha256(json.dumps([VERSION, self._detector, *astuple(key)]).encode()).hexdigest()

    def _forget(self) -> None:
        """Remove a damaged file, its journal too: that would be played back into the next one."""
        self.close()
        for path in (self._path, self._path.with_name(f"{self._path.name}-journal")):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


@functools.cache
def _code() -> str:
    """Return a digest of the detector's code: what an earlier release has found is not what this one would."""
    folder = Path(detection.__file__).parent
    found = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


def _digest(figures: Sequence[float]) -> bytes:
    return hashlib.sha256(struct.pack(f"<{len(figures)}d", *figures)).digest()
