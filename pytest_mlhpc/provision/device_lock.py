"""Device locks: measured runs on one machine take turns, across sessions, workers and users.

The machine and each device have a lock file, locked by flock(2), which the kernel frees with its holder. A run on named
devices shares the machine and owns its devices. A run without devices (on CPUs) owns the machine. A run that is not measured
shares the machine and owns nothing. Two more locks order the waiting runs. *turn* is taken first and is retained while
waiting, so that a busy session cannot starve another one. *door* is for runs that own nothing: they share it and need no
turn; a run that waits for the whole machine takes it alone. Locks are always taken in the order turn, door, machine, devices,
and a waiting run retains only the first two: no circle of waiting runs can arise.

Each user has such locks in a folder of their own, which no other user can take; the machine's, of all users, come next.
A run waits for another user's locks, but not for ever: a lock that any user may take must not stop anybody.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pwd
import re
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_mlhpc.errors import ProvisionError
from pytest_mlhpc.node.files import make_private

#: The folder of lock files without ``MLHPC_LOCK_DIR``: one for all users of a machine.
DIRECTORY = "/tmp/mlhpc-locks"  # noqa: S108 - sticky, links are not followed, and the files hold nothing of value

#: Every user may create files in it, and none may replace another's.
_SHARED_MODE = 0o1777

#: How long a run waits for another user's lock on the machine, in seconds.
FOREIGN_LIMIT_S = 600.0

_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class DeviceLock:
    """Locks on one device set, for one run at a time. All calls return at once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._place: list[int] = []  # descriptors of turn and door, in this order
        self._locks: list[int] = []  # descriptors of machine and devices
        self.holder: LockHolder | None = None  #: of the lock that the last call did not get

    def acquire(self, devices: Sequence[str]) -> str:
        """Try to lock the machine, or *devices* of it. Return an empty string, or which lock is taken by whom.

        After a failed try this object is next in line, until :meth:`release`.

        Raises:
            ProvisionError: ``launch_failed``, a lock file cannot be used; the text names it.
        """
        place = [("turn", fcntl.LOCK_EX)]
        if devices:
            owned = [(device, fcntl.LOCK_EX) for device in sorted(set(devices))]
            return self._take_all(place, [("machine", fcntl.LOCK_SH), *owned])
        return self._take_all([*place, ("door", fcntl.LOCK_EX)], [("machine", fcntl.LOCK_EX)])

    def share(self) -> str:
        """Try to share the machine with others. Returns and raises as :meth:`acquire` does."""
        return self._take_all([("door", fcntl.LOCK_SH)], [("machine", fcntl.LOCK_SH)])

    def _take_all(self, place: list[tuple[str, int]], locks: list[tuple[str, int]]) -> str:
        """Take what is missing of *place*, which is retained after a failure, and *locks*, which are then released."""
        for name, kind in place[len(self._place) :]:
            if not self._lock(name, kind, self._place):
                return f"waiting in line behind {self.holder}"
        for name, kind in locks:
            if not self._lock(name, kind, self._locks):
                _close(self._locks)
                what = f"the {name}" if name == "machine" else f"device {name}"
                return f"waiting for {what}: in use by {self.holder}"
        _close(self._place)
        return ""

    def release(self) -> None:
        """Release all locks, and the place in the line. Idempotent."""
        _close(self._locks)
        _close(self._place)

    def _lock(self, name: str, kind: int, descriptors: list[int]) -> bool:
        """Take one lock and add its descriptor; return False, and set ``holder``, where it is taken."""
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
            self.holder = holder_of(fd)
            os.close(fd)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise ProvisionError("launch_failed", f"cannot lock {path}: {error.strerror}") from error
            return False
        descriptors.append(fd)
        with contextlib.suppress(
            OSError
        ):  # only information for others; another user's file may be read-only
            os.truncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        return True


