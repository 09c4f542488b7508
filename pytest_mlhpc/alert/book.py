"""Where the book lies: one file, replaced in one step, outside any workspace.

The new state and the messages that it gives rise to are written together, before anything is sent, so that whoever is
killed in between leaves either the old night or the new one with its messages waiting. A book that is damaged is put aside
and begun anew: nothing that is older than a night is announced again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pytest_mlhpc.alert.model import Book
from pytest_mlhpc.errors import MlhpcError, StoreError
from pytest_mlhpc.node.foreign import read_json
from pytest_mlhpc.node.protocol.schema import SCHEMA, SchemaError, from_json, to_json
from pytest_mlhpc.store.files import is_shared, make_directories, replace_file

#: A larger file is no book of ours: thousands of open incidents are a few MB.
MAX_BYTES = 64 << 20
#: How long another process may hold the book, in seconds: it sends, and each channel has its own limit.
PATIENCE_S = 60.0
#: How often it is looked whether the other is done, in seconds; flock(2) with a time limit does not exist.
_LOOK_S = 0.1


class BusyError(MlhpcError):
    """Another process has had the book for too long; the same may succeed later."""


def book_path(state_dir: Path) -> Path:
    """Return where the book lies."""
    return state_dir / "alerts" / "book.json"


def read_book(state_dir: Path, on_problem: Callable[[str], None]) -> Book:
    """Return the book; an empty one if there is none, or if it is damaged, which is told.

    Raises:
        StoreError: it cannot be read, or a newer version wrote it.
    """
    path = book_path(state_dir)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return Book()
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise StoreError(f"{path}: is no file")
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        plain = read_json(data) if len(data) <= MAX_BYTES else {}
        found = plain.get("schema", 0) if isinstance(plain, dict) else 0
        if isinstance(found, int) and found > SCHEMA:
            raise StoreError(f"{path}: schema {found} is newer than {SCHEMA}: update pytest-mlhpc")
        return from_json(Book, plain)
    except (ValueError, TypeError, RecursionError, SchemaError) as error:
        on_problem(f"{path}: damaged: {str(error)[:200]}; known alerts are forgotten, it is kept beside")
        return Book()


def keep_damaged(state_dir: Path) -> None:
    """Put a book aside that is about to be written over though it could not be understood."""
    path = book_path(state_dir)
    with contextlib.suppress(OSError):
        path.replace(path.with_name(f"book.damaged-{time.time_ns()}.json"))


def write_book(state_dir: Path, book: Book) -> None:
    """Replace the book, durably.

    Raises:
        StoreError: disk full, over quota, not writable. The old one is left as it was.
    """
    path = book_path(state_dir)
    replace_file(path, json.dumps(to_json(book), allow_nan=False, indent=1) + "\n")
    try:
        descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)  # its new name must survive a power cut before anything is sent
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StoreError(f"{path.parent}: cannot be synced: {error.strerror}") from error


@contextlib.contextmanager
def held(state_dir: Path, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Keep the book for this process; the kernel frees it with its holder, however that dies.

    Raises:
        BusyError: another process has it and does not let go.
        StoreError: the folder cannot be used.
    """
    path = book_path(state_dir).with_name("lock")
    try:
        make_directories(path.parent, state_dir)
        mode = 0o664 if is_shared(state_dir) else 0o644
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    except OSError as error:
        raise StoreError(f"{path}: cannot be used: {error.strerror}") from error
    try:
        _lock(descriptor, path, patience_s)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path, patience_s: float) -> None:
    until = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                text = f"{path}: another mlhpc alert send, ack or mute is at work; try again when it is done"
                raise BusyError(text) from None
            time.sleep(_LOOK_S)
        except OSError as error:
            raise StoreError(f"{path}: cannot be locked: {error.strerror}") from error
        else:
            return
