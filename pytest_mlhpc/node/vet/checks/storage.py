"""PAYLOAD. The folder that a node writes to: room, and how fast it writes, reads, makes and finds files.

The named folder (``paths: storage``), else that for temporary files. *Not there* or refused: a warning for the latter, which a pod
need not have; the node is not fit without the former. Nothing is measured with more than a quarter of the room, nor with more
than an eighth of memory where the file system is memory; all that is written is removed.
"""

from __future__ import annotations

import errno
from typing import List, Optional, Tuple

from pytest_mlhpc.node.vet.finding import Finding, Origin, Outcome, Reading
from pytest_mlhpc.node.vet.machine import Check, Context, Machine, Room, Unreadable
from pytest_mlhpc.node.vet.policy import summed, weigh
from pytest_mlhpc.node.vet.storage import Measured, measure

#: What is written and read, in bytes, and how many files are made.
SIZE, FILES = 256 << 20, 100

#: File systems that are memory.
_MEMORY = ("tmpfs", "ramfs")

#: Errors that say that we may not, rather than that the file system cannot.
_REFUSED = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS)


class Storage:
    """Measures one folder."""

    name = "storage"
    level = "quick"
    cost_s = 4.0  # about one on a good disk; the engine has patience for four times as much
    reads: Tuple[str, ...] = ("the folder of paths.storage, $TMPDIR or /tmp", "/proc/self/mounts")
    purpose = ""
    loads = True

    def examine(self, machine: Machine, context: Context) -> Outcome:
        """Write, read, remove."""
        named = context.wanted.paths.get("storage", "")
        temporary = machine.environ.get("TMPDIR", "")
        folder = named or (temporary if temporary.startswith("/") else "/tmp")  # noqa: S108 - where programs write
        try:
            room = machine.room(folder)
            kind = file_system(machine, folder)
            found = [*_works(context, folder), *_room(context, folder, room)]
            measured = measure(machine.path(folder), _size(machine, room, kind), _files(room))
        except Unreadable as error:
            return Outcome((_failed(context, folder, named, str(error), error.code),))
        except OSError as error:
            return Outcome((_failed(context, folder, named, f"{error.strerror}", error.errno),))
        passed = f"{folder} ({kind}) can be written and read, {room.free / 2**30:.1f} GiB are free"
        return Outcome(summed(self.name, found, passed), readings=tuple(_readings(measured, kind)))


def file_system(machine: Machine, folder: str) -> str:
    """Return the kind of file system that a folder lies on (proc_pid_mounts(5)), ``unknown`` where nobody says."""
    try:
        lines = machine.text("/proc/self/mounts").splitlines()
    except Unreadable:
        return "unknown"
    best, kind = "", "unknown"
    for line in lines:
        words = line.split(" ")
        if (
            len(words) >= 3
            and len(words[1]) >= len(best)
            and (folder + "/").startswith(words[1].rstrip("/") + "/")
        ):
            best, kind = words[1], words[2]
    return kind


def _size(machine: Machine, room: Room, kind: str) -> int:
    most = min(SIZE, room.free // 4)
    if kind not in _MEMORY:
        return most
    try:
        words = machine.key_values("/proc/meminfo").get("MemAvailable", "").split()
    except Unreadable:
        words = []
    return min(most, int(words[0]) * 1024 // 8) if words and words[0].isdecimal() else 0


def _files(room: Room) -> int:
    return FILES if room.files is None or room.files >= 2 * FILES else 0


def _room(context: Context, folder: str, room: Room) -> List[Finding]:
    text = f"{room.free / 2**20:.0f} MiB are free at {folder}; make room"
    found = [weigh("storage", context.policy["storage.room"], room.free, text)]
    if room.files is not None:
        text = f"{room.files} more files can be made at {folder}; remove some"
        found.append(weigh("storage", context.policy["storage.files"], room.files, text))
    return found


def _works(context: Context, folder: str) -> List[Finding]:
    text = f"{folder} can be written and read"
    return [weigh("storage", context.policy[rule], 0, text) for rule in ("storage.refused", "storage.failed")]


def _failed(context: Context, folder: str, named: str, why: str, code: Optional[int]) -> Finding:
    refused = code in _REFUSED
    origin = Origin.USER if refused else Origin.NODE
    rule = "storage.refused" if refused and not named else "storage.failed"
    text = f"{folder} cannot be written and read: {why}; set TMPDIR, name another folder, or have it repaired"
    return weigh("storage", context.policy[rule], 1, text, origin=origin)


def _readings(measured: Measured, kind: str) -> List[Reading]:
    figures = (
        ("write", measured.write, "B/s"),
        ("read", measured.read, "B/s"),
        ("create", measured.create, "1/s"),
        ("stat", measured.stat, "1/s"),
    )
    return [
        Reading("storage", f"storage {what}", f"storage/{what}", kind, value, unit, floor=f"storage/{what}")
        for what, value, unit in figures
        if value is not None
    ]


CHECKS: Tuple[Check, ...] = (Storage(),)
