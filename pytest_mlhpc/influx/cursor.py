"""From where on each file of records and events is sent to InfluxDB. Open it to learn what a push sends next, and why.

::

    STATE/influx/start.json                   from when on is sent, and how long each record file was then
                 cursors/MONTH/SESSION.json   how far the record file MONTH/SESSION.jsonl was sent
                         events/ID.json       the same of an event, which is a file of one line, and of its removal
                         journal/MONTH.json   the same of the journal of alerts and software
                 rejected/DIGEST.jsonl        lines that the server refused, with its reason

A cursor is replaced whole after the server has acknowledged what lies before it. There are no locks, as network file systems
may have none: of several pushes at once the last one wins. A cursor that goes back costs only the sending of equal points.

A file is known by its name and the digest of its first line. Inodes do not do: they change when a backup is restored
or a server fails over, and file systems use them again. The first line holds the id of a record, so no two files share it.
An event that is replaced, as a maintenance whose end was moved, is another file and is sent again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from pytest_mlhpc.errors import StoreError
from pytest_mlhpc.history.events import event_files, journal_files
from pytest_mlhpc.influx.schema import FORM
from pytest_mlhpc.node.files import read_json
from pytest_mlhpc.node.protocol.schema import SCHEMA, from_json, to_json
from pytest_mlhpc.store.locations import LEFT_AFTER_S, is_shared, make_directories, replace_file
from pytest_mlhpc.store.store import read_lines, record_files
from pytest_mlhpc.store.text import count

#: A longer cursor is none of ours: its longest field is a digest of 64 letters.
_MAX_CURSOR = 4096
#: The same of the start, which has a line of some 60 bytes for each file: a million of them fit.
_MAX_START = 64 << 20
#: How far clocks of machines that share a state directory may differ, as store/locations.py assumes.
_CLOCKS_DIFFER_NS = int(LEFT_AFTER_S * 1e9)
#: Folders in which versions before 0.2 had a copy of each record.
_OLD_FOLDERS = ("open", "ready", "sent")

T = TypeVar("T")


@dataclass(frozen=True)
class PushStart:
    """From when on is sent: ``since_ns``, and in record files that were there already, behind the bytes of ``sizes``."""

    made_ns: int  #: also its identity: cursors that belong to another start do not count
    since_ns: int
    sizes: Mapping[str, int] = field(default_factory=dict)
    schema: int = SCHEMA


@dataclass(frozen=True)
class Cursor:
    """How far one file was sent."""

    first_line: str  #: SHA-256 of the file's first line
    offset: int  #: all before this byte was acknowledged; it follows a line end
    mtime_ns: int  #: of the file when it was read: with ``offset`` as its size, nothing is new in it
    start: int  #: ``made_ns`` of the start
    form: int = FORM  #: of the lines that were sent last
    schema: int = SCHEMA


@dataclass(frozen=True)
class PendingFile:
    """A file that may hold something to send."""

    path: Path
    name: str  #: of a record file below ``records/``; else events/ID.json or journal/MONTH.jsonl
    size: int
    mtime_ns: int
    cursor: Cursor | None


#: Folders in the names of files that hold no records.
EVENTS, JOURNAL = "events", "journal"


def is_record_file(name: str) -> bool:
    """Return whether a file of that name holds records."""
    return name.partition("/")[0] not in {EVENTS, JOURNAL}


def influx_folder(state_dir: Path) -> Path:
    """Return the folder of all that belongs to InfluxDB."""
    return state_dir / "influx"


def rejected_folder(state_dir: Path) -> Path:
    """Return the folder of refused lines."""
    return influx_folder(state_dir) / "rejected"


def cursor_path(state_dir: Path, name: str) -> Path:
    """Return the cursor's file for the file *name*."""
    return (influx_folder(state_dir) / "cursors" / name).with_suffix(".json")


def _start_path(state_dir: Path) -> Path:
    return influx_folder(state_dir) / "start.json"


# --- the start


def read_start(state_dir: Path) -> PushStart | None:
    """Return from when on records are sent; None if nobody has asked for it yet.

    Raises:
        StoreError: the file is damaged, or gone while there are cursors. Nobody knows then what is to be sent.
    """
    path = _start_path(state_dir)
    advice = "nothing is sent before `mlhpc records push --since DATE` says from when on"
    try:
        found = _read(path, PushStart, _MAX_START, _owners(state_dir))
    except StoreError as error:
        raise StoreError(f"{error}; {advice}") from None
    if found is None and any((influx_folder(state_dir) / "cursors").glob("*/*.json")):
        raise StoreError(f"{path}: is gone, and cursors are there; {advice}")
    return found


def draft_start(state_dir: Path) -> PushStart:
    """Return a start of this moment, which is not written yet: what is recorded already is not sent unasked.

    Raises:
        StoreError: the record files cannot be listed.
    """
    now = time.time_ns()
    sizes = {}
    for path in record_files(state_dir):
        with contextlib.suppress(OSError):  # removed a moment ago
            sizes[_record_name(path, state_dir)] = path.stat().st_size
    return PushStart(now, now - _CLOCKS_DIFFER_NS, sizes)