class MachineLock:
    """This user's locks, then the machine's, as one. All calls return at once.

    ``beside`` names the holder that this run did not wait for any longer, so that it shares the machine.
    """

    def __init__(self, environment: Mapping[str, str], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._folder, self._shared_folder = own_directory(environment), lock_directory(environment)
        self._own, self._common = DeviceLock(self._folder), DeviceLock(self._shared_folder)
        self._own_turn = False
        self._since: float | None = None  #: start of the wait for another user, in seconds
        self.beside = ""

    def acquire(self, devices: Sequence[str]) -> str:
        """Try to lock the machine, or *devices* of it. Returns and raises as :meth:`DeviceLock.acquire` does."""
        return self._take(lambda lock: lock.acquire(devices))

    def share(self) -> str:
        """Try to share the machine with others. Returns and raises as :meth:`acquire` does."""
        return self._take(DeviceLock.share)

    def release(self) -> None:
        """Release all locks, and the place in both lines. Idempotent."""
        self._common.release()
        self._own.release()
        self._own_turn, self._since = False, None

    def _take(self, ask: Callable[[DeviceLock], str]) -> str:
        if not self._own_turn:
            self._prepare()
            if reason := ask(self._own):
                return reason
            self._own_turn = True
        reason = ask(self._common)
        holder = self._common.holder or LockHolder(0)
        if not reason or holder.uid == os.geteuid():
            self._since = None
            return reason
        now = self._clock()
        self._since = now if self._since is None else self._since
        if now - self._since < FOREIGN_LIMIT_S:
            return (
                f"{reason}{holder.user}; for at most {FOREIGN_LIMIT_S:g} s, then this run goes on beside it"
            )
        self._common.release()
        self.beside = f"not alone on this machine: {holder}{holder.user} did not give its lock back within {FOREIGN_LIMIT_S:g} s"
        return ""

    def _prepare(self) -> None:
        try:
            prepare_directory(self._shared_folder)
            make_private(self._folder)
        except OSError as error:
            text = f"cannot use the locks in {error.filename or self._folder}: {error.strerror}"
            raise ProvisionError(
                "launch_failed", f"{text}; set MLHPC_LOCK_DIR to a folder of yours"
            ) from error


@dataclass(frozen=True)
class LockHolder:
    """Holder of a lock: process and user by the kernel, else the process by the file's content; 0 and None: unknown."""

    pid: int
    uid: int | None = None

    def __str__(self) -> str:
        """Return the process, or that it is this one."""
        return "this session" if self.pid == os.getpid() else f"process {self.pid or 'unknown'}"

    @property
    def user(self) -> str:
        """Text about the user that follows the process; empty if the user is unknown."""
        if self.uid is None:
            return ""
        try:
            return f" of user {pwd.getpwuid(self.uid).pw_name} (uid {self.uid})"
        except KeyError:
            return f" of user {self.uid}"


def holder_of(fd: int, locks: Path = Path("/proc/locks")) -> LockHolder:
    """Return the holder of a flock(2) on the file of *fd* (proc(5)); the file's content is only the second choice."""
    found = os.fstat(fd)
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    with contextlib.suppress(OSError, ValueError):
        for line in locks.read_bytes().decode("ascii", "replace").splitlines():
            # 1: FLOCK ADVISORY WRITE 4711 08:01:1234 0 EOF; with an arrow: a waiting process
            fields = line.split()
            if fields[1:2] == ["FLOCK"] and fields[5] == place and int(fields[4]) > 0:
                return LockHolder(int(fields[4]), _user_of(int(fields[4])))
    content = os.pread(fd, 64, 0).decode("ascii", "replace").strip()
    return LockHolder(int(content) if content.isascii() and content.isdigit() else 0)


def _user_of(pid: int) -> int | None:
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None


def _close(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())


def lock_directory(environment: Mapping[str, str]) -> Path:
    """Return the folder of this machine's locks."""
    return Path(environment.get("MLHPC_LOCK_DIR") or DIRECTORY)


def own_directory(environment: Mapping[str, str]) -> Path:
    """Return the folder of this user's locks on this machine; never on a disk that other machines share."""
    me = os.geteuid()
    if given := environment.get("MLHPC_LOCK_DIR"):
        return Path(given) / str(me)
    if runtime := environment.get("XDG_RUNTIME_DIR"):
        with contextlib.suppress(OSError):
            if Path(runtime).stat().st_uid == me:  # `su` may leave another user's
                return Path(runtime) / "mlhpc-locks"
    return Path(f"{DIRECTORY}-{me}")


def prepare_directory(directory: Path) -> None:
    """Create the directory if it is missing, for all users, and refuse one that is not safe to share.

    Raises:
        OSError: it cannot be created, is a link or no directory, or other users may replace files in it.
    """
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
        directory.chmod(_SHARED_MODE)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "it is no directory", str(directory))
    if str(directory) == DIRECTORY and found.st_uid == os.geteuid():
        # Its creator may have died before it was opened to all. A folder that a user chose is not changed.
        if stat.S_IMODE(found.st_mode) != _SHARED_MODE:
            directory.chmod(_SHARED_MODE)
        return
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise PermissionError(
            errno.EPERM, "everybody may replace files in it (no sticky bit)", str(directory)
        )


def _open(path: Path) -> int:
    """Open a lock file that may be another user's.

    Linux refuses O_CREAT on another user's file in a sticky directory (fs.protected_regular), hence two steps.
    """
    for _ in range(8):  # another process may create or remove it between the steps
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
