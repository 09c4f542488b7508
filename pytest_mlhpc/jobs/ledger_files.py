"""Ledger files as they are read: which allocations are open, which session holds each, and until when its lease lasts.

A session has one file, ``ledger/SESSION.jsonl``: its owner, its lease, and, as the file's time, its heartbeat. An allocation
has one file, ``ledger/ID@SESSION.jsonl``. The session behind the ``@`` holds it and alone appends to it. A session on this
host lives while its process does. A session on another host lives while its file is touched, at least every ``BEAT_S``; both
times are the file server's, so that no two clocks are compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pytest_mlhpc.errors import StoreError
from pytest_mlhpc.jobs.ledger_entry import LedgerEntry
from pytest_mlhpc.node.files import read_json, refuse_others
from pytest_mlhpc.node.protocol.schema import SchemaError, from_json
from pytest_mlhpc.store.text import minutes

#: Version of the lines. Up to 3 all allocations of a session were lines of one file; such files are named and left alone.
SCHEMA = 4
#: The id of a session or an allocation in the name of a file; ``@`` parts the two.
FILE_ID = r"[A-Za-z0-9._+-]{1,100}"
#: A longer file is none of ours: an entry has about 1 kB, and some hundred bytes for each run.
MAX_BYTES = 64 << 20
#: How often to list a folder that changes meanwhile.
_MAX_LISTINGS = 10
_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass(frozen=True)
class OpenEntry:
    """One open allocation. ``state`` is ``held`` (a live session watches it), ``detached`` or ``expired``."""

    submitted: LedgerEntry
    lease: Lease
    state: str
    here: bool  #: its owner ran on this host: processes of a `local` one would be here
    path: Path

    @property
    def claimable(self) -> bool:
        """Whether another session may claim it; what runs on another machine's own processes cannot be."""
        return self.state != "held" and (self.here or self.submitted.scheduler != "local")

    @property
    def reapable(self) -> bool:
        """Whether it is to be ended unless a session adopts it."""
        return self.claimable and self.state == "expired"

    @property
    def why(self) -> str:
        """Why it has expired."""
        owner = self.lease.owner
        if self.lease.until_ns:
            return f"its lease ended {minutes(self.lease.until_ns)}"
        if owner is None:
            return "the file of its session is lost"
        if self.lease.until_ns == 0:
            return f"its session on {owner.host} was done with it, and not sure that it is gone"
        return f"its session on {owner.host} (process {owner.pid}) ended without detaching"


@dataclass(frozen=True)
class OpenAllocations:
    """What is open. ``left_alone`` are files and lines that were (another user's, another version's, damaged), and why."""

    entries: tuple[OpenEntry, ...]
    left_alone: tuple[str, ...]


def open_entries(state_dir: Path, me: str = "") -> OpenAllocations:
    """Return all open allocations of this user, oldest first, but those that the session *me* holds. Changes nothing.

    Raises:
        StoreError: the folder of ledgers cannot be listed.
    """
    files = LedgerSnapshot(state_dir)
    entries = [entry for entry in files.entries() if holder_of(entry.path) != me]
    entries.sort(key=lambda entry: entry.submitted.submitted_ns)
    return OpenAllocations(tuple(entries), tuple(files.left_alone))


def sessions_in_ledgers(state_dir: Path) -> frozenset[str]:
    """Return the sessions whose ledger is not closed, and those whose folders an open allocation uses.

    Raises:
        StoreError: the ledgers cannot be listed, or one of ours cannot be read.
    """
    found = set[str]()
    for _ in range(_MAX_LISTINGS):
        files = LedgerSnapshot(state_dir, strict=True)
        found.update(holder_of(path) for path in (*files.sessions, *files.allocations))
        for entry in files.entries():
            found |= {entry.submitted.session, Path(entry.submitted.directory).parent.name}
        if not files.moved:
            break
    return frozenset(found - {""})


def holder_of(path: Path) -> str:
    """Return the session whose file *path* is, or that holds the allocation."""
    return path.stem.rpartition("@")[2]


_File = TypeVar("_File", "SessionFile", "AllocationFile")


