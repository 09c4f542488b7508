"""The ledger: what this session submitted and what has ended, how it claims what sessions before it left, and how expired allocations are ended.

The forms of the files are in ``ledger_files.py``. A claim is the rename of an allocation's file to this session's name, which
only one of several sessions can do, then an ``adopted`` line. There are no locks. Files are private to their user; the folder
is the group's where the state directory is.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pytest_mlhpc.errors import MlhpcError, StoreError
from pytest_mlhpc.jobs.ledger_entry import LedgerEntry, describe
from pytest_mlhpc.jobs.ledger_files import (
    BEAT_S,
    FILE_ID,
    SCHEMA,
    LedgerSnapshot,
    OpenEntry,
    Owner,
    shared_now_ns,
)
from pytest_mlhpc.node.files import append_lines, sync_folder
from pytest_mlhpc.node.protocol.schema import to_json
from pytest_mlhpc.store.locations import make_directories

_APPEND = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class Ledger:
    """This session's files. Made by the first allocation, so that a session that submits nothing writes nothing.

    May be used from several threads. Where another session claimed an allocation, as this session seemed dead, :meth:`beat`
    says so, and nothing more can be submitted.
    """

    def __init__(self, state_dir: Path, session_id: str) -> None:
        self.state_dir = state_dir
        self.name = _checked(session_id)
        self.folder = state_dir / "ledger"
        self.path = self.folder / f"{session_id}.jsonl"
        self._started = False
        self._lost = False  #: another session claimed an allocation of this one
        self._closed = False
        self._open: dict[str, bool] = {}  # id -> whether its lines are synced
        self._runs: dict[str, str] = {}  # run id -> allocation id
        self._lock = threading.RLock()
        self._beaten = 0.0

    def start(self, *, durable: bool = True) -> None:
        """Make the session's file, if it is not there yet: whoever claims needs one.

        Raises:
            StoreError: it cannot be made.
        """
        with self._lock:
            if not self._started:
                opened = {"event": "opened", "owner": vars(Owner.me())}
                self._append(self.path, opened, durable=durable, make=True)
                self._started = True

    def submitted(self, entry: LedgerEntry) -> None:
        """Write *entry* down before it is submitted; synced, unless its scheduler is `local`, whose jobs end with us.

        Raises:
            StoreError: it cannot be written down, or this session was taken for dead; do not submit it.
        """
        with self._lock:
            if not self.beat():
                raise StoreError(
                    f"allocations of the ledger {self.path} were taken over by another session, as this one sent no sign of "
                    "life for so long"
                )
            durable = entry.scheduler != "local"
            self.start(durable=durable)
            path = self._path(_checked(entry.id))
            line = {"event": "submitted", "by": self.name, **to_json(entry)}
            self._append(path, line, durable=durable, make=True)
            self._add(entry, durable=durable)

    def _add(self, entry: LedgerEntry, *, durable: bool = True) -> None:
        self._open[entry.id] = durable
        self._runs.update({run.run_id: entry.id for run in entry.runs})

    def accepted(self, allocation_id: str, native_id: str) -> None:
        """Note the scheduler's own id of *allocation_id*.

        Raises:
            StoreError: that cannot be written down; the job is still found by its name.
        """
        self._note([allocation_id], {"event": "accepted", "native_id": native_id})

    def adopt(self, entry: OpenEntry) -> bool:
        """Claim an open allocation with the lease that it has; return whether no other session was faster.

        Raises:
            StoreError: the claim cannot be written down: the next session makes it anew.
            OSError: the file cannot be renamed and is left as it is.
        """
        path = self._path(entry.submitted.id)
        try:
            entry.path.rename(path)
        except FileNotFoundError:
            if not path.exists():  # a file server may have renamed it, and its answer was lost
                return False
        self._append(path, {"event": "adopted", "by": self.name, "until_ns": entry.lease.until_ns})
        self._add(entry.submitted)
        return True

    def concluded(self, run_ids: Iterable[str]) -> None:
        """Note that the records of *run_ids* are stored: whoever claims their allocations needs them no more.

        Raises:
            StoreError: that cannot be written down; the records are found by their ids.
        """
        by_allocation: dict[str, list[str]] = {}
        for run in run_ids:
            if run in self._runs:
                by_allocation.setdefault(self._runs[run], []).append(run)
        for one, runs in by_allocation.items():
            self._note([one], {"event": "concluded", "runs": runs}, durable=False)

    def ended(self, allocation_id: str) -> None:
        """Remove the file of *allocation_id*: nothing is left of it.

        Raises:
            StoreError: it cannot be removed; the allocation still counts as ended.
        """
        with self._lock:
            if self._open.pop(allocation_id, None) is None or self._closed:
                return
            path = self._path(allocation_id)
            try:
                path.unlink()
            except OSError as error:
                raise StoreError(f"cannot remove {path} from the ledger: {error.strerror}") from error

    def beat(self) -> bool:
        """Show other hosts that this session lives, at most every third of ``BEAT_S``; cheap, call it as often as you like.

        Returns False once another session has claimed an allocation of this one: it was taken for dead.
        """
        with self._lock:
            if not self._started or self._lost or time.monotonic() - self._beaten < BEAT_S / 3:
                return not self._lost
            self._beaten = time.monotonic()
            try:
                os.utime(self.path)  # without times: the file server's clock
                for one, durable in self._open.items():
                    if durable:  # no other session may claim what is `local`
                        self._path(one).lstat()
            except FileNotFoundError:
                self._lost = True
            except OSError:
                pass  # a full or read-only disk; the next beat may succeed, and a quarter of an hour is long
            return not self._lost

    def until(self, lease_s: float) -> int:
        """Return the moment *lease_s* seconds from now (ns UTC) by the file server's clock, with which leases are compared."""
        try:
            now_ns = shared_now_ns(self.folder)
        except OSError:  # no folder, or nothing can be written there: no lease either
            now_ns = time.time_ns()
        return now_ns + int(lease_s * 1e9)

    def lease(self, until_ns: int) -> None:
        """Let all that is not `local` stand until *until_ns* (UTC) from the moment on at which this session ends or dies.

        The last call counts, also for what is submitted later. Synced. Until the end it remains this session's alone.

        Raises:
            StoreError: that cannot be written down.
        """
        if self._started:
            self._append(self.path, {"event": "lease", "until_ns": until_ns})

    def release(self, allocation_ids: Iterable[str], until_ns: int) -> None:
        """As :meth:`lease`, for *allocation_ids* alone, whatever is said for all. 0: to be ended.

        Raises:
            StoreError: that cannot be written down.
        """
        self._note(allocation_ids, {"event": "lease", "until_ns": until_ns})

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
        """Remove the session's file if no allocation is open; what is open is left to other sessions. Idempotent.

        Raises:
            StoreError: that cannot be done; the next session will do so.
        """
        with self._lock:
            if not self._started or self._closed:
                return
            try:
                if any(self.folder.glob(f"*@{self.name}.jsonl")):
                    self._append(self.path, {"event": "left"})
                else:
                    self.path.unlink(missing_ok=True)
            except OSError as error:
                raise StoreError(f"cannot remove the ledger {self.path}: {error.strerror}") from error
            finally:
                self._closed = True

    def _path(self, allocation_id: str) -> Path:
        return self.folder / f"{allocation_id}@{self.name}.jsonl"

    def _note(self, allocation_ids: Iterable[str], line: dict[str, Any], *, durable: bool = True) -> None:
        with self._lock:
            for one in allocation_ids:
                if one in self._open:
                    self._append(self._path(one), line, durable=durable and self._open[one])

    def _append(self, path: Path, line: dict[str, Any], *, durable: bool = True, make: bool = False) -> None:
        """Append *line* to a file, or *make* the file with it; without its first line it is removed again."""
        with self._lock:
            if self._closed:
                raise StoreError(f"cannot write the ledger {path}: it was closed")
            try:
                if make:
                    make_directories(self.folder, self.state_dir)
                descriptor = os.open(path, _APPEND | (os.O_CREAT if make else 0), 0o600)
                try:
                    content = json.dumps({"schema": SCHEMA, **line}) + "\n"
                    append_lines(descriptor, content.encode(), durable=durable)
                    if make and durable:
                        sync_folder(self.folder)  # the file's name outlives a power cut too
                except OSError:
                    if make:
                        with contextlib.suppress(OSError):  # the error above is the one to report
                            path.unlink()
                    raise
                finally:
                    os.close(descriptor)
            except FileNotFoundError as error:
                self._lost = True
                raise StoreError(
                    f"cannot write the ledger {path}: another session has taken it over"
                ) from error
            except OSError as error:
                raise StoreError(f"cannot write the ledger {path}: {error.strerror}") from error