def begin(state_dir: Path, tell: Callable[[str], None], draft: PushStart | None = None) -> PushStart:
    """Return the start. Write *draft*, or one of this moment, if there is none.

    Raises:
        StoreError: it is damaged or cannot be written.
    """
    found = read_start(state_dir)
    if found is not None:
        return found
    made = draft or draft_start(state_dir)
    try:
        if not _write_first(state_dir, made):
            return read_start(state_dir) or made
    except StoreError as error:
        raise StoreError(
            f"{error}; what is recorded until it can is sent by `mlhpc records push --since DATE` only"
        ) from None
    if made.sizes:
        tell(
            f"records are sent from now on; what was in {count(len(made.sizes), 'record file')} before is sent by "
            "`mlhpc records push --since DATE` only"
        )
    old = [name for name in _OLD_FOLDERS if (influx_folder(state_dir) / name).is_dir()]
    if old:
        tell(f"nothing reads {', '.join(old)} in {influx_folder(state_dir)} any more; remove them")
    return made


def restart(state_dir: Path, since_ns: int) -> PushStart:
    """Start again: every record since then is sent, whatever was sent before. By one replacement all cursors lose their worth.

    Raises:
        StoreError: it cannot be written; the former start stays.
    """
    made = PushStart(time.time_ns(), since_ns)
    write_file(_start_path(state_dir), _text(made), state_dir)
    return made


def _write_first(state_dir: Path, start: PushStart) -> bool:
    """Write the start unless another process was faster, whose start then holds; return whether it was written.

    Of several processes one makes a link, also on NFS. Where there are no links, two first starts at once replace each other.
    """
    path = _start_path(state_dir)
    own = path.with_name(f".start.{secrets.token_hex(8)}.part")
    write_file(own, _text(start), state_dir)
    try:
        os.link(own, path, follow_symlinks=False)
    except FileExistsError:
        return False
    except OSError:
        write_file(path, _text(start), state_dir)
    finally:
        with contextlib.suppress(OSError):
            own.unlink()
    return True


# --- cursors


def pending(state_dir: Path, start: PushStart, on_problem: Callable[[str], None]) -> Iterator[PendingFile]:
    """Yield the files that have changed since their cursors were written, records first, oldest month first. No other is opened.

    Raises:
        StoreError: the files cannot be listed.
    """
    owners = _owners(state_dir)
    for name, path in _sent_files(state_dir).items():
        try:
            found = path.stat()
        except OSError:  # removed a moment ago
            continue
        cursor = None
        try:
            cursor = _known(state_dir, name, start, owners)
        except StoreError as error:
            on_problem(f"{error}; what {path} holds is sent again")
        done = start.sizes.get(name) if cursor is None else cursor.offset
        if done != found.st_size or (cursor is not None and cursor.mtime_ns != found.st_mtime_ns):
            yield PendingFile(path, name, found.st_size, found.st_mtime_ns, cursor)


def _known(state_dir: Path, name: str, start: PushStart, owners: frozenset[int] | None) -> Cursor | None:
    """Return the cursor that was written for *name* since *start*.

    Raises:
        StoreError: it is damaged, or nothing that may be obeyed.
    """
    cursor = _read(cursor_path(state_dir, name), Cursor, _MAX_CURSOR, owners)
    return cursor if cursor is not None and cursor.start == start.made_ns else None


def present_cursor(state_dir: Path, name: str) -> Cursor | None:
    """Return from where on the record file *name* would be sent now; None where nothing is sent, or all of it.

    Raises:
        StoreError: the start, the cursor or the file cannot be read.
    """
    start = read_start(state_dir)
    if start is None:
        return None
    path = state_dir / "records" / name
    found = path.stat()
    known = _known(state_dir, name, start, _owners(state_dir))
    cursor = cursor_of(PendingFile(path, name, found.st_size, found.st_mtime_ns, known), start, _ignore)
    return cursor if cursor is not None and cursor.offset else None


def line_digest(line: bytes) -> str:
    """Return by what the first line of a record file is known."""
    return hashlib.sha256(line).hexdigest()


def cursor_of(file: PendingFile, start: PushStart, on_problem: Callable[[str], None]) -> Cursor | None:
    """Return from where on *file* is to be sent; None if it has no whole line yet.

    Raises:
        StoreError: it cannot be read.
    """
    first = next((line for _, line in read_lines(file.path)), b"")
    if not first:
        return None
    found, known = line_digest(first), file.cursor
    if known is None:
        offset = _offset_at_start(file, start)
    elif known.first_line == found and _follows_line_end(file, known.offset):
        offset = known.offset
    else:
        offset = 0
        if not file.name.startswith(f"{EVENTS}/"):  # those are replaced whole
            on_problem(
                f"{file.path}: is not the file that was sent, or shorter; it is sent again from its first line"
            )
    form = FORM if known is None else known.form
    return Cursor(found, offset, file.mtime_ns, start.made_ns, form)


