"""Storage: speed and room of the node's folder; a job's room for checkpoints, temporary files and shared memory."""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from pytest_mlhpc.node.vet.check import Check, Examination
from pytest_mlhpc.node.vet.checks.host import memory_info
from pytest_mlhpc.node.vet.finding import Origin
from pytest_mlhpc.node.vet.machine import Absent, Machine, Room, Unreadable, is_number, or_else, size, some

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


def _judge_folder(exam: Examination) -> Optional[str]:
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


#: How long a program may take to ask a file system, in seconds; the engine waits for both, and kills what hangs for longer.
ASK_S = 2.0

#: Blocks of lfs quota and quota(1), in bytes. Sources: lfs-quota(1), quota(1).
QUOTA_BLOCK = 1024

#: used, soft, hard, grace for blocks, then for files; an asterisk or brackets mark what is over, lfs writes - for no grace.
_NUMBER = r"\[?([0-9]{1,18})\]?\*?"
_ROW = re.compile(
    rf"\s{_NUMBER}\s+{_NUMBER}\s+{_NUMBER}\s+(\S+)\s+{_NUMBER}\s+{_NUMBER}\s+{_NUMBER}(?:\s+(\S+))?\s*$"
)


@dataclass(frozen=True)
class Space:
    """A file system's size and what this user may still take, in bytes and inodes (both 0 where it counts none)."""

    size: int
    free: int
    inodes: int
    free_inodes: int


@dataclass(frozen=True)
class Quota:
    """One row of a quota: used, and limits; 0 is no limit. Bytes first, then inodes. ``whose`` is for people."""

    whose: str
    used: int
    soft: int
    hard: int
    files: int
    files_soft: int
    files_hard: int

    @property
    def left(self) -> float:
        """Bytes that may still be written."""
        return max(0, self.hard - self.used) if self.hard else math.inf

    @property
    def files_left(self) -> float:
        """Files that may still be made."""
        return max(0, self.files_hard - self.files) if self.files_hard else math.inf

    @property
    def passed(self) -> int:
        """How many soft limits are passed, so that their grace time runs."""
        return int(0 < self.soft < self.used) + int(0 < self.files_soft < self.files)


def space(machine: Machine, path: str) -> Space:
    """Return the space of the file system on which *path* lies, by stat(1) of coreutils or busybox.

    Raises:
        Absent: there is no such path.
        Unreadable: the file system does not answer, in time or at all.
    """
    done = machine.command(("stat", "-f", "-c", "%S %b %a %c %d", "--", path), ASK_S)
    fields = done.output.split()
    if done.code or len(fields) != 5 or not all(is_number(word.lstrip("-")) for word in fields):
        text = (done.errors or done.output).strip()[-200:] or f"exit code {done.code}"
        kind = Absent if "No such file" in text else Unreadable
        raise kind(f"the file system of {path} cannot be asked: {text}")
    block, blocks, free, inodes, free_inodes = map(int, fields)
    return Space(block * blocks, block * free, inodes, free_inodes)


def quotas(machine: Machine, path: str) -> Tuple[Quota, ...]:
    """Return the rows of the quota that holds for us at *path*; none where no program knows of any.

    Raises:
        Unreadable: the program is there, but does not answer.
    """
    kind, _, place = machine.mount_of(path)
    argv = ("lfs", "quota", path) if kind == "lustre" else ("quota", "-w", "-p", "-f", place)
    try:
        done = machine.command(argv, ASK_S)
    except Absent:
        return ()
    rows = parse_quota(done.output)
    if not rows and done.code and argv[0] == "lfs":
        raise Unreadable(f"{' '.join(argv)} failed: {(done.errors or done.output).strip()[-200:]}")
    return rows


def parse_quota(text: str) -> Tuple[Quota, ...]:
    """Return the rows of what lfs-quota(1), or quota(1) with -w -p, prints; long names stand on a line of their own."""
    found: List[Quota] = []
    whose = ""
    for line in text.splitlines():
        if line.startswith("Disk quotas for"):
            whose = line[len("Disk quotas for") :].strip().rstrip(":")
        match = _ROW.search(" " + line)
        if match and not line.lstrip().startswith("Filesystem"):
            used, soft, hard, _, *files, _ = match.groups()
            blocks = (int(number) * QUOTA_BLOCK for number in (used, soft, hard))
            found.append(Quota(whose or "us", *blocks, *map(int, files)))
    return tuple(found)


