"""The folder that a node writes to: its room, and how fast it is written and read."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from pytest_mlhpc.node.vet.check import Check, Examination
from pytest_mlhpc.node.vet.checks.inventory import memory_info
from pytest_mlhpc.node.vet.finding import Origin
from pytest_mlhpc.node.vet.machine import Machine, Room, Unreadable, or_else

#: Begin of the names of folders that we make.
PREFIX = ".mlhpc-vet-"

#: Folders of ours that are older, in seconds, were left by a process that was killed.
STALE_S = 3600.0

#: Size of one read or write, and of what is timed (and, when written, brought to the disk) together, in bytes.
PIECE, PART = 4 << 20, 16 << 20

#: Files that are timed together.
BATCH = 20

#: Longest time for each of writing and reading, in seconds; what was done by then is the figure.
LONGEST_S = 3.0


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
        written, write = _write(fd, size)
        _forget(fd)
        os.lseek(fd, 0, os.SEEK_SET)
        read = _read(fd, written)
    finally:
        os.close(fd)
    return {"write": write, "read": read, "size": float(written)}


def _write(fd: int, size: int) -> Tuple[int, float]:
    """Write what no file system can compress, and bring each part to the disk; return bytes and rate."""
    piece = bytearray(os.urandom(PIECE))
    written, rates, begun = 0, [], time.monotonic()
    while written + PIECE <= size and time.monotonic() - begun < LONGEST_S:
        part, since = written, time.monotonic()
        while written + PIECE <= size and written - part < PART:
            piece[:8] = written.to_bytes(8, "little")
            written += _whole(fd, memoryview(piece))
        os.fdatasync(fd)
        rates.append((written - part) / max(time.monotonic() - since, 1e-9))
    return written, median(rates)


def _read(fd: int, size: int) -> float:
    """Read it again; return the rate."""
    got, rates, begun = 0, [], time.monotonic()
    while got < size and time.monotonic() - begun < LONGEST_S:
        part, since = got, time.monotonic()
        while got < size and got - part < PART:
            data = os.read(fd, PIECE)
            if not data:
                raise OSError(errno.EIO, "a file is shorter than what was written to it")
            got += len(data)
        rates.append((got - part) / max(time.monotonic() - since, 1e-9))
    return median(rates)


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
    batches = [names[first : first + BATCH] for first in range(0, files, BATCH)]
    return {"create": _rate(_create, batches), "stat": _rate(Path.stat, batches)}


def _rate(act: Callable[[Path], object], batches: Sequence[Sequence[Path]]) -> float:
    rates = []
    for batch in batches:
        begun = time.monotonic()
        for name in batch:
            act(name)
        rates.append(len(batch) / max(time.monotonic() - begun, 1e-9))
    return median(rates)


def _create(name: Path) -> None:
    os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


#: What is written and read, in bytes, and how many files are made.
SIZE, FILES = 256 << 20, 100

#: File systems that are memory.
_MEMORY = ("tmpfs", "ramfs")

#: Errors that say that we may not, rather than that the file system cannot.
_REFUSED = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS)


def _judge(exam: Examination) -> Optional[str]:
    """Write, read, remove."""
    machine = exam.machine
    named = exam.wanted.paths.get("storage", "")
    temporary = machine.environ.get("TMPDIR", "")
    folder = named or (temporary if temporary.startswith("/") else "/tmp")  # noqa: S108 - where programs write
    try:
        room = machine.room(folder)
        kind = file_system(machine, folder)
        measured = measure(machine.path(folder), _size(machine, room, kind), _files(room))
    except Unreadable as error:
        _judge_use(exam, folder, named, str(error), error.code)
        return None
    except OSError as error:
        _judge_use(exam, folder, named, f"{error.strerror}", error.errno)
        return None
    for rule in ("storage.refused", "storage.failed"):
        exam.judge(rule, 0, f"{folder} can be written and read")
    exam.judge("storage.room", room.free, f"{room.free / 2**20:.0f} MiB are free at {folder}; make room")
    if room.files is not None:
        text = f"{room.files} more files can be made at {folder}; remove some"
        exam.judge("storage.files", room.files, text)
    figures = {
        "write": measured.write,
        "read": measured.read,
        "create": measured.create,
        "stat": measured.stat,
    }
    for what, value in figures.items():
        if value is not None:
            key, unit = f"storage/{what}", "B/s" if what in {"write", "read"} else "1/s"
            exam.reading(f"storage {what}", key, kind, value, unit, floor=key)
    return f"{folder} ({kind}) can be written and read, {room.free / 2**30:.1f} GiB are free"


def file_system(machine: Machine, folder: str) -> str:
    """Return the kind of file system that a folder lies on, ``unknown`` where nobody says."""
    nowhere: Tuple[str, Tuple[str, ...], str] = ("", (), "")
    return or_else(machine.mount_of, folder, nowhere, Unreadable)[0] or "unknown"


def _size(machine: Machine, room: Room, kind: str) -> int:
    most = min(SIZE, room.free // 4)
    if kind not in _MEMORY:
        return most
    return min(most, or_else(lambda name: memory_info(machine, name), "MemAvailable", 0, Unreadable) // 8)


def _files(room: Room) -> int:
    return FILES if room.files is None or room.files >= 2 * FILES else 0


def _judge_use(exam: Examination, folder: str, named: str, why: str, code: Optional[int]) -> None:
    refused = code in _REFUSED
    rule = "storage.refused" if refused and not named else "storage.failed"
    text = f"{folder} cannot be written and read: {why}; set TMPDIR, name another folder, or have it repaired"
    exam.judge(rule, 1, text, origin=Origin.USER if refused else Origin.NODE)


CHECKS = (Check.named("storage", _judge),)
