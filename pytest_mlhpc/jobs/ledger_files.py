"""Ledger files as they are read: open allocations, owners, leases, and which session has claimed which file.

An owner on this host is alive while its process is. An owner on another host is alive while its ledger file is touched,
at least every ``BEAT_S``. Both times are the file server's, so that no two clocks are compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import stat
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_mlhpc.errors import StoreError
from pytest_mlhpc.jobs.ledger_entry import LedgerEntry
from pytest_mlhpc.node.files import read_json, refuse_others
from pytest_mlhpc.node.protocol.schema import SchemaError, from_json
from pytest_mlhpc.store.text import minutes

#: How often to list folders that do not stand still.
_MAX_LISTINGS = 10


@dataclass(frozen=True)
class OpenEntry:
    """One open allocation. ``state`` is ``held`` (a live session watches it), ``detached`` or ``expired``."""

    submitted: LedgerEntry
    lease: Lease
    state: str
    here: bool  #: its owner ran on this host: processes of a `local` one would be here

    @property
    def claimable(self) -> bool:
        """Whether somebody else may take it over; what runs on another machine's own processes cannot be."""
        return self.state != "held" and (self.here or self.submitted.scheduler != "local")

    @property
    def reapable(self) -> bool:
        """Whether it is to be ended unless somebody takes it over."""
        return self.claimable and self.state == "expired"

    @property
    def why(self) -> str:
        """Why it has expired."""
        owner = self.lease.owner
        if self.lease.until_ns == 0:
            return f"its session on {owner.host} was done with it, and not sure that it is gone"
        if self.lease.until_ns is not None:
            return f"its lease ended {minutes(self.lease.until_ns)}"
        return f"its session on {owner.host} (process {owner.pid}) ended without detaching"


class LedgerSnapshot:
    """All ledger files of this user as they were at one moment, and who claimed which."""

    def __init__(self, state_dir: Path) -> None:
        self.left_alone: list[str] = []
        self.moved = False  #: a file went elsewhere while this looked: what is in it may not be seen here
        self._files: list[LedgerFile] = []
        self._clock = False
        self.now_ns = time.time_ns()
        folder = state_dir / "ledger"
        try:
            paths = _list_all(folder)
        except OSError as error:
            raise StoreError(f"the ledgers in {error.filename} cannot be listed: {error.strerror}") from error
        if paths:
            self._ask_clock(folder)
        for path in paths:
            self._read(path)
        self.left_alone += [
            _orphan_text(file) for file in self._files if file.claimer and _is_orphan(file, folder)
        ]

    def _ask_clock(self, folder: Path) -> None:
        try:
            self.now_ns, self._clock = shared_now_ns(folder), True
        except OSError as error:  # a full or read-only disk: nothing can be claimed anyway
            self.left_alone.append(f"{folder}: {error.strerror}: sessions of other hosts count as alive")

    def _read(self, path: Path) -> None:
        try:
            info = path.lstat()
            if info.st_uid != os.getuid():
                self.left_alone.append(f"{path}: another user's, left alone")
                return
            if not info.st_size:
                return  # its session makes it at this moment
            file = read_ledger(path)
        except FileNotFoundError:
            self.moved = True  # put aside or claimed
            return
        except StoreError as error:
            if path.exists():
                self.left_alone.append(str(error))
            else:
                self.moved = True
            return
        if file.owner.uid != os.getuid():
            self.left_alone.append(f"{path}: written by user {file.owner.uid}, left alone")
            return
        self.left_alone += file.damage
        self._files.append(file)

    def find(self, name: str) -> LedgerFile | None:
        """Return the file of the session *name* that nobody has claimed."""
        return next((file for file in self._files if file.name == name and not file.claimer), None)

    def roots(self) -> list[LedgerFile]:
        """Return the files that are raced for."""
        return [file for file in self._files if not file.claimer]

    def below(self, root: LedgerFile) -> Iterator[LedgerFile]:
        """Yield what the session of *root* has claimed, and what those had, leaves first."""
        for file in self._files:
            if file.claimer == root.name:
                yield from self.below(file)
                yield file

    def alive(self, file: LedgerFile) -> bool:
        """Whether somebody watches what is in *file*: its owner, or whoever has claimed it."""
        root = self._root(file)
        silent_s = (self.now_ns - root.mtime_ns) / 1e9 if self._clock else 0.0
        return not root.left and root.owner.alive(silent_s)

    def entries(self, root: LedgerFile) -> Iterator[OpenEntry]:
        """Yield all that is open in the tree of *root*."""
        for file in (*self.below(root), root):
            yield from self.entries_of(file)

    def entries_of(self, file: LedgerFile, *, claimed: bool = False) -> Iterator[OpenEntry]:
        """Yield what is open in *file* and unknown to those who claimed it; *claimed* by whoever asks."""
        alive = not claimed and self.alive(file)
        known = frozenset().union(*(one.known for one in self._above(file)))
        for entry in file.open.values():
            if entry.id not in known:
                lease = (
                    Lease(self._root(file).owner, alive=True)
                    if alive
                    else Lease(file.owner, alive=False, until_ns=file.lease_of(entry.id))
                )
                yield OpenEntry(entry, lease, lease.state(self.now_ns), file.owner.local())

    def _root(self, file: LedgerFile) -> LedgerFile:
        return [file, *self._above(file)][-1]

    def _above(self, file: LedgerFile) -> Iterator[LedgerFile]:
        while file.claimer:
            parent = next((one for one in self._files if one.name == file.claimer), None)
            if parent is None:
                return
            yield parent
            file = parent


