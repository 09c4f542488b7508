"""The state directory and its files: where they lie, how a line is appended durably, how a file is replaced whole, and how records are read."""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import json
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from pytest_mlhpc.errors import StoreError
from pytest_mlhpc.node.disks import MOUNTS, NETWORK, file_system
from pytest_mlhpc.node.foreign import read_json
from pytest_mlhpc.node.protocol.schema import SCHEMA, SchemaError, from_json, to_json
from pytest_mlhpc.store.record import Record

#: A longer line is damage: no run reports that much (4,096 samples of each of a few dozen metrics are below 4 MB).
MAX_LINE = 64 << 20

_SESSION = re.compile(r"[A-Za-z0-9._-]{1,100}\Z")


class Store:
    """Records under ``state_dir/records/YYYY-MM/<session>.jsonl``; this process writes its own file only.

    Where the state directory is writable for its group, so is what is made in it: two users can share one.
    """

    def __init__(self, state_dir: Path, session_id: str) -> None:
        if not _SESSION.match(session_id) or session_id.startswith("."):
            raise StoreError(f"session id {session_id!r} cannot be a file name")
        self._state_dir = state_dir
        self._session_id = session_id
        self._descriptor: int | None = None
        self.path: Path | None = None  #: this session's file, once something was stored

    def append(self, record: Record) -> None:
        """Store *record* durably (one write, fsync).

        Raises:
            StoreError: disk full, over quota, not writable; names the path. Nothing torn is left behind.
        """
        try:
            line = json.dumps(to_json(record), allow_nan=False, separators=(",", ":")).encode() + b"\n"
        except (TypeError, ValueError) as error:
            raise StoreError(f"record {record.id} cannot be stored as JSON: {error}") from error
        descriptor = self._open(record)
        size = os.fstat(descriptor).st_size
        try:
            written = os.write(descriptor, line)
            if written < len(line):  # the disk is full, or a limit was reached: the next write says which
                os.write(descriptor, line[written:])
                written = os.fstat(descriptor).st_size - size
            if written != len(line):
                raise StoreError(f"{self.path}: only {written} of {len(line)} bytes could be written")
            os.fsync(descriptor)
        except OSError as error:
            self._take_back(descriptor, size)
            raise StoreError(f"{self.path}: record {record.id} cannot be stored: {error.strerror}") from error

    def _take_back(self, descriptor: int, size: int) -> None:
        """Remove a half-written line; where even that fails, readers skip it as torn."""
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, size)

    def _open(self, record: Record) -> int:
        if self._descriptor is not None:
            return self._descriptor
        month = dt.datetime.fromtimestamp(record.created_ns / 1e9, tz=dt.UTC).strftime("%Y-%m")
        path = self._state_dir / "records" / month / f"{self._session_id}.jsonl"
        try:
            make_directories(path.parent, self._state_dir)
            descriptor = os.open(
                path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o664
            )
            if is_shared(self._state_dir):
                with contextlib.suppress(OSError):  # another user's file is as they made it
                    path.chmod(0o664)
            _end_torn_line(descriptor)
        except OSError as error:
            raise StoreError(f"{path}: cannot be opened for writing: {error.strerror}") from error
        self.path, self._descriptor = path, descriptor
        return descriptor

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def is_shared(directory: Path) -> bool:
    """Return whether *directory* is writable for its group."""
    return bool(directory.stat().st_mode & stat.S_IWGRP)


def make_directories(directory: Path, root: Path) -> None:
    """Make *directory* below *root*; group-writable, with the group handed down, where *root* is group-writable.

    Raises:
        OSError: it cannot be made.
    """
    root.mkdir(parents=True, exist_ok=True)
    made = [path for path in (directory, *directory.parents) if path != root and path.is_relative_to(root)]
    for path in reversed(made):
        if path.is_dir():
            continue
        path.mkdir(exist_ok=True)
        if is_shared(root):
            path.chmod(0o2775)


def _end_torn_line(descriptor: int) -> None:
    """Give a line that an earlier process with this session id left unfinished its end, so that ours stays whole."""
    size = os.fstat(descriptor).st_size
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        os.write(descriptor, b"\n")


def record_files(state_dir: Path) -> list[Path]:
    """Return all record files, oldest month first.

    Raises:
        StoreError: the directory cannot be listed.
    """
    folder = state_dir / "records"
    try:
        return sorted(path for path in folder.glob("*/*.jsonl") if path.is_file())
    except OSError as error:
        raise StoreError(f"{folder}: cannot be listed: {error.strerror}") from error


def parse_record(line: bytes) -> Record:
    """Return the record in *line*.

    Raises:
        SchemaError: it is damaged, or of another schema.
    """
    try:
        data = read_json(line)
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"damaged line: {error}") from error
    found = data.get("schema") if isinstance(data, dict) else None
    if isinstance(found, int) and found < SCHEMA:
        raise SchemaError(f"schema {found} is older than {SCHEMA}, the oldest this version reads")
    return from_json(Record, data)