def _checked(name: str) -> str:
    if not re.fullmatch(FILE_ID, name):
        raise StoreError(f"id {name!r} cannot be the name of a ledger file")
    return name


@dataclass
class Adoption:
    """What a claim brought. ``adopted`` was wanted; ``expired`` is to be reaped; both are the claimer's now.

    The claimer notes the end of each in its ledger; what it cannot end the next session meets again. ``left`` stands in
    the ledger as before, its lease is good. ``notes`` say what could not be claimed; ``left_alone`` as in a survey: in a
    state directory that users share that is nothing to worry about.
    """

    adopted: list[LedgerEntry] = field(default_factory=list)
    expired: list[LedgerEntry] = field(default_factory=list)
    left: list[LedgerEntry] = field(default_factory=list)
    why: dict[str, str] = field(default_factory=dict)  #: id -> why it had expired
    notes: list[str] = field(default_factory=list)
    left_alone: list[str] = field(default_factory=list)


def adopt(
    ledger: Ledger,
    wanted: Callable[[LedgerEntry], bool],
    reachable: Callable[[LedgerEntry], bool] = lambda _entry: True,
) -> Adoption:
    """Claim for *ledger* what *wanted* says of all that is detached or whose session died, and all that is expired.

    What is not *reachable* from here stays, expired or not. Files of which nothing is wanted or expired are not touched.
    Files of dead sessions that hold nothing are removed.

    Raises:
        StoreError: the folder cannot be listed, or a claim cannot be written down; nothing is lost.
    """
    files, claims = LedgerSnapshot(ledger.state_dir), []
    result = Adoption(left_alone=files.left_alone)
    for entry in files.entries(held=False):
        wants = wanted(entry.submitted) and reachable(entry.submitted)
        if entry.claimable and (wants or (entry.reapable and reachable(entry.submitted))):
            claims.append((entry, wants))
        else:
            result.left.append(entry.submitted)
    if claims:
        ledger.start()
    for entry, wants in sorted(claims, key=lambda claim: claim[0].submitted.submitted_ns):
        _claim(ledger, entry, result, wants=wants)
    _remove(files.unsubmitted, result)
    if claims or files.unsubmitted:
        files = LedgerSnapshot(ledger.state_dir)
    _remove([path for path in files.ended_sessions() if path != ledger.path], result)
    return result


