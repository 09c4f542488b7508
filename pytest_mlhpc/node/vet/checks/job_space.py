"""Room for checkpoints and temporary files: space, inodes, quota, shared memory."""

from __future__ import annotations

import math
import os
import re
import tempfile
from dataclasses import dataclass
from typing import List, Optional, Tuple

from pytest_mlhpc.node.vet.check import Check, Examination
from pytest_mlhpc.node.vet.machine import Absent, Machine, Unreadable, is_number, size, some

#: How long a program may take to ask a file system, in seconds; the engine waits for both, and kills what hangs for longer.
ASK_S = 2.0

#: Blocks of lfs quota and quota(1), in bytes. Sources: lfs-quota(1), quota(1).
BLOCK = 1024

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
            blocks = (int(number) * BLOCK for number in (used, soft, hard))
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
    trouble = _folder(exam.machine, path)
    if exam.judge("job.checkpoint_path", int(bool(trouble)), trouble):
        return None
    found = space(exam.machine, path)
    _judge_space(exam, path, found)
    _judge_quota(exam, path)
    return f"{path} has {size(found.free)} free"


def _folder(machine: Machine, path: str) -> str:
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
    Check.named("job_space", _judge_checkpoints),
    Check.named("job_tmp", _judge_temporary),
    Check.named("job_shm", _judge_shared_memory),
)
