"""Files: how they are appended to, replaced and synced; which may be obeyed; which lie on a network; JSON and text of others; what a failed write is called."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import stat
import tempfile
from pathlib import Path
from typing import Any, Callable, Iterable, Optional, Union

#: Outcome of what is refused here (``store/record.py``).
UNSAFE = "unsafe_directory"

#: Exit code of a batch, and of a job script, that refuse to begin with such a file (EX_CONFIG of sysexits.h).
EXIT_UNSAFE = 78

PRIVATE_FOLDER, PRIVATE_FILE = 0o700, 0o600
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  #: not to wait for who might open a FIFO
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class UnsafeDirectoryError(PermissionError):
    """Another user may have written, or may write, what would be obeyed. ``strerror`` says what, whose, and what to do."""

    def __init__(self, path: Path, why: str) -> None:
        advice = (
            "nothing of it was obeyed; find out who did that, and use a state directory that is yours alone"
        )
        super().__init__(errno.EPERM, f"{why}: {advice}", str(path))


def outcome_of(error: OSError, otherwise: str) -> str:
    """Return the outcome of what ended with *error*: ``unsafe_directory`` if it was refused here."""
    return UNSAFE if isinstance(error, UnsafeDirectoryError) else otherwise


def make_private(folder: Path) -> None:
    """Make *folder*, or take it as it is if it is ours, and close it to all others. Its parent has to be there.

    Raises:
        UnsafeDirectoryError: another user's folder, or a link, lies there.
        OSError: it cannot be made.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(PRIVATE_FOLDER)
    descriptor = _open_folder(folder)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid():
            raise UnsafeDirectoryError(folder, f"it belongs to {_name(found.st_uid)}, not to this user")
        if stat.S_IMODE(found.st_mode) != PRIVATE_FOLDER:
            os.fchmod(descriptor, PRIVATE_FOLDER)  # also without the setgid bit that its parent hands down
    finally:
        os.close(descriptor)


def own_folder(root: Path, name: str) -> Path:
    """Return this user's folder *name* below *root*, which a group may share: who came first has *name*, others *name*-<uid>."""
    try:
        ours = (root / name).lstat().st_uid == os.geteuid()
    except OSError:  # nobody's yet, or not visible: who makes it gets the error
        ours = True
    return root / (name if ours else f"{name}-{os.geteuid()}")