class LedgerSnapshot:
    """All ledger files of this user at one moment. Sessions are read before allocations: what a dead one wrote is final.

    With *strict* a file of this user that cannot be read raises StoreError; else it is named in ``left_alone``.
    """

    def __init__(self, state_dir: Path, *, strict: bool = False) -> None:
        self.left_alone: list[str] = []
        self.moved = False  #: a file was claimed or removed meanwhile: what is in it may be missing here
        self.unsubmitted: list[Path] = []  #: of dead sessions; found by :meth:`entries`
        self._strict = strict
        self._clock = False
        self.now_ns = time.time_ns()
        folder = state_dir / "ledger"
        try:
            paths, self.moved = _list_all(folder)
            old = _list_folder(folder / "claimed")
        except OSError as error:
            raise StoreError(f"the ledgers in {error.filename} cannot be listed: {error.strerror}") from error
        self.sessions = [path for path in paths if "@" not in path.stem]
        self.allocations = [path for path in paths if "@" in path.stem]
        if paths:
            self._ask_clock(folder)
        self._alive: dict[str, bool] = {}  # by name; without those whose file is lost
        #: By name; None: another user's, or not to be read.
        self._sessions = {path.stem: self._read(path, read_session) for path in (*old, *self.sessions)}

    def _ask_clock(self, folder: Path) -> None:
        try:
            self.now_ns, self._clock = shared_now_ns(folder), True
        except OSError as error:  # a full or read-only disk: nothing can be claimed anyway
            self._name(f"{folder}: {error.strerror}: sessions of other hosts count as alive")

    def _name(self, note: str) -> None:
        if note not in self.left_alone:
            self.left_alone.append(note)

    def _read(self, path: Path, read: Callable[[Path], _File]) -> _File | None:
        """Return the file *path*, None where it is gone, another user's, or cannot be read."""
        try:
            if path.lstat().st_uid == os.getuid():
                file = read(path)
                for note in file.damage:
                    self._name(note)
                return file
            if "@" not in path.stem:  # its allocations need not be named too
                self._name(f"{path}: another user's, left alone")
        except FileNotFoundError:
            self.moved = True
        except StoreError as error:
            if not os.path.lexists(path):
                self.moved = True
            elif self._strict:
                raise
            else:
                self._name(str(error))
        return None

    def alive(self, path: Path) -> bool:
        """Whether the session of the file *path* lives, or cannot be known to be dead.

        Where the session's file is lost (a power cut, removed by hand), the time of *path* itself is its last sign of life.
        """
        name = holder_of(path)
        if name not in self._alive:
            session = self._sessions.get(name)
            if session is not None and session.owner is not None:
                silent_s = self._silent_s(session.mtime_ns)
                self._alive[name] = not session.left and session.owner.alive(silent_s)
            elif session is None and name in self._sessions:
                self._alive[name] = True
        if name in self._alive:
            return self._alive[name]
        try:
            return self._silent_s(path.lstat().st_mtime_ns) < DEAD_S
        except OSError:  # claimed or ended meanwhile
            return True

    def _silent_s(self, mtime_ns: int) -> float:
        return (self.now_ns - mtime_ns) / 1e9 if self._clock else 0.0

    def entries(self, *, held: bool = True) -> Iterator[OpenEntry]:
        """Yield the open allocations; without *held* those of dead sessions alone, and no other file is read."""
        for path in self.allocations:
            alive = self.alive(path)
            if alive and not held:
                continue
            file = self._read(path, read_allocation)
            if file is None:
                continue
            if file.entry is None:
                self.unsubmitted += [] if alive else [path]
                continue
            writer, holder = self._sessions.get(file.writer), self._sessions.get(holder_of(path))
            known = writer or holder
            owner = known.owner if known else None
            until_ns = None if alive else file.lease(writer.until_ns if writer else None)
            lease = Lease(owner, alive, until_ns)
            here = owner is None or owner.local()
            yield OpenEntry(file.entry, lease, lease.state(self.now_ns), here, path)

    def ended_sessions(self) -> list[Path]:
        """Return the files of dead sessions that no allocation needs any more: as its holder, or for its lease."""
        holders = {holder_of(path) for path in self.allocations}
        ended = [path for path in self.sessions if path.stem not in holders and not self.alive(path)]
        if ended:  # a claim without its line yet has the lease of the session before
            files = [self._read(path, read_allocation) for path in self.allocations]
            writers = {file.writer for file in files if file is not None}
            ended = [path for path in ended if path.stem not in writers]
        return [] if self.moved else ended


