"""Device locks: measured runs on one machine take turns, across sessions, workers and users.

A lock file for the machine and one for each device, locked by flock(2), which the kernel frees with its holder. A run
on named devices shares the machine and owns its devices; a run without (on CPUs) owns the machine; what is not measured
shares the machine, and owns nothing. Who has to wait keeps the turn, one more lock that is taken first, so that a busy
session cannot starve another one. What owns nothing has no turn, for it need not wait for devices: it goes through the
door, a lock that it shares with its like, and that who waits for the whole machine keeps closed. Locks are always taken
in the order turn, door, machine, devices, and who has to wait keeps none but the first two: nobody waits in a circle.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from pytest_mlhpc.errors import ProvisionError

#: Where lock files lie unless ``MLHPC_LOCK_DIR`` says otherwise: one place for all users of a machine.
DIRECTORY = "/tmp/mlhpc-locks"  # noqa: S108 - sticky, links are not followed, and the files hold nothing of value

#: Everybody may make files in it, nobody may replace another's.
_FOR_ALL = 0o1777

_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class DeviceLock:
    """Locks on one device set, for one run at a time. All calls return at once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._line: list[int] = []  # turn and door, in this order
        self._held: list[int] = []

    def acquire(self, devices: Sequence[str]) -> str:
        """Try to get the machine, or *devices* of it. Return an empty string, or who holds what we want.

        After a try that failed it is our turn next, until :meth:`release`.

        Raises:
            ProvisionError: ``launch_failed``, a lock file cannot be used; the text names it.
        """
        line = [("turn", fcntl.LOCK_EX)]
        if devices:
            owned = [(device, fcntl.LOCK_EX) for device in sorted(set(devices))]
            return self._queue(line, [("machine", fcntl.LOCK_SH), *owned])
        return self._queue([*line, ("door", fcntl.LOCK_EX)], [("machine", fcntl.LOCK_EX)])

    def share(self) -> str:
        """Try to get a place on the machine beside others. Returns and raises as :meth:`acquire` does."""
        return self._queue([("door", fcntl.LOCK_SH)], [("machine", fcntl.LOCK_SH)])

    def _queue(self, line: list[tuple[str, int]], wanted: list[tuple[str, int]]) -> str:
        """Take *line*, as far as it is not ours yet, and *wanted*; of these nothing is kept after a failure."""
        for name, kind in line[len(self._line) :]:
            if holder := self._lock(name, kind, self._line):
                return f"waiting in line behind process {holder}"
        for name, kind in wanted:
            if holder := self._lock(name, kind, self._held):
                _close(self._held)
                return f"waiting for {name}: in use by process {holder}"
        _close(self._line)
        return ""

    def release(self) -> None:
        """Free what is held, and the place in the line. Idempotent."""
        _close(self._held)
        _close(self._line)

    def _lock(self, name: str, kind: int, held: list[int]) -> str:
        """Take one lock; return an empty string, or the pid of its holder."""
        path = self._directory / f"{re.sub(r'[^A-Za-z0-9_-]', '_', name)}.lock"
        try:
            prepare_directory(self._directory)
            fd = _open(path)
        except OSError as error:
            text = f"cannot use the lock {error.filename or path}: {error.strerror}; set MLHPC_LOCK_DIR to a folder of yours"
            raise ProvisionError("launch_failed", text) from error
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(fd, 64, 0).decode("ascii", "replace").strip()
            os.close(fd)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise ProvisionError("launch_failed", f"cannot lock {path}: {error.strerror}") from error
            return holder if holder.isdigit() else "unknown"
        held.append(fd)
        with contextlib.suppress(OSError):  # who holds it is a courtesy; another user's file may be read-only
            os.truncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        return ""


def _close(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())


def lock_directory(environment: Mapping[str, str]) -> Path:
    """Return where this machine's locks lie."""
    return Path(environment.get("MLHPC_LOCK_DIR") or DIRECTORY)


def prepare_directory(directory: Path) -> None:
    """Make the directory if need be, for all users, and refuse one that is not safe to share.

    Raises:
        OSError: it cannot be made, is a link or no directory, or others may replace files in it.
    """
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
        directory.chmod(_FOR_ALL)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "it is no directory", str(directory))
    if str(directory) == DIRECTORY and found.st_uid == os.geteuid():
        # Who made it may have died before it was opened to all. A folder that a user chose stays as the user made it.
        if stat.S_IMODE(found.st_mode) != _FOR_ALL:
            directory.chmod(_FOR_ALL)
        return
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise PermissionError(
            errno.EPERM, "everybody may replace files in it (no sticky bit)", str(directory)
        )


def _open(path: Path) -> int:
    """Open a lock file that may be another user's.

    Linux refuses O_CREAT on another user's file in a sticky directory (fs.protected_regular), hence two steps.
    """
    for _ in range(8):  # somebody may make or remove it between the steps
        for flags in (_FLAGS, _FLAGS & ~os.O_RDWR):
            with contextlib.suppress(FileNotFoundError, PermissionError):
                fd = os.open(path, flags)
                if stat.S_ISREG(os.fstat(fd).st_mode):
                    return fd
                os.close(fd)
                raise OSError(errno.EINVAL, "it is no regular file", str(path))
        with contextlib.suppress(FileExistsError):
            fd = os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o666)
            os.fchmod(fd, 0o666)  # whatever the umask: the next user has to lock it too
            return fd
    raise PermissionError(errno.EACCES, "it cannot be opened", str(path))
