"""The store of records: one append-only file of JSON lines per process, without locks, so that any file system will do.

A line is written by one ``write`` to a file that only this process writes, and synced. A process that dies while it writes
leaves at most one torn last line, which readers name and skip. A file of long ago may be replaced whole by one without samples
(``session/retention.py``); its lines then begin elsewhere, and ids stay.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pytest_mlhpc.errors import StoreError
from pytest_mlhpc.node.files import append_lines, read_json
from pytest_mlhpc.node.protocol.plan import PlantedFault
from pytest_mlhpc.node.protocol.schema import SCHEMA, SchemaError, from_json, to_json
from pytest_mlhpc.store.locations import is_shared, make_directories, open_regular
from pytest_mlhpc.store.record import Record
from pytest_mlhpc.store.text import written_out

#: A longer line is damage: no run reports that much (4,096 samples of each of a few dozen metrics are below 4 MB).
MAX_LINE = 64 << 20


_SESSION = re.compile(r"[A-Za-z0-9._-]{1,100}\Z")
_MONTH: Final = re.compile(r"(?:19|20|21)[0-9]{2}-(?:0[1-9]|1[0-2])\Z")


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
            line = json_line(to_json(record))
        except (TypeError, ValueError) as error:
            raise StoreError(f"record {record.id} cannot be stored as JSON: {error}") from error
        descriptor = self._open(record)
        try:
            append_lines(descriptor, line)
        except OSError as error:
            raise StoreError(f"{self.path}: record {record.id} cannot be stored: {error.strerror}") from error

    def _open(self, record: Record) -> int:
        if self._descriptor is not None:
            if self.path is not None and _names(self.path, self._descriptor):
                return self._descriptor
            self.close()  # another file has taken its place, as after `mlhpc records prune`
        name = f"{self._session_id}.jsonl"
        path = self.path or self._state_dir / "records" / month_of(record.created_ns) / name
        try:
            make_directories(path.parent, self._state_dir)
            descriptor = os.open(
                path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o664
            )
            if is_shared(self._state_dir):
                with contextlib.suppress(OSError):  # another user's file is as they made it
                    path.chmod(0o664)
        except OSError as error:
            raise StoreError(f"{path}: cannot be opened for writing: {error.strerror}") from error
        self.path, self._descriptor = path, descriptor
        return descriptor

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _names(path: Path, descriptor: int) -> bool:
    """Return whether *path* is still the name of the open file."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except OSError:
        return False


def month_of(moment_ns: int) -> str:
    """Return the name of the folder below ``records`` for a time: ``2026-11``."""
    return dt.datetime.fromtimestamp(moment_ns / 1e9, tz=dt.UTC).strftime("%Y-%m")


