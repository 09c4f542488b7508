"""The ledger of this session: what it submitted and what has ended, for a later session to adopt or to reap.

One append-only file of JSON lines for each session, ``ledger/<session>.jsonl``; it moves to ``ledger/closed/`` when all its
allocations have ended. Only the session itself writes it, or the session that has claimed it (``resume.py``). Files are
private to their user; the folders are the group's where the state directory is.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pytest_mlhpc.errors import StoreError
from pytest_mlhpc.jobs.ledger_entry import LedgerEntry
from pytest_mlhpc.jobs.ledger_files import BEAT_S, SCHEMA, SESSION_NAME, Owner, shared_now_ns
from pytest_mlhpc.node.files import sync_folder
from pytest_mlhpc.node.protocol.schema import to_json
from pytest_mlhpc.store.files import make_directories


class Ledger:
    """This session's file. Made by the first line, so that a session that submits nothing writes nothing.

    May be used from several threads. What another session took over, as this one seemed dead, is this one's no longer:
    :meth:`beat` says so, and nothing more can be submitted.
    """

    def __init__(self, state_dir: Path, session_id: str) -> None:
        if not re.fullmatch(SESSION_NAME, session_id):
            raise StoreError(f"session id {session_id!r} cannot be the name of a ledger file")
        self.state_dir = state_dir
        self.name = session_id
        self.path = state_dir / "ledger" / f"{session_id}.jsonl"
        self._file: int | None = None
        self._torn = False
        self._durable = False  #: the file's name outlives a power cut
        self._done = False
        self._open: dict[str, bool] = {}  # id -> whether its lines are synced
        self._leased = False  # all that is open has a lease
        self._own: set[str] = set()  # ids that have one of their own
        self._lock = threading.RLock()
        self._beaten = 0.0

    def start(self) -> None:
        """Make the file, if it is not there yet: whoever claims needs one.

        Raises:
            StoreError: it cannot be made.
        """
        self._write([], durable=True)

    def submitted(self, entry: LedgerEntry) -> None:
        """Write *entry* down before it is submitted; synced, unless its scheduler is `local`, whose jobs end with us.

        Raises:
            StoreError: it cannot be written down, or this ledger was taken over; do not submit it.
        """
        if self._file is not None and not self.beat():
            raise StoreError(
                f"the ledger {self.path} was taken over by another session, as this one sent no sign of life for so long"
            )
        sync = entry.scheduler != "local"
        self._write([{"event": "submitted", **to_json(entry)}], durable=sync)
        self._open[entry.id] = sync

    def accepted(self, allocation_id: str, native_id: str) -> None:
        """Note the scheduler's own id of *allocation_id*.

        Raises:
            StoreError: that cannot be written down; the job is still found by its name.
        """
        if allocation_id in self._open:
            line = {"event": "accepted", "id": allocation_id, "native_id": native_id}
            self._write([line], durable=self._open[allocation_id])

    def adopted(
        self, entries: Iterable[LedgerEntry], origin: str, until_ns: Mapping[str, int] | None = None
    ) -> None:
        """Take over *entries* of the session *origin*: from now on they are this session's. One write for all, synced.

        They keep the leases that they came with, *until_ns* by id: where this session dies, somebody else may go on.

        Raises:
            StoreError: they cannot be written down and remain as they were.
        """
        entries, leases = list(entries), until_ns or {}
        lines = [{"event": "adopted", "from": origin, **to_json(entry)} for entry in entries]
        for line in lines:
            if line["id"] in leases:
                line["until_ns"] = leases[line["id"]]
        if lines:
            self._write(lines, durable=True)
            self._open.update({entry.id: True for entry in entries})
            self._own |= leases.keys() & self._open.keys()

    def concluded(self, run_ids: Iterable[str]) -> None:
        """Note that the records of *run_ids* are stored: whoever takes their allocations over needs them no more.

        Raises:
            StoreError: that cannot be written down; the records are found by their ids.
        """
        runs = list(run_ids)
        if runs and self._file is not None:
            self._write([{"event": "concluded", "runs": runs}], durable=False)

    def ended(self, allocation_id: str) -> None:
        """Note that nothing is left of *allocation_id*.

        Raises:
            StoreError: that cannot be written down; it still counts as ended.
        """
        with self._lock:
            durable = self._open.pop(allocation_id, None)
        if durable is not None:
            self._write([{"event": "ended", "id": allocation_id}], durable=durable)

    def beat(self) -> bool:
        """Tell other hosts that this session lives, at most every third of ``BEAT_S``; cheap, call it as often as you like.

        Returns False once another session has taken the file over: what is in it is not this session's any more.
        """
        with self._lock:
            if self._file is None or time.monotonic() - self._beaten < BEAT_S / 3:
                return not self._done
            self._beaten = time.monotonic()
            try:
                os.utime(self.path)  # without times: the file server's clock
            except FileNotFoundError:
                self._done = True
            except OSError:
                pass  # a full or read-only disk; the next beat may succeed, and a quarter of an hour is long
            return not self._done

    def until(self, lease_s: float) -> int:
        """Return the moment *lease_s* seconds from now (ns UTC) by the file server's clock, with which leases are compared."""
        try:
            now_ns = shared_now_ns(self.path.parent)
        except OSError:  # no folder, or nothing can be written there: no lease either
            now_ns = time.time_ns()
        return now_ns + int(lease_s * 1e9)

    def lease(self, until_ns: int) -> None:
        """Let all that is not `local` stand until *until_ns* (UTC) from the moment on at which this session ends or dies.

        The last call counts, also for what is submitted later. Synced. Until the end it remains this session's alone.

        Raises:
            StoreError: that cannot be written down.
        """
        if self._file is not None:
            self._write([{"event": "lease", "until_ns": until_ns}], durable=True)
            self._leased = True
            self._own.clear()

    def release(self, allocation_ids: Iterable[str], until_ns: int) -> None:
        """As :meth:`lease`, for *allocation_ids* alone: what was taken over and is to be given back. 0: to be ended.

        Raises:
            StoreError: that cannot be written down.
        """
        ids = [one for one in allocation_ids if one in self._open]
        if ids:
            self._write([{"event": "lease", "ids": ids, "until_ns": until_ns}], durable=True)
            self._own.update(ids)

    def detach(self, until_ns: int) -> None:
        """Leave what is open to whoever resumes it before *until_ns* (UTC); afterwards it is reaped. The last call.

        Raises:
            StoreError: that cannot be written down: what is open will be reaped by the next session.
        """
        with self._lock:
            try:
                if self._open:
                    self.lease(until_ns)
            finally:
                self.close()

    def close(self) -> None:
        """Put the file aside if all that was submitted has ended; what is open and has a lease is left to others. Idempotent.

        Raises:
            StoreError: it cannot be put aside; the next session will do so.
        """
        with self._lock:
            if self._file is None:
                return
            try:
                if not self._done and (self._leased or self._own & self._open.keys()):
                    self._write([{"event": "left"}], durable=True)
            finally:
                os.close(self._file)
                self._file = None
                self._done = True
            # A half-done claim is found by this session's file, so that stays.
            if not self._open and not claims_of(self.path):
                put_aside(self.path, self.state_dir)

    def _write(self, lines: list[dict[str, Any]], *, durable: bool) -> None:
        with self._lock:
            if self._done:
                raise StoreError(f"cannot write the ledger {self.path}: it was closed or taken over")
            try:
                if self._file is None:
                    self._file = self._make()
                if durable and not self._durable:
                    sync_folder(self.path.parent)
                    self._durable = True
                content = b"".join(_encode(line) for line in lines)
                # What a full disk has cut off must not spoil the next line.
                torn, self._torn = self._torn, True
                write_all(self._file, b"\n" + content if torn else content)
                self._torn = False
                if durable:
                    os.fsync(self._file)
            except OSError as error:
                raise StoreError(f"cannot write the ledger {self.path}: {error.strerror}") from error

    def _make(self) -> int:
        """Make the file with its first line; without that line it would never be cleared up, so it goes again."""
        make_directories(self.path.parent, self.state_dir)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open(self.path, flags, 0o600)
        try:
            line = _encode({"event": "opened", "session": self.name, "owner": vars(Owner.me())})
            # A file that is there already is our own that a full disk has cut short and would not let go.
            write_all(file, b"\n" + line if os.fstat(file).st_size else line)
        except OSError:
            os.close(file)
            with contextlib.suppress(OSError):  # the error above is the one to tell
                self.path.unlink()
            raise
        return file


def _encode(line: dict[str, Any]) -> bytes:
    return (json.dumps({"schema": SCHEMA, **line}) + "\n").encode()


def claims_of(path: Path) -> list[Path]:
    """Return what the session of the ledger *path* has claimed and not yet taken apart."""
    return list((path.parent / "claimed").glob(f"*@{path.stem}.jsonl"))


def write_all(file: int, content: bytes) -> None:
    """Append *content* by one write.

    Raises:
        OSError: it could not be, or only in part.
    """
    if os.write(file, content) < len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # what a short write to a file means


def put_aside(path: Path, state_dir: Path) -> None:
    """Move a file of which nothing is left to ``ledger/closed``.

    Raises:
        StoreError: it cannot be moved.
    """
    closed = state_dir / "ledger" / "closed"
    try:
        make_directories(closed, state_dir)
        path.replace(closed / f"{path.stem.partition('@')[0]}.jsonl")
    except OSError as error:
        # Another session may have put it aside at the same moment.
        if path.exists():
            raise StoreError(f"cannot move the ledger {path} to {closed}: {error.strerror}") from error