def _offset_at_start(file: PendingFile, start: PushStart) -> int:
    """Return where the first line begins that was not whole when the start was made."""
    size = start.sizes.get(file.name, 0)
    if not 0 < size <= file.size:
        return 0
    return next((offset for offset, line in read_lines(file.path) if offset + len(line) > size), size)


def _follows_line_end(file: PendingFile, offset: int) -> bool:
    if not 0 < offset <= file.size:
        return offset == 0
    try:
        with file.path.open("rb") as lines:
            lines.seek(offset - 1)
            return lines.read(1) == b"\n"
    except OSError as error:
        raise StoreError(f"{file.path}: cannot be read: {error.strerror}") from error


def write_cursor(state_dir: Path, name: str, cursor: Cursor) -> None:
    """Replace the cursor of the file *name*.

    Raises:
        StoreError: it cannot be written; the same will be sent again, which is harmless.
    """
    write_file(cursor_path(state_dir, name), _text(cursor), state_dir)


def forget_cursors(state_dir: Path) -> None:
    """Remove cursors of files that are gone.

    Raises:
        StoreError: the files cannot be listed.
    """
    cursors = list((influx_folder(state_dir) / "cursors").glob("*/*.json"))
    there = {cursor_path(state_dir, name) for name in _sent_files(state_dir)}
    for path in cursors:
        if path not in there:
            with contextlib.suppress(OSError):  # another push has removed it, or it is another user's
                path.unlink()


@dataclass(frozen=True)
class RecordsAndEvents:
    """How many of each."""

    records: int = 0
    events: int = 0

    @property
    def both(self) -> int:
        """How many in all."""
        return self.records + self.events

    def and_one_of(self, name: str, number: int = 1) -> RecordsAndEvents:
        """Return the counts with one, or *number*, more of the file *name*."""
        if is_record_file(name):
            return replace(self, records=self.records + number)
        return replace(self, events=self.events + number)

    def __str__(self) -> str:
        """Return them for people, as ``2 records and 1 event``."""
        counts = (self.records, "record"), (self.events, "event")
        return " and ".join(count(number, noun) for number, noun in counts if number) or "0 records"


def waiting(state_dir: Path) -> RecordsAndEvents:
    """Return how many wait: whole lines behind the cursors. What cannot be read is not counted."""
    found = RecordsAndEvents()
    with contextlib.suppress(StoreError):
        if (start := read_start(state_dir)) is None:
            return found
        for file in pending(state_dir, start, _ignore):
            with contextlib.suppress(StoreError):
                if cursor := cursor_of(file, start, _ignore):
                    lines = sum(1 for _ in read_lines(file.path, start=cursor.offset))
                    found = found.and_one_of(file.name, lines)
    return found


# --- files


def write_file(path: Path, text: str, state_dir: Path) -> None:
    """Replace a file below the state directory, and make its folder. Users who share the directory may all read and replace it.

    Raises:
        StoreError: it cannot be written; the former one is left as it was.
    """
    try:
        make_directories(path.parent, state_dir)
        shared = is_shared(state_dir)
    except OSError as error:
        raise StoreError(f"{error.filename}: cannot be made: {error.strerror}") from error
    replace_file(path, text, follow=False, mode=0o664 if shared else None)


def _record_name(path: Path, state_dir: Path) -> str:
    return str(path.relative_to(state_dir / "records"))


def _sent_files(state_dir: Path) -> dict[str, Path]:
    """Return all files that are sent, by name: record files, oldest month first, then events and their journal.

    Raises:
        StoreError: they cannot be listed.
    """
    found = {_record_name(path, state_dir): path for path in record_files(state_dir)}
    found |= {f"{EVENTS}/{path.name}": path for path in event_files(state_dir)}
    return found | {f"{JOURNAL}/{path.name}": path for path in journal_files(state_dir)}


def _text(content: PushStart | Cursor) -> str:
    return json.dumps(to_json(content), indent=1) + "\n"


def _ignore(_text: str) -> None:
    """Say nothing."""


def _owners(state_dir: Path) -> frozenset[int] | None:
    """Return whose files are obeyed: ours, root's, those of the state directory's owner; None: all, as users share it."""
    try:
        return None if is_shared(state_dir) else frozenset({0, os.geteuid(), state_dir.stat().st_uid})
    except OSError:  # there is none: nor is there a file in it
        return frozenset()


def _read(path: Path, cls: type[T], most: int, owners: frozenset[int] | None) -> T | None:
    """Return what a file holds; None if there is none.

    Raises:
        StoreError: it is damaged, or nothing that may be obeyed.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise StoreError(f"{path}: is no regular file and is not obeyed")
            if owners is not None and found.st_uid not in owners:
                raise StoreError(f"{path}: belongs to user {found.st_uid} and is not obeyed")
            content = file.read(most + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        why = (
            "is a link and is not obeyed"
            if error.errno == errno.ELOOP
            else f"cannot be read: {error.strerror}"
        )
        raise StoreError(f"{path}: {why}") from error
    if len(content) > most:
        raise StoreError(f"{path}: damaged: longer than {most} bytes")
    try:
        return from_json(cls, read_json(content))
    except ValueError as error:
        raise StoreError(f"{path}: damaged: {str(error)[:200]}") from error
