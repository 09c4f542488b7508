"""What ledgers do to the disk: whole writes, names that outlive a power cut, files put aside."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from pytest_mlhpc.errors import StoreError
from pytest_mlhpc.results.store import make_directories


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


def sync_folder(folder: Path) -> None:
    """Make names in *folder* outlive a power cut, where its file system can.

    Raises:
        OSError: a disk error.
    """
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that sync no folders
            raise
    finally:
        os.close(file)
