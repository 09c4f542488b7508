"""Leases: whether whoever submitted something still watches it, and until when it may stand without anybody watching.

An owner on this host is alive while its process is. An owner on another host is alive while its ledger file is touched:
it does so at least every ``BEAT_S``, and both times are the file server's, so that no two clocks are ever compared.
"""

from __future__ import annotations

import contextlib
import os
import socket
import uuid
from dataclasses import dataclass
from pathlib import Path

#: Longest time between two touches of a ledger file by its owner, in seconds.
BEAT_S = 60.0
#: An owner on another host that did not touch its file for so long is dead, in seconds. Caches of a network disk show a
#: touch up to a minute late (nfs(5): acregmax = 60), a suspended file server for minutes.
DEAD_S = 900.0
#: How long a detached session's jobs may stand unless it says otherwise, in seconds: a held queue over a long weekend.
DEFAULT_LEASE_S = 7 * 86400.0


@dataclass(frozen=True)
class Owner:
    """Who holds a lease. Process ids are used again: start time and boot id tell one process from the next."""

    uid: int
    host: str
    boot: str
    pid: int
    start: int  #: clock ticks since boot, field 22 of /proc/PID/stat (proc(5))
    pid_space: str = (
        ""  #: containers may share host name and kernel, and still not see each other's processes
    )

    @classmethod
    def me(cls) -> Owner:
        """Return this process."""
        pid = os.getpid()
        return cls(os.getuid(), socket.gethostname(), boot_id(), pid, start_of(pid) or 0, pid_space())

    def local(self) -> bool:
        """Whether this process can see the owner's."""
        if self.host != socket.gethostname():
            return False
        return self.boot != boot_id() or self.pid_space in {"", pid_space()}

    def alive(self, silent_s: float = 0.0) -> bool:
        """Whether the owner still runs; *silent_s* seconds ago its file was touched, by the file server's clock."""
        if not self.local():
            return silent_s < DEAD_S
        return self.boot == boot_id() and start_of(self.pid) == self.start


@dataclass(frozen=True)
class Lease:
    """How the jobs of one ledger file are held. ``until_ns`` (UTC) is None where the owner did not detach."""

    owner: Owner
    alive: bool
    until_ns: int | None = None

    def state(self, now_ns: int) -> str:
        """Return ``held`` (somebody watches), ``detached`` (nobody has to, yet) or ``expired``."""
        if self.until_ns is not None:
            return "detached" if now_ns < self.until_ns else "expired"
        return "held" if self.alive else "expired"


def shared_now_ns(folder: Path) -> int:
    """Return the time of the server of *folder*, in ns UTC: that of a file touched there a moment ago.

    Raises:
        OSError: nothing can be written there.
    """
    path = folder / f".clock-{uuid.uuid4().hex}"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.utime(path)  # without times: the server's own clock, also over NFS (RFC 8881, SET_TO_SERVER_TIME4)
        return path.stat().st_mtime_ns
    finally:
        os.close(file)
        with contextlib.suppress(OSError):
            path.unlink()


def boot_id() -> str:
    """Return the kernel's id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def pid_space() -> str:
    """Return the id of the process-id namespace of this process, empty where the kernel does not tell."""
    try:
        return os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - no file: the text is what is wanted
    except OSError:
        return ""


def start_of(pid: int) -> int | None:
    """Return the start time of a process in ticks since boot, None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command name may hold blanks and brackets; what follows its last bracket is well-formed.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])  # a zombie watches nothing