def sessions_in_ledgers(state_dir: Path) -> frozenset[str]:
    """Return the sessions whose ledger is not closed, and those whose folders an open allocation uses.

    Raises:
        StoreError: the ledgers cannot be listed, or one of ours cannot be read.
    """
    folder, found = state_dir / "ledger", set[str]()
    try:
        paths = _list_all(folder)
    except OSError as error:
        raise StoreError(f"the ledgers in {folder} cannot be listed: {error.strerror}") from error
    for path in paths:
        found.update(path.stem.split("@"))
        try:
            if path.lstat().st_uid != os.geteuid() or not path.lstat().st_size:
                continue  # folders of other users are theirs
            file = read_ledger(path)
        except FileNotFoundError:  # put aside or claimed
            continue
        except StoreError:
            if path.exists():
                raise
            continue
        found.add(file.session)
        for entry in file.open.values():
            found |= {entry.session, Path(entry.directory).parent.name}
    return frozenset(found - {""})


def _is_orphan(file: LedgerFile, folder: Path) -> bool:
    """Whether the claimer has no file any more. A file only ever goes from ``ledger`` to ``claimed``, so look there last."""
    if (folder / f"{file.claimer}.jsonl").exists() or any(
        (folder / "claimed").glob(f"{file.claimer}@*.jsonl")
    ):
        return False
    return file.path.exists()


def _orphan_text(file: LedgerFile) -> str:
    back = file.path.parent.parent / f"{file.name}.jsonl"
    return (
        f"{file.path}: session {file.claimer} has claimed it and has no ledger any more: files were moved by hand; if "
        f"that session has ended, move it to {back}"
    )


def _list_all(folder: Path) -> list[Path]:
    """Return all files. One that is given back in between is in neither folder when that is listed: so look again."""
    for _ in range(_MAX_LISTINGS):
        files, claimed = _list_folder(folder), _list_folder(folder / "claimed")
        if _list_folder(folder) == files:
            break
    return [*files, *claimed]


def _list_folder(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == ".jsonl")
    except FileNotFoundError:
        return []


#: Version of the lines. 1 had ids only, 2 no leases of single entries; files of all are read.
SCHEMA = 3
#: A session's name in the name of its file; ``@`` parts it from its claimer's.
SESSION_NAME = r"[A-Za-z0-9._+-]{1,100}"
#: A longer file is none of ours: an entry has about 1 kB, a session some thousands.
MAX_BYTES = 64 << 20
_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass(frozen=True)
class LedgerFile:
    """One file as it was read. ``known`` are the ids of all that was ever in it, ``open`` of what has not ended.

    Leases count once nobody watches any more: the owner is dead, or has ``left`` what is open.
    """

    path: Path
    session: str
    owner: Owner
    until_ns: int | None  #: end of the lease of all that has none of its own
    own_until_ns: Mapping[str, int]  #: id -> end of its own lease
    left: bool
    open: dict[str, LedgerEntry]
    known: frozenset[str]
    mtime_ns: int
    torn: bool  #: its last line has no end: a new one must begin with a line break
    damage: tuple[str, ...] = ()  #: lines that were skipped

    def lease_of(self, allocation_id: str) -> int | None:
        """Return the end of the lease of *allocation_id* (ns UTC), None where it has none.

        Processes of `local` runs have none: nobody can go on with them once their session is gone.
        """
        if self.open[allocation_id].scheduler == "local":
            return None
        return self.own_until_ns.get(allocation_id, self.until_ns)

    @property
    def name(self) -> str:
        """The session's name in the name of the file."""
        return self.path.stem.partition("@")[0]

    @property
    def claimer(self) -> str:
        """Who claimed it, empty for nobody."""
        return self.path.stem.partition("@")[2]