def open_private(path: Path, flags: int = os.O_RDONLY) -> int:
    """Return a descriptor of a regular file that only this user, or root, can have written. With O_CREAT its mode is 0600.

    Raises:
        UnsafeDirectoryError: it or its folder is another user's, open to be written by others, or a link.
        OSError: it cannot be opened; ``filename`` is set.
    """
    folder = _open_folder(path.parent)
    try:
        refuse_others(path.parent, os.fstat(folder))
        descriptor = os.open(path.name, flags | _FILE, PRIVATE_FILE, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UnsafeDirectoryError(path, "it is a link") from error
        error.filename = error.filename if isinstance(error, UnsafeDirectoryError) else str(path)
        raise
    finally:
        os.close(folder)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise UnsafeDirectoryError(path, "it is no regular file")
        refuse_others(path, found)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def check_private(path: Path) -> None:
    """Open *path* as :func:`open_private` does, for what another program is to read. Raises as it does."""
    os.close(open_private(path))


def read_private(path: Path) -> bytes:
    """Return the content of a file that only this user can have written. Raises as :func:`open_private` does."""
    with os.fdopen(open_private(path), "rb") as file:
        return file.read()


def _open_folder(folder: Path) -> int:
    try:
        return os.open(str(folder), _FOLDER)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and folder.is_symlink():
            raise UnsafeDirectoryError(folder, "it is a link, not the folder that was made here") from error
        raise


def refuse_others(path: Path, found: os.stat_result) -> None:
    """Raise UnsafeDirectoryError if another user than root owns it, or may change it, as read from an open descriptor.

    In a sticky folder nobody replaces what is another's.
    """
    if found.st_uid not in (os.geteuid(), 0):
        raise UnsafeDirectoryError(path, f"it belongs to {_name(found.st_uid)}")
    mode = stat.S_IMODE(found.st_mode)
    sticky = stat.S_ISDIR(found.st_mode) and mode & stat.S_ISVTX
    if mode & _OTHERS_WRITE and not sticky:
        who = "everybody" if mode & stat.S_IWOTH else f"group {found.st_gid}"
        raise UnsafeDirectoryError(path, f"{who} may change it (mode {mode:04o})")


def _name(uid: int) -> str:
    import pwd

    try:
        return f"user {pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"user {uid}"


def append_lines(descriptor: int, lines: bytes, *, durable: bool = True) -> None:
    """Append whole *lines*, or leave the file as it was. The descriptor is open to read and to append.

    A line that a dead writer left unfinished is ended first. Without *durable* a power cut may still lose the lines.

    Raises:
        OSError: disk full, over quota, a disk error.
    """
    size = os.fstat(descriptor).st_size
    torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
    rest = memoryview(b"\n" + lines if torn else lines)
    try:
        while rest:  # a short write means a full disk or a limit: the next write says which
            rest = rest[os.write(descriptor, rest) :]
        if durable:
            os.fsync(descriptor)
    except OSError:
        with contextlib.suppress(OSError):  # where even that fails, readers skip the torn line
            os.ftruncate(descriptor, size)
        raise


#: How the name of an unfinished file ends.
UNFINISHED = ".part"


def replace_file(
    path: Path,
    content: Union[bytes, memoryview, Iterable[bytes]],
    *,
    mode: Optional[int] = None,
    prefix: str = "",
    durable: bool = True,
    ready: Optional[Callable[[int], None]] = None,
) -> None:
    """Replace *path* by *content* in one step: readers see the old file or the new one, whatever dies.

    *ready* gets the descriptor of the finished file, just before it takes its place; what it raises leaves the old file.

    Without *mode* an old file keeps its own, and a new one gets 0664 less the umask. The unfinished file is called
    ``.NAME.*.part``, or ``PREFIX*.part``. Without *durable* a power cut may still lose the content.

    Raises:
        OSError: disk full, over quota, not writable. The old file is left as it was, and nothing else is left.
    """
    descriptor, name = tempfile.mkstemp(UNFINISHED, prefix or f".{path.name}.", str(path.parent))
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines([content] if isinstance(content, (bytes, memoryview)) else content)
            file.flush()
            os.fchmod(descriptor, _mode_of(path) if mode is None else mode)
            if durable:
                os.fsync(descriptor)
            if ready is not None:
                ready(descriptor)
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


def _mode_of(path: Path) -> int:
    """Return the mode of the file *path*; where none is there, or a link, 0664 less the umask."""
    with contextlib.suppress(FileNotFoundError):
        found = path.lstat().st_mode
        if stat.S_ISREG(found):
            return stat.S_IMODE(found)
    return 0o664 & ~_umask()


def _umask() -> int:
    """Return this process's umask without changing it (proc(5), status; 022 where that is not to be had)."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o022


def sync_folder(folder: Path) -> None:
    """Make names in *folder* outlive a power cut, where its file system can.

    Raises:
        OSError: a disk error.
    """
    descriptor = os.open(str(folder), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that sync no folders
            raise
    finally:
        os.close(descriptor)


#: File systems of clusters on which locks may be missing, slow or advisory to one node only.
NETWORK = frozenset({
    "nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "fuse", "9p", "afs", "orangefs", "pvfs2", "wekafs",
    "panfs", "daos", "vast", "virtiofs", "fhgfs", "glusterfs",
})  # fmt: skip

#: Where the kernel tells what is mounted (proc(5)).
MOUNTS = Path("/proc/self/mountinfo")


def file_system(path: Path, mounts: Path) -> str:
    """Return the type of the file system that *path* lies on (``fuse.x`` as ``fuse``); empty where it is not known.

    Source: proc(5), ``/proc/pid/mountinfo``; the last of the longest matching mount points is the one on top.
    """
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    target, best, found = path.resolve(), -1, ""
    for line in lines:
        head, _, tail = line.partition(" - ")
        fields = head.split()
        if len(fields) < 5 or not tail:
            continue
        mount = Path(fields[4].replace("\\040", " "))
        if len(mount.parts) >= best and target.is_relative_to(mount):
            best, found = len(mount.parts), tail.split()[0].partition(".")[0]
    return found


#: Most digits of a whole number: each that is shorter is a float too (the largest has 309).
_DIGITS = 300


def read_json(text: str | bytes | bytearray) -> Any:
    """Return what *text* holds.

    Raises:
        ValueError: it is no JSON (RFC 8259, so no NaN and no Infinity either), nested too deeply for the parser, or holds a
            number that no float holds.
    """
    try:
        return json.loads(text, parse_constant=_constant, parse_float=_float, parse_int=_integer)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _constant(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large a number")
    return value


def _integer(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"{text[:40]}... is too large a number")
    return int(text)


#: ``errno`` values that mean "there is no room": on a disk, in a quota, or within the largest file that is allowed.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def clean(text: str) -> str:
    """Return *text* without anything that a terminal would obey; line ends stay."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


def unwritten(error: BaseException) -> str:
    """Return the outcome for a file that could not be written: *error*, or its cause, says why."""
    cause = error if isinstance(error, OSError) else error.__cause__
    if isinstance(cause, UnsafeDirectoryError):
        return UNSAFE
    another = isinstance(cause, OSError) and cause.errno not in {None, *NO_ROOM}
    return "not_writable" if another else "disk_full"


#: Parts of names, as a guess on the safe side.
_SECRET = re.compile(r"TOKEN|SECRET|PASS|_PWD|KEY|CRED|AUTH|BEARER|COOKIE|PRIVATE", re.IGNORECASE)


def may_be_secret(name: str) -> bool:
    """Return whether the variable of this name may hold a secret."""
    return bool(_SECRET.search(name))