def _claim(ledger: Ledger, entry: OpenEntry, result: Adoption, *, wants: bool) -> None:
    try:
        if not ledger.adopt(entry):
            return
    except OSError as error:
        result.notes.append(f"{entry.path}: cannot be claimed: {error.strerror} (left as it is)")
        return
    if wants:
        result.adopted.append(entry.submitted)
    else:
        result.expired.append(entry.submitted)
        result.why[entry.submitted.id] = entry.why


def _remove(paths: Sequence[Path], result: Adoption) -> None:
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            result.notes.append(f"cannot remove the ledger {path}: {error.strerror}")


#: Ends one allocation and says what it did; raises MlhpcError or OSError where it could not, or is not sure.
Reaper = Callable[[LedgerEntry], str]
#: Makes the reaper of a scheduler for some allocations at once, so that it can ask and cancel in one call each.
Prepare = Callable[[Sequence[LedgerEntry]], Reaper]


class NotYet(MlhpcError):  # noqa: N818 - what a reaper says, not what went wrong
    """Nothing is wrong with an allocation, but it cannot be ended now or here."""


@dataclass(frozen=True)
class Reaped:
    """What became of one allocation. Where it was not ``ended``, it stays in the ledger for the next session.

    ``later``: nothing is wrong with that; it is ended at another time or place.
    """

    entry: LedgerEntry
    why: str  #: it had expired
    done: str
    ended: bool
    later: bool = False

    def __str__(self) -> str:
        """Return one line: job name, id, partition, why it had expired, what was done."""
        return f"{describe(self.entry)}: {self.why}: {self.done}"