def _list_all(folder: Path) -> tuple[list[Path], bool]:
    """Return all files, and whether the folder changed all the time: a file that is renamed meanwhile may be missed."""
    files = _list_folder(folder)
    for _ in range(_MAX_LISTINGS):
        before, files = files, _list_folder(folder)
        if before == files:
            return files, False
    return files, True


def _list_folder(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == ".jsonl")
    except FileNotFoundError:
        return []


@dataclass
class SessionFile:
    """The file of a session as it was read. Its lease counts once it is dead, or has ``left`` what is open."""

    path: Path
    owner: Owner | None = None  #: None: its first line was never finished
    until_ns: int | None = None  #: end of the lease of all that has none of its own
    left: bool = False
    mtime_ns: int = 0
    damage: tuple[str, ...] = ()  #: lines that were skipped

    def take(self, event: str, line: dict[str, Any]) -> None:
        """Apply one line."""
        if event == "opened" and self.owner is None:
            self.owner = from_json(Owner, line["owner"])
        elif event == "lease":
            self.until_ns = max(0, int(line["until_ns"]))
        elif event == "left":
            self.left = True


@dataclass
class AllocationFile:
    """The file of an allocation as it was read. ``writer`` made the last claim that is written down, or submitted it."""

    path: Path
    entry: LedgerEntry | None = None  #: None: its first line was never finished, so nothing was submitted
    writer: str = ""
    released_ns: int | None = None  #: end of its own lease, which its holder gave it
    adopted_ns: int | None = None  #: end of the lease that it had when it was claimed
    damage: tuple[str, ...] = ()  #: lines that were skipped

    def lease(self, session_ns: int | None) -> int | None:
        """Return the end of the lease (ns UTC), None where it has none; *session_ns* is that of the writer for all.

        Processes of `local` runs have none: no session can go on with them once theirs is gone.
        """
        if self.entry is None or self.entry.scheduler == "local":
            return None
        return next((one for one in (self.released_ns, session_ns, self.adopted_ns) if one is not None), None)

    def take(self, event: str, line: dict[str, Any]) -> None:
        """Apply one line."""
        if event == "submitted":
            self.writer = str(line.pop("by"))
            entry = from_json(LedgerEntry, line)
            if entry.id != self.path.stem.rpartition("@")[0]:
                raise ValueError(f"it is of the allocation {entry.id}")
            self.entry = dataclasses.replace(entry, session=entry.session or self.writer)
        elif self.entry is None:
            raise ValueError("nothing was submitted before")
        elif event == "accepted":
            self.entry = dataclasses.replace(self.entry, native_id=str(line["native_id"]))
        elif event == "concluded":
            runs = {*self.entry.concluded, *map(str, line["runs"])}
            self.entry = dataclasses.replace(self.entry, concluded=tuple(sorted(runs)))
        elif event == "lease":
            self.released_ns = max(0, int(line["until_ns"]))
        elif event == "adopted":
            until_ns = line["until_ns"]
            self.adopted_ns = None if until_ns is None else max(0, int(until_ns))
            self.writer, self.released_ns = str(line["by"]), None


def read_session(path: Path) -> SessionFile:
    """Return the file of a session. A damaged line (the disk was full) is skipped, and named in ``damage``.

    Raises:
        StoreError: it cannot be read, is no ledger, another user's, or of another version; names the path.
    """
    file = SessionFile(path)
    content, info = _read_content(path)
    file.damage = _take_lines(path, content, file.take)
    file.mtime_ns = info.st_mtime_ns
    if file.owner is None and b"\n" in content.strip(b"\0"):
        raise StoreError(f"{path}: a ledger without owner: its first line is missing (left as it is)")
    if file.owner is not None and file.owner.uid != os.getuid():
        raise StoreError(f"{path}: written by user {file.owner.uid}, left alone")
    return file


def read_allocation(path: Path) -> AllocationFile:
    """Return the file of an allocation, as :func:`read_session` does; raises as it does."""
    file = AllocationFile(path)
    content, _ = _read_content(path)
    file.damage = _take_lines(path, content, file.take)
    if file.entry is None and b"\n" in content.strip(b"\0"):
        raise StoreError(f"{path}: no allocation: its first line is missing (left as it is)")
    return file


