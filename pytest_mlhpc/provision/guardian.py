"""The guardian: one small process for each session that ends everything the session started, however it died.

Started as ``python -I -S guardian.py SESSION SOCKETS`` with a pipe from the harness as standard input. It is a module, too:
:func:`end_processes` finds processes by a variable in their environment, which children inherit in every session, group or
daemon, and by a resource limit, which those that clear their environment inherit, too. It imports little, and only the
standard library, so that it starts in milliseconds and stays small.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
import zlib

#: Time between SIGTERM and SIGKILL, in seconds: all processes have to end within two seconds after the session.
GRACE_S = 1.0

#: Time limit for processes to vanish after SIGKILL, in seconds.
KILL_LIMIT_S = 10.0

#: Longest interval between two scans of /proc, in seconds: processes may start others meanwhile.
SCAN_INTERVAL_S = 0.2

#: A bit above all numbers of allocations; and variable -> column of its number in a line of /proc/PID/limits ("Max file
#: locks SOFT HARD locks").
_SESSIONS = 1 << 62
_COLUMNS = {"MLHPC_ALLOCATION": 3, "MLHPC_SESSION": 4}

#: Name of the socket in its folder (node/batch/server.py).
SOCKET = "s"

#: Longest folder for socket folders: a socket's path has at most 107 bytes (unix(7)), "/mlhpc-", 40 characters of the
#: session, ".", 8 that mkdtemp chooses, and "/s" take 58.
LONGEST_BASE = 49


def mark_of(session_id: str, allocation_id: str) -> str:
    """Return the soft and hard limit of locks (RLIMIT_LOCKS) that mark a program and all its descendants.

    They are inherited independently of environment, process group and descriptors, and limit nothing since Linux 2.4.25
    (setrlimit(2)). The soft limit is the allocation's number, the hard one, which is always higher, the session's.
    """
    return f"{_number(allocation_id)}:{_SESSIONS | _number(session_id)}"


def _number(text: str) -> int:
    """Return a hash of *text*, of 61 bits."""
    content = text.encode()
    return (zlib.crc32(content) << 29) ^ zlib.crc32(content[::-1])


def processes_with(cookie: bytes, candidates: list[int] | None = None) -> list[int]:
    """Return live processes of this user (all users' for root) that inherited *cookie* (``NAME=value``).

    It is in their environment, or, for an allocation or session, in their limits (:func:`mark_of`).
    """
    if candidates is None:
        candidates = [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - a light script
    own, name, value = os.getpid(), *cookie.decode().split("=", 1)
    whole = b"\0" + cookie + b"\0"
    number = str(_number(value) | (_SESSIONS if name == "MLHPC_SESSION" else 0))
    column = _COLUMNS.get(name)
    return [
        pid
        for pid in candidates
        if pid != own
        and (whole in b"\0" + _read(pid, "environ") + b"\0" or (column and _limit(pid, column) == number))
    ]


def _limit(pid: int, column: int) -> str:
    """Return a limit of locks of a process; empty for a zombie, whose limits are readable, too."""
    for line in _read(pid, "limits").decode().splitlines():
        if line.startswith("Max file locks"):
            ended = _read(pid, "stat").rpartition(b") ")[2][:1] in {b"Z", b"X", b""}
            return "" if ended else line.split()[column]
    return ""


def _read(pid: int, name: str) -> bytes:
    """Return a file of a process; empty if the process is gone, a zombie, or another user's."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:  # noqa: PTH123 - a light script
            return file.read()
    except OSError:
        return b""


def end_processes(
    name: str, value: str, grace_s: float = GRACE_S, candidates: list[int] | None = None
) -> list[int]:
    """End all processes that carry the variable *name* = *value*: SIGTERM, after *grace_s* seconds SIGKILL.

    Returns when none is left, or after ``KILL_LIMIT_S`` with those that survived SIGKILL. *candidates* limits the first scan
    to these pids; if it finds none, there is no further scan.
    """
    cookie = f"{name}={value}".encode()
    start = time.monotonic()
    signalled: dict[int, int] = {}
    left = processes_with(cookie, candidates)
    while left:
        passed = time.monotonic() - start
        if passed > grace_s + KILL_LIMIT_S:
            break
        number = signal.SIGTERM if passed < grace_s else signal.SIGKILL
        _send_signal(left, number, signalled)
        until = grace_s - passed if passed < grace_s else SCAN_INTERVAL_S
        _wait_for(left, min(until, SCAN_INTERVAL_S))
        left = processes_with(cookie)
    return left


def reap_session(session_id: str) -> list[int]:
    """End the processes and remove the sockets of a dead session; return processes that did not end."""
    left = end_processes("MLHPC_SESSION", session_id)
    remove_socket_folders(session_id, socket_base())
    return left


def socket_base() -> str:
    """Return the parent of socket folders: the temporary directory, if the path of a socket in it is short enough."""
    import tempfile  # here, as it imports much

    base = tempfile.gettempdir()
    return base if len(base) <= LONGEST_BASE else "/tmp"  # noqa: S108 - mkdtemp makes private folders


def socket_prefix(session_id: str) -> str:
    """Return the prefix of a session's socket folders."""
    return f"mlhpc-{session_id[:40]}."


def remove_socket_folders(session_id: str, base: str) -> None:
    """Remove this user's socket folders of a session below *base*. Its processes have ended."""
    try:
        names = os.listdir(base)  # noqa: PTH208 - a light script
    except OSError:
        return
    for name in names:
        if name.startswith(socket_prefix(session_id)):
            remove_socket_folder(f"{base}/{name}")


def remove_socket_folder(path: str) -> None:
    """Remove a folder with its socket, unless it is a link, another user's, or holds other files."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return  # gone, or another user's
    try:
        if os.fstat(fd).st_uid == os.geteuid():
            if SOCKET in os.listdir(fd):  # noqa: PTH208 - a descriptor: the folder cannot be replaced meanwhile
                os.unlink(SOCKET, dir_fd=fd)
            os.rmdir(path)  # noqa: PTH106 - a light script
    except OSError:
        return  # it is not empty, or another process removed it
    finally:
        os.close(fd)


def _send_signal(pids: list[int], number: int, signalled: dict[int, int]) -> None:
    for pid in pids:
        if signalled.get(pid) != number:
            signalled[pid] = number
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


def detach() -> None:
    """Ignore the signals that end the harness, as its guardian must outlive it, and leave its directory."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")


def wait_for_harness() -> bool:
    """Return True once the harness sent ``q`` on standard input; False once it ended or closed the pipe without."""
    watched = [0]
    try:
        # A process forked by the harness may have the pipe open beyond its death.
        watched.append(os.pidfd_open(os.getppid()))
    except OSError:
        watched.append(0)
    while True:
        ready = select.select(watched, [], [])[0]
        if 0 in ready:
            data = os.read(0, 4096)
            if b"q" in data or not data:
                return bool(data)
        elif watched[1] in ready:
            return False


def main(session_id: str, base: str) -> int:
    """Wait for the harness to end or to close the pipe, then end what it started."""
    detach()
    wait_for_harness()
    end_processes("MLHPC_SESSION", session_id)
    remove_socket_folders(session_id, base)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