def json_line(data: Any) -> bytes:
    """Return the JSON form of a record as a line of a record file.

    Raises:
        TypeError, ValueError: it holds what JSON does not.
    """
    return json.dumps(data, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def record_names(state_dir: Path) -> list[str]:
    """Return the names of all record files below ``records``, oldest month first: ``2026-11/SESSION.jsonl``.

    Raises:
        StoreError: the directory cannot be listed.
    """
    folder = state_dir / "records"
    found: list[tuple[str, str]] = []
    try:
        with os.scandir(folder) as months:
            for month in months:
                # Another user's folder may be closed to us.
                with (
                    contextlib.suppress(NotADirectoryError, FileNotFoundError, PermissionError),
                    os.scandir(month) as files,
                ):
                    found += [
                        (month.name, file.name)
                        for file in files
                        if file.name.endswith(".jsonl") and file.is_file()
                    ]
    except FileNotFoundError:
        pass
    except OSError as error:
        raise StoreError(f"{error.filename or folder}: cannot be listed: {error.strerror}") from error
    return [f"{month}/{name}" for month, name in sorted(found)]


def record_files(state_dir: Path) -> list[Path]:
    """Return the paths of :func:`record_names`."""
    return [state_dir / "records" / name for name in record_names(state_dir)]


#: Bytes at the end of a file that say until when its records were made: several records without samples, and some with the most.
_TAILS: Final = (1 << 15, 1 << 22)
_TIMES: Final = re.compile(rb'"created_ns":([0-9]{1,19})[,}]')
_SESSIONS: Final = re.compile(rb'"session":"([^"]*)"')
#: Later than any record (the largest integer of 64 bits).
FOREVER_NS: Final = (1 << 63) - 1


def newest_possible(path: Path) -> int:
    """Return a time (ns UTC) after which no record of a file was made, from its folder and its end.

    A session writes its own file, in which time goes on; one of results of another tool holds one month in any order. A file that
    is not of this kind may hold any: :data:`FOREVER_NS`.
    """
    if not _MONTH.match(path.parent.name):
        return FOREVER_NS
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            for tail in _TAILS:
                end = os.pread(file.fileno(), tail, max(0, size - tail))
                if size <= tail or b"\n" in end[:-1]:
                    break  # the last line is whole in it
    except OSError:
        return FOREVER_NS  # whoever reads it says why it cannot
    times = [int(found) for found in _TIMES.findall(end)]
    if not times or {*_SESSIONS.findall(end)} != {path.stem.encode()} or not end.endswith(b"\n"):
        return FOREVER_NS
    year, month = divmod(int(path.parent.name[:4]) * 12 + int(path.parent.name[5:]), 12)
    next_month = dt.datetime(year, month + 1, 1, tzinfo=dt.UTC)
    return min(FOREVER_NS, max(*times, int(next_month.timestamp()) * 10**9))


#: The identity of the test in a record: before it stand ids and a node id, in which quotes are escaped.
_BENCHMARK: Final = re.compile(rb'"benchmark":("(?:[^"\\]|\\.)*")')


def benchmarks_in(path: Path) -> list[str] | None:
    """Return the identities of the tests in a file, by name; None where a line does not plainly name one."""
    found: set[bytes] = set()
    try:
        with open_regular(path) as file:
            for line in file:
                name = _BENCHMARK.search(line)
                if name is None or not line.endswith(b"\n"):
                    return None
                found.add(name[1])
        return sorted(json.loads(name) for name in found)
    except (OSError, ValueError):
        return None


@dataclass(frozen=True)
class Drill:
    """What makes a state directory that of a drill: its id, which its records carry, and the fault planted into its runs."""

    id: str
    fault: PlantedFault | None = None

    def mark(self, fault: PlantedFault | None) -> str:
        """Return what a record says of a run with this fault, or with none."""
        return f"{self.id} {fault or ''}".rstrip()


#: Lies in the state directory of a drill.
DRILL = "drill.json"


def drill_of(state_dir: Path) -> Drill | None:
    """Return whose drill the state directory is; None where it is none, as all but those that `mlhpc alert drill` makes.

    Raises:
        StoreError: the file cannot be read, or is damaged: nothing may be taken for a real night.
    """
    path = state_dir / DRILL
    try:
        with open_regular(path) as file:
            return from_json(Drill, read_json(file.read(MAX_LINE)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"{path}: cannot be read: {error}") from error


def parse_record(line: bytes, drill: Drill | None = None) -> Record:
    """Return the record in *line*, of the state directory of *drill* or of an ordinary one (None).

    Raises:
        SchemaError: it is damaged, of another schema, or a drill's and not of *drill*.
    """
    try:
        data = read_json(line)
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"damaged line: {error}") from error
    return record_of(data, drill)


def record_of(data: Any, drill: Drill | None = None) -> Record:
    """Return the record whose JSON form is *data*, of the state directory of *drill* or of an ordinary one (None).

    Raises:
        SchemaError: it is none, of another schema, or a drill's and not of *drill*.
    """
    found = data.get("schema") if isinstance(data, dict) else None
    if isinstance(found, int) and found < SCHEMA:
        raise SchemaError(f"schema {found} is older than {SCHEMA}, the oldest this version reads")
    record = from_json(Record, data)
    made_by = record.drill.partition(" ")[0]
    if record.drill and (drill is None or made_by != drill.id):
        raise SchemaError(
            f"a record of the drill {made_by}, whose faults were planted: no other history takes it"
        )
    return record


def read_lines(
    path: Path, on_problem: Callable[[str], None] | None = None, start: int = 0
) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line) of the whole lines of *path* from byte *start* on; a torn last one is reported and left out.

    Nothing is read behind a torn line: its writer may be about to end it, and the rest of a line is none.

    Raises:
        StoreError: the file cannot be read.
    """
    offset = start
    try:
        with open_regular(path) as file:
            file.seek(start)
            while line := file.readline(MAX_LINE):
                if line.endswith(b"\n"):
                    if line.strip():
                        yield offset, line
                else:
                    if on_problem is not None:
                        on_problem(
                            f"{path}: byte {offset}: unfinished last line of {len(line)} bytes (left as it is)"
                        )
                    if len(line) < MAX_LINE:
                        return
                offset += len(line)
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error


def record_at(path: Path, start: int, record_id: str, drill: Drill | None) -> Record | None:
    """Return the record of that id that begins at byte *start*; None if none does."""
    try:
        record = next((parse_record(line, drill) for _, line in read_lines(path, start=start)), None)
    except (StoreError, SchemaError):
        return None
    return record if record is not None and written_out(record.id) == record_id else None


def starts_of_records(path: Path, drill: Drill | None) -> dict[str, int]:
    """Return where the line of each record begins, by its id.

    Raises:
        StoreError: the file cannot be read.
    """
    found = {}
    for start, line in read_lines(path):
        with contextlib.suppress(SchemaError):
            found[written_out(parse_record(line, drill).id)] = start
    return found


def read_records(state_dir: Path, on_problem: Callable[[str], None] | None = None) -> Iterator[Record]:
    """Yield all records of all sessions, files in order of name, streaming.

    A torn last line (its writer died or is still writing), a damaged line, a newer schema and an unreadable file are
    skipped and reported to *on_problem* as ``path: byte N: what``.
    """
    tell = on_problem or (lambda _text: None)
    drill = drill_of(state_dir)
    for path in record_files(state_dir):
        try:
            for offset, line in read_lines(path, on_problem):
                try:
                    record = parse_record(line, drill)
                except SchemaError as error:
                    tell(f"{path}: byte {offset}: {error} (skipped, left as it is)")
                    continue
                yield record
        except StoreError as error:
            tell(str(error))
