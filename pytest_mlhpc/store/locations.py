"""Where files lie: the state directory and its folders, pages and suites of the package; how a file is replaced whole. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from pytest_mlhpc.errors import StoreError
from pytest_mlhpc.node import files
from pytest_mlhpc.node.files import MOUNTS, NETWORK, file_system


def is_shared(directory: Path) -> bool:
    """Return whether *directory* is writable for its group."""
    return bool(directory.stat().st_mode & stat.S_IWGRP)


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. A pipe or device in its place, which another user may have put there, is not waited for.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(descriptor, "rb")


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


#: Part of the file's name: versions of this program with other tables never meet.
VERSION = 5


def index_path(state_dir: Path, mounts: Path = MOUNTS) -> Path:
    """Return this user's index file: in the state directory when that is on a local disk, else in the cache directory.

    Each user has one of their own, so that two users of one state directory need not write each other's files.
    """
    if file_system(state_dir, mounts) not in NETWORK:
        return state_dir / f"index-v{VERSION}-{os.getuid()}.sqlite"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.sha256(str(state_dir.resolve()).encode()).hexdigest()[:16]
    return cache / "mlhpc" / f"index-v{VERSION}-{name}.sqlite"


#: How often it is looked whether the other is done, in seconds; flock(2) with a time limit does not exist.
_LOOK_S = 0.1


@contextlib.contextmanager
def locked_file(path: Path, root: Path, busy: Exception, patience_s: float = 0.0) -> Iterator[int]:
    """Keep the file *path* below *root* for this process; the kernel frees it with its holder, however that dies.

    Its descriptor is yielded: a child that inherits it holds the lock as well.

    Raises:
        StoreError: the folder cannot be used.
        busy: another process has it, and does not let go within *patience_s* seconds.
    """
    try:
        make_directories(path.parent, root)
        mode = 0o664 if is_shared(root) else 0o644
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    except OSError as error:
        raise StoreError(f"{path}: cannot be used: {error.strerror}") from error
    try:
        _lock(descriptor, path, busy, patience_s)
        yield descriptor
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path, busy: Exception, patience_s: float) -> None:
    until = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                raise busy from None
            time.sleep(_LOOK_S)
        except OSError as error:
            raise StoreError(f"{path}: cannot be locked: {error.strerror}") from error
        else:
            return


#: A temporary file that is this old (s) was left by a writer that was killed: no writing of ours takes minutes, and an
#: hour is more than clocks of a file server and its clients differ.
LEFT_AFTER_S = 3600.0


def replace_file(
    path: Path,
    text: str | Iterable[bytes],
    *,
    follow: bool = True,
    mode: int | None = None,
    ready: Callable[[int], None] | None = None,
) -> None:
    """Replace *path* by *text* in one step: readers see the old file or the new one, whatever dies.

    What a writer of the same file that was killed has left beside it is removed. A link stays a link, and what it names is
    replaced; without *follow* the link itself is, as in a folder where others may put one. Without *mode* the file keeps the
    one that it has, or gets that of a new file. *ready*: see ``node/files.py``.

    Raises:
        StoreError: disk full, over quota, not writable; names the path. The old file is left as it was.
    """
    target = path.resolve() if follow else path
    try:
        content = text.encode("utf-8") if isinstance(text, str) else text
        if follow and path.exists() and not path.is_file():  # a device or a pipe stays one
            with path.open("wb") as file:
                file.writelines([content] if isinstance(content, bytes) else content)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_left(target)
        files.replace_file(target, content, mode=mode, ready=ready)
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error.strerror}") from error


def _remove_left(target: Path) -> None:
    before = time.time() - LEFT_AFTER_S
    with contextlib.suppress(OSError), os.scandir(target.parent) as entries:
        for entry in entries:
            ours = entry.name.startswith(f".{target.name}.") and entry.name.endswith(files.UNFINISHED)
            if ours and entry.stat(follow_symlinks=False).st_mtime < before:
                # another writer removes it as well, or it is somebody else's
                with contextlib.suppress(OSError):
                    Path(entry.path).unlink()


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


_PACKAGE = Path(__file__).parents[1]


def page(name: str) -> str:
    """Return the path of docs/*name*.md, which a wheel holds if pyproject.toml names it."""
    installed = _PACKAGE / f"docs/{name}.md"
    return str(installed if installed.exists() else _PACKAGE.parent / f"docs/{name}.md")


def suite(name: str) -> str:
    """Return the arguments by which pytest runs suites/*name*."""
    installed = (_PACKAGE / "suites" / name).is_dir()
    return f"--pyargs pytest_mlhpc.suites.{name}" if installed else f"suites/{name}"
