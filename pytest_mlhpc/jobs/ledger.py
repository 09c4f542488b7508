"""The ledger: what this session submitted and what of it has ended, so that the next session can clear up after it.

One append-only file of JSON lines for each session, ``ledger/<session>.jsonl``; it moves to ``ledger/closed/`` when
nothing of the session is left. Files are their user's alone; the folders are the group's where the state directory is.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_mlhpc.errors import StoreError
from pytest_mlhpc.results.store import make_directories

SCHEMA = 1


@dataclass(frozen=True)
class Owner:
    """Who holds a lease. Process ids are used again: start time and boot id tell one process from the next."""

    uid: int
    host: str
    boot: str
    pid: int
    start: int  #: clock ticks since boot, field 22 of /proc/PID/stat (proc(5))

    @classmethod
    def me(cls) -> Owner:
        """Return this process."""
        pid = os.getpid()
        return cls(os.getuid(), socket.gethostname(), boot_id(), pid, start_of(pid) or 0)

    def alive(self) -> bool:
        """Whether the owner still runs, as far as this host can know: other hosts' owners count as alive."""
        if self.host != socket.gethostname():
            return True
        return self.boot == boot_id() and start_of(self.pid) == self.start


class Ledger:
    """This session's file. Made by the first line, so that a session that submits nothing writes nothing."""

    def __init__(self, state_dir: Path, session_id: str) -> None:
        self._state_dir = state_dir
        self._path = state_dir / "ledger" / f"{session_id}.jsonl"
        self._session = session_id
        self._file: int | None = None
        self._open_ids: set[str] = set()

    def submitted(self, allocation_id: str, partition: str, *, durable: bool) -> None:
        """Write down *allocation_id* before it is submitted; *durable* where it can outlive this machine's uptime.

        Raises:
            StoreError: it cannot be written down; do not submit it.
        """
        self._write({"event": "submitted", "id": allocation_id, "partition": partition}, durable=durable)
        self._open_ids.add(allocation_id)

    def ended(self, allocation_id: str) -> None:
        """Note that nothing is left of *allocation_id*.

        Raises:
            StoreError: that cannot be written down; it still counts as ended.
        """
        if allocation_id in self._open_ids:
            self._open_ids.discard(allocation_id)
            self._write({"event": "ended", "id": allocation_id})

    def close(self) -> None:
        """Put the file aside if all that was submitted has ended. Idempotent.

        Raises:
            StoreError: it cannot be put aside; the next session will do so.
        """
        if self._file is None:
            return
        os.close(self._file)
        self._file = None
        if not self._open_ids:
            _put_aside(self._path, self._state_dir)

    def _write(self, line: dict[str, Any], *, durable: bool = False) -> None:
        try:
            if self._file is None:
                self._file = self._open()
            _append(self._file, line)
            if durable:
                os.fsync(self._file)
        except OSError as error:
            raise StoreError(f"cannot write the ledger {self._path}: {error.strerror}") from error

    def _open(self) -> int:
        """Make the file with its first line; without that line it would never be cleared up, so it goes again."""
        make_directories(self._path.parent, self._state_dir)
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _append(file, {"event": "opened", "session": self._session, "owner": vars(Owner.me())})
        except OSError:
            os.close(file)
            with contextlib.suppress(OSError):  # the error above is the one to tell
                self._path.unlink()
            raise
        return file


def reap_expired(
    state_dir: Path, reap: Callable[[str], object], on_problem: Callable[[str], object]
) -> list[str]:
    """Clear up after sessions of this user whose owner is gone, by *reap*; return their ids.

    Files that cannot be read or understood are left alone: they may be a newer version's. One that cannot be put aside
    is told to *on_problem* and met again by the next session.
    """
    reaped = []
    for path in sorted((state_dir / "ledger").glob("*.jsonl")):
        owner = _owner(path)
        if owner is not None and owner.uid == os.getuid() and not owner.alive():
            reap(path.stem)
            reaped.append(path.stem)
            try:
                _put_aside(path, state_dir)
            except StoreError as error:
                on_problem(str(error))
    return reaped


def boot_id() -> str:
    """Return the kernel's id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_of(pid: int) -> int | None:
    """Return the start time of a process in ticks since boot, None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command name may hold blanks and brackets; what follows its last bracket is well-formed.
    return int(stat.rpartition(")")[2].split()[19])


def _owner(path: Path) -> Owner | None:
    for line in _lines(path):
        if line.get("event") == "opened" and line.get("schema") == SCHEMA:
            try:
                return Owner(**line["owner"])
            except (KeyError, TypeError):
                return None
    return None


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            for raw in file:
                line = json.loads(raw)
                if isinstance(line, dict):
                    yield line
    except (OSError, ValueError):
        return


def _append(file: int, line: dict[str, Any]) -> None:
    content = (json.dumps({"schema": SCHEMA, **line}) + "\n").encode()
    if os.write(file, content) < len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # what a short write to a file means


def _put_aside(path: Path, state_dir: Path) -> None:
    closed = path.parent / "closed"
    try:
        make_directories(closed, state_dir)
        path.replace(closed / path.name)
    except OSError as error:
        # Another session may have put it aside at the same moment.
        if path.exists():
            raise StoreError(f"cannot move the ledger {path} to {closed}: {error.strerror}") from error