def reap_expired_leases(
    ledger: Ledger,
    reapers: Mapping[str, Prepare],
    wanted: Callable[[LedgerEntry], bool] = lambda _entry: False,
    reachable: Callable[[LedgerEntry], bool] = lambda _entry: True,
) -> tuple[Adoption, list[Reaped]]:
    """Take over for *ledger* what *wanted* says, and end what has expired. *reapers* are by name of scheduler.

    What is not *reachable* (a job of another cluster) is left as it is, whatever *wanted* says.

    Raises:
        StoreError: the ledgers cannot be listed or the own one cannot be written; nothing is lost.
    """
    adoption = adopt(ledger, wanted, reachable)
    return adoption, reap(ledger, adoption.expired, adoption.why, reapers)


def reap(
    ledger: Ledger, expired: Iterable[LedgerEntry], why: Mapping[str, str], reapers: Mapping[str, Prepare]
) -> list[Reaped]:
    """End *expired*, which *ledger* holds, and note there what has ended."""
    by_scheduler: dict[str, list[LedgerEntry]] = defaultdict(list)
    for entry in expired:
        by_scheduler[entry.scheduler].append(entry)
    found = []
    for scheduler, entries in by_scheduler.items():
        reaper = prepared(reapers.get(scheduler), scheduler, entries)
        found += [
            _one(ledger, entry, why.get(entry.id, "its lease has expired"), reaper) for entry in entries
        ]
    return found


def prepared(prepare: Prepare | None, scheduler: str, entries: Sequence[LedgerEntry]) -> Reaper:
    """Return the reaper that *prepare* makes for *entries*; one that says why where it cannot."""
    if prepare is None:
        return _refusing(f"no installed provisioner can end jobs of scheduler {scheduler!r}")
    try:
        return prepare(entries)
    except (MlhpcError, OSError) as error:
        return _refusing(str(error))


def _refusing(text: str) -> Reaper:
    def refuse(_entry: LedgerEntry) -> str:
        raise MlhpcError(text)

    return refuse


def _one(ledger: Ledger, entry: LedgerEntry, why: str, reaper: Reaper) -> Reaped:
    try:
        done = reaper(entry)
    except NotYet as error:
        return Reaped(entry, why, f"not ended, stays in the ledger: {error}", ended=False, later=True)
    except (MlhpcError, OSError) as error:
        return Reaped(entry, why, f"not ended, stays in the ledger: {error}", ended=False)
    done += _without_data(ledger.state_dir, entry)
    try:
        ledger.ended(entry.id)
    except StoreError as error:
        return Reaped(entry, why, f"{done}, but {error}", ended=False)
    return Reaped(entry, why, done, ended=True)


def _without_data(state_dir: Path, entry: LedgerEntry) -> str:
    """Remove the synthetic data set that a run made for itself; plan and logs stay."""
    folder = (
        Path(entry.directory) if entry.directory else state_dir / "runs" / (entry.session or "-") / entry.id
    )
    if not folder.is_absolute() or folder.name != entry.id:
        return ""  # no folder of ours
    try:
        shutil.rmtree(folder / "data")
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"; {error.filename} cannot be removed: {error.strerror}; please do"
    return ""
