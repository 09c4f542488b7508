"""PAYLOAD. The secret of one vetting's processes where nobody has set ``MLHPC_VET_KEY``: a file that only this user can read.

All processes of a job see its folder (that of the verdict, else the one that they were started in) if it is on a network file
system. The first that comes makes the file, the others read it. On a disk of the node's own there is none: then the processes
know each other by the job's numbers, which others may know, too. A vetting that is killed outright leaves its file; the next one
removes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import time
from pathlib import Path
from typing import Callable, Dict, Mapping, Tuple

from pytest_mlhpc.node.disks import MOUNTS, NETWORK, file_system
from pytest_mlhpc.node.private import PRIVATE_FILE, refuse_others
from pytest_mlhpc.node.vet.rendezvous import COMMON

KEY = "MLHPC_VET_KEY"

#: What is the same on all nodes; the others may be the root of one container or virtual machine.
SHARED = NETWORK - {"fuse", "9p", "virtiofs"}

#: Bytes of a secret, and how long whoever makes the file may take to write them, in seconds.
SECRET_BYTES, WRITE_S = 32, 10.0

#: All processes of a job have read the file within minutes of its start: so old a one is a killed vetting's, in seconds.
STALE_S = 86400.0


def shared_key(
    environ: Mapping[str, str], out: str, kind: Callable[[Path, Path], str] = file_system
) -> Tuple[str, Dict[str, str]]:
    """Return the path of the file and the variable that holds its secret. Raises as :func:`job_key`."""
    path = key_file(environ, out, kind)
    if path:
        _remove_stale(Path(path).parent)
    return path, job_key(path) if path else {}


def key_file(environ: Mapping[str, str], out: str, kind: Callable[[Path, Path], str] = file_system) -> str:
    """Return the path of the file; empty where a key is set, nothing tells one job from another, or no folder is shared."""
    numbers = [f"{name}={environ[name]}" for name in COMMON if environ.get(name)]
    folder = Path(out).absolute()
    if environ.get(KEY) or not numbers or kind(folder, MOUNTS) not in SHARED:
        return ""
    return str(folder / f".mlhpc-vet-{hashlib.sha256(repr(numbers).encode()).hexdigest()[:16]}.key")


def _remove_stale(folder: Path) -> None:
    """Remove this user's files of killed vettings; what cannot be looked at or removed stays."""
    with contextlib.suppress(OSError):
        for path in folder.glob(".mlhpc-vet-*.key"):
            with contextlib.suppress(OSError):  # another process was faster
                found = path.lstat()
                if found.st_uid == os.getuid() and found.st_mtime < time.time() - STALE_S:
                    path.unlink()


def job_key(path: str) -> Dict[str, str]:
    """Return the variable that holds the secret of *path*, which is made if it is not there.

    Empty where no file can be made, which all processes of the job find alike.

    Raises:
        UnsafeDirectoryError: another user has put a file there.
        OSError: the file cannot be read, or holds no secret.
    """
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with contextlib.suppress(OSError):  # it is there, or cannot be made
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags, PRIVATE_FILE)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(SECRET_BYTES))
    until = time.monotonic() + WRITE_S
    while True:
        try:
            descriptor = os.open(path, os.O_RDONLY | flags)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        with os.fdopen(descriptor, "rb") as file:
            refuse_others(Path(path), os.fstat(file.fileno()))
            found = file.read(2 * SECRET_BYTES + 1)
        if len(found) == 2 * SECRET_BYTES:
            return {KEY: found.decode("ascii", "replace")}
        if time.monotonic() > until:
            raise OSError(0, f"it holds no key; remove it, or set {KEY}", path)
        time.sleep(0.05)  # no synchronisation: on a network disk nobody tells that a file was written
