"""A free range of ports, also when several clusters start at the same moment."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from testcluster.errors import ClusterError

#: Below every port that the kernel gives away by itself (ip_local_port_range, 32768 and up).
FIRST, LAST, STRIDE = 17000, 31000, 16

#: Where ranges are claimed. Ports are one machine's, whatever TMPDIR says to each `up`.
CLAIMS = Path("/tmp") / f"mlhpc-slurm-ports-{os.geteuid()}"  # noqa: S108 - nobody else may write there


@contextlib.contextmanager
def free_range(count: int, owner: Path, *, first: int | None = None) -> Iterator[int]:
    """Yield the first of ``count`` free ports in a row. While *owner* exists no other ``up`` is given them.

    A daemon that was stopped for a test leaves its port free, and finds it free when it is started again.

    Args:
        count: How many.
        owner: The directory of what takes them.
        first: Take these and no others; None: the first free range.

    Raises:
        ClusterError: They are taken, or no range is free.
    """
    owner = owner.absolute()
    candidates = [first] if first is not None else list(range(FIRST, LAST, STRIDE))
    for port in candidates:
        claim = _claim(port)
        if claim is None:
            continue
        try:
            if _is_unowned(claim, owner) and all(_is_free(port + offset) for offset in range(count)):
                os.pwrite(claim, bytes(owner), 0)
                os.truncate(claim, len(bytes(owner)))
                yield port
                return
        finally:
            os.close(claim)
    if first is not None:
        raise ClusterError(
            f"--port {first}: a port from {first} to {first + count - 1} is in use; leave --port away"
        )
    raise ClusterError(f"no {count} free ports in a row between {FIRST} and {LAST}")


def _claim(port: int) -> int | None:
    """Return a locked file descriptor that stands for the range, None when another ``up`` holds it."""
    CLAIMS.mkdir(mode=0o700, exist_ok=True)
    if CLAIMS.lstat().st_uid != os.geteuid():
        raise ClusterError(f"{CLAIMS} belongs to somebody else")
    descriptor = os.open(CLAIMS / str(port), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _is_unowned(claim: int, owner: Path) -> bool:
    """Whether the directory for which a range was taken last is gone, or is *owner*."""
    taken = Path(os.fsdecode(os.pread(claim, 4096, 0)))
    return taken == owner or not taken.name or not taken.exists()


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # as Slurm does: old connections do not count
        try:
            probe.bind(("0.0.0.0", port))  # noqa: S104 - closed again at once, never listening
        except OSError:
            return False
    return True


def answers(where: int | Path) -> bool:
    """Return whether somebody listens there: at a port of loopback, or at a Unix socket, whose file is there before it listens."""
    family, address = (
        (socket.AF_UNIX, str(where)) if isinstance(where, Path) else (socket.AF_INET, ("127.0.0.1", where))
    )
    with socket.socket(family) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(address) == 0