def read_lines(
    path: Path, on_problem: Callable[[str], None] | None = None, start: int = 0
) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line) of the whole lines of *path* from byte *start* on; a torn last one is told and left out.

    Raises:
        StoreError: the file cannot be read.
    """
    offset = start
    try:
        with path.open("rb") as file:
            file.seek(start)
            while line := file.readline(MAX_LINE):
                if line.endswith(b"\n"):
                    if line.strip():
                        yield offset, line
                elif on_problem is not None:
                    on_problem(
                        f"{path}: byte {offset}: unfinished last line of {len(line)} bytes (left as it is)"
                    )
                offset += len(line)
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error


def read_records(state_dir: Path, on_problem: Callable[[str], None] | None = None) -> Iterator[Record]:
    """Yield all records of all sessions, files in order of name, streaming.

    A torn last line (its writer died or is still writing), a damaged line, a newer schema and an unreadable file are
    skipped and told to *on_problem* as ``path: byte N: what``.
    """
    tell = on_problem or (lambda _text: None)
    for path in record_files(state_dir):
        try:
            for offset, line in read_lines(path, on_problem):
                try:
                    record = parse_record(line)
                except SchemaError as error:
                    tell(f"{path}: byte {offset}: {error} (skipped, left as it is)")
                    continue
                yield record
        except StoreError as error:
            tell(str(error))


#: Part of the file's name: versions of this program with other tables never meet.
VERSION = 3


def index_path(state_dir: Path, mounts: Path = MOUNTS) -> Path:
    """Return this user's index file: in the state directory when that is on a local disk, else in the cache directory.

    Each user has one of their own, so that two users of one state directory need not write each other's files.
    """
    if file_system(state_dir, mounts) not in NETWORK:
        return state_dir / f"index-v{VERSION}-{os.getuid()}.sqlite"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.sha256(str(state_dir.resolve()).encode()).hexdigest()[:16]
    return cache / "mlhpc" / f"index-v{VERSION}-{name}.sqlite"


#: A temporary file that is this old (s) was left by a writer that was killed: no writing of ours takes minutes, and an
#: hour is more than clocks of a file server and its clients differ.
LEFT_AFTER_S = 3600.0
_SUFFIX = ".part"


def replace_file(path: Path, text: str) -> None:
    """Replace *path* by *text* in one step: readers see the old file or the new one, whatever dies.

    What a writer of the same file that was killed has left beside it is removed.

    Raises:
        StoreError: disk full, over quota, not writable; names the path. The old file is left as it was.
    """
    target = path.resolve()  # a link stays a link
    temporary = ""
    try:
        if path.exists() and not path.is_file():  # a device or a pipe stays one
            path.write_text(text, encoding="utf-8")
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_left(target)
        mode = target.stat().st_mode & 0o777 if target.exists() else 0o664 & ~_umask()
        descriptor, temporary = tempfile.mkstemp(_SUFFIX, f".{target.name}.", target.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fchmod(descriptor, mode)
            os.fsync(descriptor)
        Path(temporary).replace(target)
    except OSError as error:
        if temporary:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
        raise StoreError(f"{path}: cannot be written: {error.strerror}") from error


def _remove_left(target: Path) -> None:
    before = time.time() - LEFT_AFTER_S
    with contextlib.suppress(OSError), os.scandir(target.parent) as entries:
        for entry in entries:
            ours = entry.name.startswith(f".{target.name}.") and entry.name.endswith(_SUFFIX)
            if ours and entry.stat(follow_symlinks=False).st_mtime < before:
                with contextlib.suppress(
                    OSError
                ):  # another writer removes it as well, or it is somebody else's
                    Path(entry.path).unlink()


def _umask() -> int:
    """Return this process's umask without changing it (proc(5), status; 022 where that is not to be had)."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o022


def default_state_dir(environ: Mapping[str, str]) -> Path:
    """Return ``$MLHPC_STATE``, else ``$XDG_STATE_HOME/mlhpc``, else ``~/.local/state/mlhpc``.

    Raises:
        UsageError: none of them is set, and this user has no home.
    """
    try:
        if given := environ.get("MLHPC_STATE"):
            return Path(given).expanduser().absolute()
        if base := environ.get("XDG_STATE_HOME"):
            return Path(base).expanduser().absolute() / "mlhpc"
        return Path.home() / ".local" / "state" / "mlhpc"
    except RuntimeError as error:  # pathlib's for a home that nobody knows
        from pytest_mlhpc.errors import UsageError

        raise UsageError(
            f"there is no folder for the state: HOME is not set, and user {os.geteuid()} has no home known here; name a "
            "folder by MLHPC_STATE"
        ) from error


def unusable(folder: Path) -> str:
    """Return why nothing can be written below *folder*, which may have to be made; empty if it can. Nothing is made."""
    for path in (folder, *folder.parents):
        try:
            is_folder = stat.S_ISDIR(path.stat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            return f"{path}: {error.strerror}"
        if not is_folder:
            return f"{path} is no folder"
        if os.statvfs(path).f_flag & os.ST_RDONLY:
            return f"{path} is on a read-only file system"
        if not os.access(path, os.W_OK | os.X_OK, effective_ids=True):
            return f"{path} may not be written by user {os.geteuid()}"
        return ""
    return ""
