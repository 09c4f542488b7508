"""Following batches through a folder on a shared file system: what is new since the last look, without asking Slurm."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_mlhpc.results.foreign import read_json

#: Most bytes that one look takes from one file; the rest comes with the next look.
LOOK_BYTES = 4 * 1024 * 1024

#: How long a results file must look damaged until that is believed, in seconds. Network file systems show old sizes for
#: moments, and are away for a minute or two when their server restarts.
CUT_S, AWAY_S = 10.0, 120.0


@dataclass(frozen=True)
class Up:
    """The batch runs: the scheduler's id of its job, its nodes, since when (ns UTC by the file system's clock).

    ``ahead_s`` is how far the first node's own clock is ahead of that, in seconds; what it takes to write a file included.
    """

    job_id: str
    nodes: tuple[str, ...]
    started_ns: int
    ahead_s: float = 0.0


@dataclass(frozen=True)
class News:
    """What one look found. ``exit`` is the batch's exit code once it is over.

    ``damage`` is what is wrong with a file, to be believed if it stays so for ``believe_s`` seconds.
    """

    up: Up | None = None
    data: bytes = b""
    exit: int | None = None
    more: bool = False  #: there is more to read at once
    damage: str = ""
    believe_s: float = AWAY_S


class Follower:
    """One allocation's files in its folder of lines: ``ID.up``, ``ID.jsonl``, ``ID.over`` (see ``batch/outlet.py``)."""

    def __init__(self, folder: Path, allocation_id: str) -> None:
        self._up = folder / f"{allocation_id}.up"
        self._lines = folder / f"{allocation_id}.jsonl"
        self._over = folder / f"{allocation_id}.over"
        self._offset = 0
        self._seen_up = False
        self.beat_ns = 0  #: mtime of the lines by the file system's clock; it moves while the batch lives

    def look(self, *, over_there: bool = True) -> News:
        """Return what is new. Opening a file asks a network file system for its present state (close-to-open).

        ``over_there``: whether to try to open ``ID.over``; a listing of the folder may have said that there is none.
        """
        # Before the lines: what was written before it is surely there then.
        over = self._read_json(self._over) if over_there else None
        up = None
        if not self._seen_up and (found := self._read_json(self._up)) is not None:
            up = _up(*found)
            self._seen_up = up is not None
        data, more, damage, believe_s = self._read_lines()
        if over is not None and not more and not damage:
            code = over[0].get("exit")
            return News(up, data, code if isinstance(code, int) else 1, more, damage, believe_s)
        return News(up, data, None, more, damage, believe_s)

    def _read_lines(self) -> tuple[bytes, bool, str, float]:
        try:
            fd = os.open(self._lines, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            lost = self._offset > 0
            return b"", False, f"the results file {self._lines} has vanished" if lost else "", AWAY_S
        except OSError as error:
            return b"", False, f"the results file {self._lines} cannot be read: {error.strerror}", AWAY_S
        try:
            found = os.fstat(fd)
            self.beat_ns = found.st_mtime_ns
            if found.st_size < self._offset:
                return b"", False, f"the results file {self._lines} was cut to {found.st_size} bytes", CUT_S
            data = os.pread(fd, LOOK_BYTES, self._offset)
        except OSError as error:
            return b"", False, f"the results file {self._lines} cannot be read: {error.strerror}", AWAY_S
        finally:
            os.close(fd)
        self._offset += len(data)
        return data, self._offset < found.st_size, "", AWAY_S

    @staticmethod
    def _read_json(path: Path) -> tuple[Mapping[str, Any], int] | None:
        """Return a file's content and the time of its last change (ns UTC, the file system's clock)."""
        try:
            with path.open("rb") as file:
                changed_ns = os.fstat(file.fileno()).st_mtime_ns
                found = read_json(file.read(1 << 20))
        except (OSError, ValueError, RecursionError):
            return None  # not there yet: they are renamed into place whole
        return (found, changed_ns) if isinstance(found, dict) else None


def present(folder: Path) -> dict[str, set[str]]:
    """Return id -> suffixes (up, jsonl, over) of what batches have written; one request whatever their number."""
    found: dict[str, set[str]] = {}
    try:
        names = os.listdir(folder)  # noqa: PTH208 - names alone, every second
    except OSError:
        return found
    for name in names:
        if not name.startswith("."):
            allocation_id, _, suffix = name.rpartition(".")
            found.setdefault(allocation_id, set()).add(suffix)
    return found


def _up(found: Mapping[str, Any], changed_ns: int) -> Up | None:
    nodes, job_id, started = found.get("nodes"), found.get("job_id"), found.get("started_ns")
    if not (isinstance(nodes, list) and all(isinstance(node, str) for node in nodes)):
        return None
    ahead_s = (started - changed_ns) / 1e9 if isinstance(started, int) else 0.0
    return Up(str(job_id or ""), tuple(nodes), changed_ns, ahead_s)
