"""PAYLOAD. Measures a folder: writes and reads a file, makes and looks at many; leaves nothing there, whatever happens."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Optional

#: Begin of the names of folders that we make.
PREFIX = ".mlhpc-vet-"

#: Folders of ours that are older, in seconds, were left by a process that was killed.
STALE_S = 3600.0

#: Size of one read or write, in bytes.
PIECE = 4 << 20

#: Longest time for each of writing and reading, in seconds; what was done by then is the figure.
LONGEST_S = 4.0


@dataclass(frozen=True)
class Measured:
    """Rates: bytes and files per second; None where there was no room to measure."""

    write: Optional[float]
    read: Optional[float]
    create: Optional[float]
    stat: Optional[float]
    size: int


def measure(folder: Path, size: int, files: int) -> Measured:
    """Return the rates of a folder with *size* bytes and *files* files.

    Raises:
        OSError: the folder cannot be used.
    """
    _sweep(folder)
    place = Path(tempfile.mkdtemp(prefix=PREFIX, dir=folder))
    try:
        rates = _stream(place, size) if size >= PIECE else {}
        rates.update(_many(place, files) if files else {})
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return Measured(
        rates.get("write"),
        rates.get("read"),
        rates.get("create"),
        rates.get("stat"),
        int(rates.get("size", 0)),
    )


def _sweep(folder: Path) -> None:
    """Remove what an earlier process of this user left when it was killed."""
    now = time.time()
    for left in folder.glob(f"{PREFIX}*"):
        try:
            about = left.lstat()
        except OSError:
            continue
        if about.st_uid == os.getuid() and now - about.st_mtime > STALE_S:
            shutil.rmtree(left, ignore_errors=True)


def _stream(place: Path, size: int) -> Dict[str, float]:
    """Write and read one file that has no name: the file system frees it even if we are killed."""
    name = place / "stream"
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        name.unlink()
        piece = bytearray(os.urandom(PIECE))  # nothing that a file system could compress
        written, begun = 0, time.monotonic()
        while written + PIECE <= size and time.monotonic() - begun < LONGEST_S:
            piece[:8] = written.to_bytes(8, "little")
            written += _whole(fd, memoryview(piece))
        os.fsync(fd)
        write = written / max(time.monotonic() - begun, 1e-9)
        _forget(fd)
        os.lseek(fd, 0, os.SEEK_SET)
        got, begun = 0, time.monotonic()
        while got < written and time.monotonic() - begun < LONGEST_S:
            part = os.read(fd, PIECE)
            if not part:
                break
            got += len(part)
        read = got / max(time.monotonic() - begun, 1e-9)
    finally:
        os.close(fd)
    return {"write": write, "read": read, "size": float(written)}


def _whole(fd: int, data: memoryview) -> int:
    done = 0
    while done < len(data):
        done += os.write(fd, data[done:])
    return done


def _forget(fd: int) -> None:
    """Ask the kernel to drop its copy, so that the file and not memory is read."""
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    except (OSError, AttributeError):
        return  # read from memory, then; the same on all nodes


def _many(place: Path, files: int) -> Dict[str, float]:
    """Make empty files and look at each."""
    names: List[Path] = [place / f"{number:03}" for number in range(files)]
    begun = time.monotonic()
    for name in names:
        os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    create = files / max(time.monotonic() - begun, 1e-9)
    begun = time.monotonic()
    for name in names:
        name.stat()
    return {"create": create, "stat": files / max(time.monotonic() - begun, 1e-9)}