def try_to_write(machine: Machine, folder: str) -> str:
    """Make a small file, and remove it; return the system's message why that fails, or nothing."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=".mlhpc-vet-", dir=machine.path(folder))
    except OSError as error:
        return error.strerror or str(error)
    try:
        os.write(descriptor, b"mlhpc vet\n")
        os.fsync(descriptor)  # a full quota of a network's file system shows only here
    except OSError as error:
        return error.strerror or str(error)
    finally:
        os.close(descriptor)
        os.unlink(name)  # noqa: PTH108 - what mkstemp has returned is a text
    return ""


#: What quota is compared with where nobody said how large a checkpoint is, in bytes.
SOME_CHECKPOINT = 1 << 30

#: What NCCL and torch leave in shared memory when their processes are killed. Sources: nccl issue 525 (``nccl-``);
#: torch, multiprocessing/reductions and shm manager (``torch_``).
LEFT = ("nccl-*", "torch_*", "sem.mp-*")


def _judge_checkpoints(exam: Examination) -> Optional[str]:
    """Look at the folder first: what does not exist has no space."""
    path = exam.wanted.paths.get("checkpoint", "")
    if not path:
        return "no folder for checkpoints was named (--checkpoint)"
    trouble = _checkpoint_trouble(exam.machine, path)
    if exam.judge("job.checkpoint_path", int(bool(trouble)), trouble):
        return None
    found = space(exam.machine, path)
    _judge_space(exam, path, found)
    _judge_quota(exam, path)
    return f"{path} has {size(found.free)} free"


def _checkpoint_trouble(machine: Machine, path: str) -> str:
    if not machine.exists(path):
        return (
            f"the checkpoint folder {path} is not there: make it, or see whether its file system is mounted"
        )
    if not machine.path(path).is_dir():
        return f"the checkpoint folder {path} is no folder"
    if "ro" in machine.mount_of(path)[1]:
        return f"the file system of the checkpoint folder {path} is mounted read-only"
    fields = try_to_write(machine, path)
    return f"no file can be written in the checkpoint folder {path}: {fields}" if fields else ""


def _judge_space(exam: Examination, path: str, found: Space) -> None:
    wanted = exam.wanted.checkpoint_bytes
    free = f"{size(found.free)} of {size(found.size)} are free at {path}"
    if wanted > 0:
        text = f"{free}, and one checkpoint takes {size(wanted)}: delete old ones, or choose another place"
        exam.judge("job.checkpoint_space", found.free / wanted, text)
    else:
        share = found.free / found.size if found.size else 1.0
        exam.judge("job.checkpoint_share", share, f"only {free}: choose another place")
    if found.inodes > 0:
        ranks = exam.context.world
        text = f"only {found.free_inodes} files can be made at {path}, for {ranks} ranks: delete some, or choose another place"
        exam.judge("job.checkpoint_inodes", found.free_inodes / ranks, text)


def _judge_quota(exam: Examination, path: str) -> None:
    try:
        rows = quotas(exam.machine, path)
    except Unreadable as error:
        exam.unknown("job.quota_space", f"{error}: how much may be written is not known")
        return
    ranks, wanted = exam.context.world, exam.wanted.checkpoint_bytes or SOME_CHECKPOINT
    for row in rows:
        text = (
            f"the quota of {row.whose} leaves {size(row.left)} of {size(row.hard)}, and one checkpoint takes "
            f"{size(wanted)}: delete old ones, or ask for more"
        )
        exam.judge("job.quota_space", row.left / wanted, text)
        text = f"the quota of {row.whose} leaves {row.files_left:.0f} of {row.files_hard} files, for {ranks} ranks: delete some"
        exam.judge("job.quota_inodes", row.files_left / ranks, text)
        text = f"the soft limit of {row.whose} is passed: when its grace time ends nothing can be written; delete some"
        exam.judge("job.quota_grace", row.passed, text)


def _judge_temporary(exam: Examination) -> str:
    """Ask the file system of TMPDIR."""
    path = exam.machine.environ.get("TMPDIR") or "/tmp"  # noqa: S108 - where libraries write by default
    try:
        found = space(exam.machine, path)
    except Absent:
        if not exam.machine.environ.get("TMPDIR"):
            raise
        found = Space(0, 0, 0, 0)
    text = f"{path} has {size(found.free)} free of {size(found.size)}: remove leftovers, or set TMPDIR to a folder with room"
    exam.judge("job.tmp_space", found.free, text)
    return f"{path} has {size(found.free)} free"


def _judge_shared_memory(exam: Examination) -> str:
    """Ask its file system, and name what dead ranks have left."""
    path = "/dev/shm"  # noqa: S108 - shm_overview(7)
    found = space(exam.machine, path)
    ranks = max(1, exam.wanted.ranks)
    left = tuple(
        name.rpartition("/")[2] for pattern in LEFT for name in exam.machine.names(f"{path}/{pattern}")
    )
    text = (
        f"{path} has {size(found.free)} free of {size(found.size)} for {ranks} ranks: "
        + (f"{len(left)} leftovers fill it ({some(left)}), remove them; else " if left else "")
        + "mount it larger (containers: --shm-size, Kubernetes: emptyDir with medium Memory)"
    )
    exam.judge("job.shm", found.free / ranks, text)
    return f"{path} has {size(found.free)} free"


CHECKS = (
    Check.named("storage", _judge_folder),
    Check.named("job_space", _judge_checkpoints),
    Check.named("job_tmp", _judge_temporary),
    Check.named("job_shm", _judge_shared_memory),
)
