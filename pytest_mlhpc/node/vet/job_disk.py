"""PAYLOAD. Space of file systems, quota, mounts: asked by programs that can be killed, as a path may hang."""

from __future__ import annotations

import math
import os
import re
import tempfile
from dataclasses import dataclass
from typing import List, Tuple

from pytest_mlhpc.node.vet.job_findings import is_number
from pytest_mlhpc.node.vet.machine import Absent, Machine, Unreadable

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
    words = done.output.split()
    if done.code or len(words) != 5 or not all(is_number(word.lstrip("-")) for word in words):
        text = (done.errors or done.output).strip()[-200:] or f"exit code {done.code}"
        kind = Absent if "No such file" in text else Unreadable
        raise kind(f"the file system of {path} cannot be asked: {text}")
    block, blocks, free, inodes, free_inodes = map(int, words)
    return Space(block * blocks, block * free, inodes, free_inodes)


def mount_of(machine: Machine, path: str) -> Tuple[str, Tuple[str, ...], str]:
    """Return type, options and place of the mount on which *path* lies (proc(5), /proc/self/mounts); the last is on top."""
    best: Tuple[str, Tuple[str, ...], str] = ("", (), "/")
    for line in machine.text("/proc/self/mounts").splitlines():
        words = line.split()
        place = words[1].replace("\\040", " ") if len(words) > 3 else ""
        inside = (path + "/").startswith(place.rstrip("/") + "/")
        if place and inside and len(place) >= len(best[2]):
            best = (words[2], tuple(words[3].split(",")), place)
    return best


def quotas(machine: Machine, path: str) -> Tuple[Quota, ...]:
    """Return the rows of the quota that holds for us at *path*; none where no program knows of any.

    Raises:
        Unreadable: the program is there, but does not answer.
    """
    kind, _, place = mount_of(machine, path)
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
            used, soft, hard, _, files, files_soft, files_hard, _ = match.groups()
            found.append(
                Quota(
                    whose or "us",
                    int(used) * BLOCK,
                    int(soft) * BLOCK,
                    int(hard) * BLOCK,
                    int(files),
                    int(files_soft),
                    int(files_hard),
                )
            )
    return tuple(found)


def try_to_write(machine: Machine, folder: str) -> str:
    """Make a small file, and remove it; return the system's words for why that fails, or nothing."""
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