def _read_content(path: Path) -> tuple[bytes, os.stat_result]:
    try:
        file = os.open(path, _OPEN)
        try:
            info = os.fstat(file)
            if not stat.S_ISREG(info.st_mode) or info.st_size > MAX_BYTES:
                raise StoreError(f"{path}: no ledger: no regular file of at most {MAX_BYTES >> 20} MiB")
            refuse_others(path, info)
            with open(file, "rb", closefd=False) as stream:
                return stream.read(MAX_BYTES), info
        finally:
            os.close(file)
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error


def _take_lines(path: Path, content: bytes, take: Callable[[str, dict[str, Any]], None]) -> tuple[str, ...]:
    """Give each line to *take*; return what is said of those that were skipped."""
    damage = []
    for number, raw in enumerate(content.split(b"\n"), start=1):
        where = f"{path}:{number}"
        if not raw.strip(b"\0 "):
            continue
        try:
            line = read_json(raw)
            schema = line.pop("schema")
            if isinstance(schema, int) and schema != SCHEMA:
                which = "a newer" if schema > SCHEMA else "an older"
                raise StoreError(
                    f"{where}: written by {which} version (schema {schema}; this version reads {SCHEMA} alone), left as it is"
                )
            take(line.pop("event"), line)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, SchemaError) as error:
            damage.append(f"{where}: damaged line skipped: {error!r}")
    return tuple(damage)


#: Longest time between two touches of a ledger file by its owner, in seconds.
BEAT_S = 60.0
#: An owner on another host that did not touch its file for so long is dead, in seconds. Caches of a network disk show a
#: touch up to a minute late (nfs(5): acregmax = 60), a suspended file server for minutes.
DEAD_S = 900.0


@dataclass(frozen=True)
class Owner:
    """Who holds a lease. Process ids are used again: start time and boot id tell one process from the next."""

    uid: int
    host: str
    boot: str
    pid: int
    start: int  #: clock ticks since boot, field 22 of /proc/PID/stat (proc(5))
    #: containers may share host name and kernel, and still not see each other's processes
    pid_space: str = ""

    @classmethod
    def me(cls) -> Owner:
        """Return this process."""
        pid = os.getpid()
        return cls(
            os.getuid(), socket.gethostname(), boot_id(), pid, process_start(pid) or 0, pid_namespace()
        )

    def local(self) -> bool:
        """Whether this process can see the owner's."""
        if self.host != socket.gethostname():
            return False
        return self.boot != boot_id() or self.pid_space in {"", pid_namespace()}

    def alive(self, silent_s: float = 0.0) -> bool:
        """Whether the owner still runs; *silent_s* seconds ago its file was touched, by the file server's clock."""
        if not self.local():
            return silent_s < DEAD_S
        return self.boot == boot_id() and process_start(self.pid) == self.start


@dataclass(frozen=True)
class Lease:
    """How an allocation is held. ``until_ns`` (UTC) is None where it has no lease, ``owner`` where its session's file is lost."""

    owner: Owner | None
    alive: bool
    until_ns: int | None = None

    def state(self, now_ns: int) -> str:
        """Return ``held`` (somebody watches), ``detached`` (nobody has to, yet) or ``expired``."""
        if self.until_ns is not None:
            return "detached" if now_ns < self.until_ns else "expired"
        return "held" if self.alive else "expired"


def shared_now_ns(folder: Path) -> int:
    """Return the time of the server of *folder*, in ns UTC: that of a file touched there a moment ago.

    Raises:
        OSError: nothing can be written there.
    """
    path = folder / f".clock-{uuid.uuid4().hex}"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.utime(path)  # without times: the server's own clock, also over NFS (RFC 8881, SET_TO_SERVER_TIME4)
        return path.stat().st_mtime_ns
    finally:
        os.close(file)
        with contextlib.suppress(OSError):
            path.unlink()


def boot_id() -> str:
    """Return the kernel's id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def pid_namespace() -> str:
    """Return the id of the process-id namespace of this process, empty where the kernel does not tell."""
    try:
        return os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - no file: the text is what is wanted
    except OSError:
        return ""


def process_start(pid: int) -> int | None:
    """Return the start time of a process in ticks since boot, None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command name may hold blanks and brackets; what follows its last bracket is well-formed.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])  # a zombie watches nothing