def read_ledger(path: Path) -> LedgerFile:
    """Return what is in *path*. A damaged line (its writer died, the disk was full) is skipped, and named in ``damage``.

    Raises:
        StoreError: it cannot be read, is no ledger, another user's, or of a newer schema; names the path.
    """
    content, info = _read_content(path)
    reader = _LineReader(path)
    for number, raw in enumerate(content.split(b"\n"), start=1):
        if raw.strip(b"\0 "):
            reader.take(number, raw)
    if reader.owner is None:
        raise StoreError(f"{path}: a ledger without owner: its first line is missing (left as it is)")
    return LedgerFile(
        path=path,
        session=reader.session,
        owner=reader.owner,
        until_ns=reader.until_ns,
        own_until_ns=reader.own_until_ns,
        left=reader.left,
        open=reader.entries(),
        known=frozenset(reader.known),
        mtime_ns=info.st_mtime_ns,
        torn=bool(content) and not content.endswith(b"\n"),
        damage=tuple(reader.damage),
    )


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


class _LineReader:
    """Takes line after line and keeps what holds after all of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.session = path.stem.partition("@")[0]
        self.owner: Owner | None = None
        self.until_ns: int | None = None
        self.own_until_ns: dict[str, int] = {}
        self.left = False
        self.open: dict[str, LedgerEntry] = {}
        self.known: set[str] = set()
        self.damage: list[str] = []
        self._entry_of: dict[str, str] = {}  # run id -> allocation id
        self._concluded: dict[str, set[str]] = {}  # allocation id -> run ids

    def entries(self) -> dict[str, LedgerEntry]:
        """Return what is open, with what was concluded of it."""
        for one, runs in self._concluded.items():
            if one in self.open:
                runs.update(self.open[one].concluded)
                self.open[one] = dataclasses.replace(self.open[one], concluded=tuple(sorted(runs)))
        return self.open

    def take(self, number: int, raw: bytes) -> None:
        where = f"{self.path}:{number}"
        try:
            line = read_json(raw)
            schema = line.pop("schema")
            if isinstance(schema, int) and schema > SCHEMA:
                raise StoreError(
                    f"{where}: schema {schema} is newer than {SCHEMA}, the newest this version reads (left as it is)"
                )
            self._event(line.pop("event"), line)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, SchemaError) as error:
            self.damage.append(f"{where}: damaged line skipped: {error!r}")

    def _event(self, event: str, line: dict[str, Any]) -> None:
        if event == "opened" and self.owner is None:
            self.owner = from_json(Owner, line["owner"])
            self.session = str(line.get("session") or self.session)
        elif event in {"submitted", "adopted"}:
            self._begin(line)
        elif event == "accepted":
            entry = self.open[line["id"]]
            self.open[entry.id] = dataclasses.replace(entry, native_id=str(line["native_id"]))
        elif event in {"ended", "moved"}:
            for one in line["ids"] if event == "moved" else [line["id"]]:
                self.open.pop(one, None)
        elif event == "concluded":
            self._conclude(line["runs"])
        elif event == "lease":
            self._lease(int(line["until_ns"]), line.get("ids"))
        elif event == "left":
            self.left = True

    def _begin(self, line: dict[str, Any]) -> None:
        line.pop("from", None)
        until_ns = line.pop("until_ns", None)
        entry = from_json(LedgerEntry, line)
        self.open[entry.id] = dataclasses.replace(entry, session=entry.session or self.session)
        self.known.add(entry.id)
        self._entry_of.update({run.run_id: entry.id for run in entry.runs})
        if until_ns is not None:
            self.own_until_ns[entry.id] = int(until_ns)

    def _conclude(self, runs: list[str]) -> None:
        for run in runs:
            if run in self._entry_of:
                self._concluded.setdefault(self._entry_of[run], set()).add(run)

    def _lease(self, until_ns: int, ids: list[str] | None) -> None:
        if ids is None:  # of all; what comes later counts
            self.until_ns = until_ns
            self.own_until_ns.clear()
        else:
            self.own_until_ns.update(dict.fromkeys(ids, until_ns))


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
    pid_space: str = (
        ""  #: containers may share host name and kernel, and still not see each other's processes
    )

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
    """How the jobs of one ledger file are held. ``until_ns`` (UTC) is None where the owner did not detach."""

    owner: Owner
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
