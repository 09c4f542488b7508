"""The folder in which the hook writes what a program tells: one for each screening, and none that stays.

Who screens holds a lock on it, which the kernel lets go however that ends. So the next screening knows whose folders nobody needs
any more, of those that a killed one had to leave, and removes them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pytest_mlhpc.errors import InfrastructureError
from pytest_mlhpc.node.unwritten import unwritten

PREFIX = f"mlhpc-screen-{socket.gethostname()}-"  # a temporary folder may be shared by nodes that do not see each other's locks


@contextlib.contextmanager
def told_folder() -> Iterator[Path]:
    """Make the folder, and remove it in the end; before, remove those of screenings that were killed.

    Raises:
        InfrastructureError: ``disk_full``, there is no room for it.
    """
    try:
        _remove_left(Path(tempfile.gettempdir()))
        folder, lock = _locked()
    except OSError as error:
        text = f"screening has no folder for what the program tells: {error}"
        raise InfrastructureError(
            unwritten(error), f"{text}; make room there, or name another one in TMPDIR"
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked() -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        try:
            lock = _lock(folder)
        except OSError:  # a file system without locks; nobody can take this for one that was left, either
            return folder, os.open(os.devnull, os.O_RDONLY)
        if lock is not None:
            return folder, lock


def _remove_left(where: Path) -> None:
    """Remove our folders that nobody holds."""
    for folder in where.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid != os.geteuid():
                continue
            lock = _lock(folder)
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _lock(folder: Path) -> int | None:
    """Return a descriptor that holds the folder; None: somebody else does, or it has just been removed."""
    with contextlib.ExitStack() as undo:
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            undo.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(descriptor), folder.lstat()):
                return None
        except (FileNotFoundError, BlockingIOError):
            return None
        undo.pop_all()
        return descriptor
