"""The guardian: one small process for each session that ends everything the session started, however it died.

Started as ``python -I -S guardian.py SESSION SOCKETS`` with a pipe from the harness as standard input. It also serves as a
module: :func:`end_processes` finds processes by a variable in their environment, which follows children wherever they
go (another session or process group, a daemon below init). It imports the standard library only, and little of it, so
that it starts in milliseconds and stays small.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

#: Time between SIGTERM and SIGKILL, in seconds: everything has to be gone two seconds after the session.
GRACE_S = 1.0

#: How long processes may take to vanish after SIGKILL before we give up, in seconds.
KILL_LIMIT_S = 10.0

#: Longest wait between two looks at /proc, in seconds: processes may start others while we end them.
LOOK_AGAIN_S = 0.2


#: Name of the socket in its folder (batch/server.py).
SOCKET = "s"

#: Longest folder for socket folders: a socket's path has at most 107 bytes (unix(7)), "/mlhpc-", 40 characters of the
#: session, ".", 8 that mkdtemp chooses, and "/s" take 58.
LONGEST_BASE = 49


def processes_with(cookie: bytes, candidates: list[int] | None = None) -> list[int]:
    """Return live processes of this user (all users' for root) whose environment holds *cookie* (``NAME=value``)."""
    if candidates is None:
        candidates = [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - a light script
    own, found = os.getpid(), []
    whole = b"\0" + cookie + b"\0"
    for pid in candidates:
        if pid == own:
            continue
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123 - a light script
                if whole in b"\0" + file.read() + b"\0":  # empty for zombies
                    found.append(pid)
        except OSError:
            continue  # gone, or another user's
    return found


def end_processes(
    name: str, value: str, grace_s: float = GRACE_S, candidates: list[int] | None = None
) -> list[int]:
    """End all processes that carry the variable *name* = *value*: SIGTERM, after *grace_s* seconds SIGKILL.

    Returns when none is left, or after ``KILL_LIMIT_S`` with those that not even SIGKILL ended. *candidates* limits the
    first look to these pids; nothing more is looked at when it finds none.
    """
    cookie = f"{name}={value}".encode()
    start = time.monotonic()
    told: dict[int, int] = {}
    left = processes_with(cookie, candidates)
    while left:
        passed = time.monotonic() - start
        if passed > grace_s + KILL_LIMIT_S:
            break
        number = signal.SIGTERM if passed < grace_s else signal.SIGKILL
        _tell(left, number, told)
        until = grace_s - passed if passed < grace_s else LOOK_AGAIN_S
        _wait_for(left, min(until, LOOK_AGAIN_S))
        left = processes_with(cookie)
    return left


def reap_session(session_id: str) -> list[int]:
    """End and remove what a dead session left behind (its guardian died too); return what could not be ended."""
    left = end_processes("MLHPC_SESSION", session_id)
    remove_socket_folders(session_id, socket_base())
    return left


def socket_base() -> str:
    """Return where socket folders lie: the temporary directory, if the path of a socket in it is short enough."""
    import tempfile  # here, for it imports much

    base = tempfile.gettempdir()
    return base if len(base) <= LONGEST_BASE else "/tmp"  # noqa: S108 - mkdtemp makes what lies there private


def socket_prefix(session_id: str) -> str:
    """Return how the names of a session's socket folders begin."""
    return f"mlhpc-{session_id[:40]}."


def remove_socket_folders(session_id: str, base: str) -> None:
    """Remove the socket folders of a session below *base* that are this user's. Its processes have ended."""
    try:
        names = os.listdir(base)  # noqa: PTH208 - a light script
    except OSError:
        return
    for name in names:
        if name.startswith(socket_prefix(session_id)):
            remove_socket_folder(f"{base}/{name}")


def remove_socket_folder(path: str) -> None:
    """Remove a folder with its socket, unless it is a link, another user's, or holds anything else."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return  # gone, or not ours
    try:
        if os.fstat(fd).st_uid == os.geteuid():
            if SOCKET in os.listdir(fd):  # noqa: PTH208 - a descriptor: nobody can replace the folder meanwhile
                os.unlink(SOCKET, dir_fd=fd)
            os.rmdir(path)  # noqa: PTH106 - a light script
    except OSError:
        return  # it is not empty, or somebody else removed it: nothing of ours is left to do
    finally:
        os.close(fd)


def _tell(pids: list[int], number: int, told: dict[int, int]) -> None:
    for pid in pids:
        if told.get(pid) != number:
            told[pid] = number
            try:
                os.kill(pid, number)
            except OSError:
                continue


def _wait_for(pids: list[int], timeout_s: float) -> None:
    """Wait until all *pids* have ended, at most *timeout_s*."""
    deadline = time.monotonic() + max(0.0, timeout_s)
    poll, fds = select.poll(), []  # not select(): descriptors of a large harness go beyond its 1,024
    for pid in pids:
        try:
            fds.append(os.pidfd_open(pid))
        except OSError:
            continue  # gone, or a kernel before 5.3: then we wait the whole time
        poll.register(fds[-1], select.POLLIN)
    waiting = len(fds)
    while (waiting or not fds) and (rest := deadline - time.monotonic()) > 0:
        for fd, _ in poll.poll(rest * 1000):
            poll.unregister(fd)
            waiting -= 1
    for fd in fds:
        os.close(fd)


def main(session_id: str, base: str) -> int:
    """Wait for the harness to end or to close the pipe, then end what it started."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(
            number, signal.SIG_IGN
        )  # whoever ends the harness by these must not end its guardian before it
    os.chdir("/")
    watched = [0]
    try:
        # A process forked by the harness may hold the pipe open beyond its death.
        watched.append(os.pidfd_open(os.getppid()))
    except OSError:
        watched.append(0)
    while True:
        ready = select.select(watched, [], [])[0]
        if watched[1] in ready or not os.read(0, 4096):
            break
    end_processes("MLHPC_SESSION", session_id)
    remove_socket_folders(session_id, base)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
