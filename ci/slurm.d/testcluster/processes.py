"""Processes that outlive the command that started them: each is known by its pid *and* its start time, never by name."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from testcluster.errors import ClusterError

#: Between two looks at something that is about to happen, in seconds.
LOOK_EVERY_S = 0.03
#: How long the kernel may need to end what was killed, in seconds: a process that waits for a disk ends only then.
_END_LIMIT_S = 300.0


@dataclass(frozen=True)
class Process:
    """One process, once and for all: the kernel gives a pid away again, but not with the same start time."""

    pid: int
    #: In clock ticks since the machine started, field 22 of proc(5) stat.
    start: int

    def __str__(self) -> str:
        """Return how it is written into a file, see :func:`parse`."""
        return f"{self.pid} {self.start}"


def parse(text: str) -> Process | None:
    """Return the process that a file names; None for what is cut or is none."""
    pid, _, start = text.strip().partition(" ")
    return Process(int(pid), int(start)) if pid.isdecimal() and start.isdecimal() else None


def _stat(pid: int) -> list[str] | None:
    """Return the fields of proc(5) stat from the third one (state) on; None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def identify(pid: int) -> Process | None:
    """Return the live process that has this pid now.

    A zombie is dead: not every pid 1 collects what it inherits. But as long as threads of it end, its files and ports are open.
    """
    fields = _stat(pid)
    dead = not fields or fields[0] == "X" or (fields[0] == "Z" and int(fields[17]) <= 1)
    return Process(pid, int(fields[19])) if fields and not dead else None


def alive(process: Process | None) -> bool:
    """Return whether exactly this process lives."""
    return process is not None and identify(process.pid) == process


def parent(pid: int) -> int:
    """Return the pid of the parent, 0 when there is none."""
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def every_pid() -> Iterator[int]:
    """Yield the pids of all processes that can be seen."""
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())


def with_variable(name: str, value: str) -> list[Process]:
    """Return the live processes that were started with this environment variable."""
    wanted, found = f"{name}={value}".encode(), []
    for pid in every_pid():
        process = identify(pid)
        try:
            if process and wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(process)
        except OSError:
            continue
    return found


def descendants(ancestors: Sequence[Process]) -> list[Process]:
    """Return the live processes below these, however deep."""
    below = {process.pid for process in ancestors}
    parents = {pid: parent(pid) for pid in every_pid()}
    found: list[Process] = []
    grown = True
    while grown:
        new = [pid for pid, above in parents.items() if above in below and pid not in below]
        found.extend(process for pid in new if (process := identify(pid)))
        below.update(new)
        grown = bool(new)
    return found


def spawn(argv: Sequence[str], *, log: Path, environment: Mapping[str, str]) -> Process:
    """Start a daemon in a session of its own, its output appended to ``log``.

    Raises:
        OSError: The program cannot be started.
        ProcessLookupError: It ended at once.
    """
    with log.open("ab") as out:
        child = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=dict(environment), cwd="/",
            start_new_session=True,
        )  # fmt: skip
    process = identify(child.pid)
    if process is None:
        raise ProcessLookupError(f"{argv[0]} ended at once")
    return process


def wait_until(check: Callable[[], bool], limit_s: float) -> bool:
    """Return whether ``check`` came true within the limit."""
    deadline = time.monotonic() + limit_s
    while not check():
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_EVERY_S)
    return True


def send(processes: Sequence[Process], number: signal.Signals) -> None:
    """Signal those that still live. A handle keeps the kernel from giving the pid away between the look and the signal."""
    for process in processes:
        try:
            handle = os.pidfd_open(process.pid)
        except OSError:
            continue
        try:
            if alive(process):
                signal.pidfd_send_signal(handle, number)
        except ProcessLookupError:
            pass
        finally:
            os.close(handle)


def end(processes: Sequence[Process], *, patience_s: float) -> None:
    """End these: SIGTERM, and SIGKILL for those that live on after ``patience_s`` (0: SIGKILL at once).

    Raises:
        ClusterError: One lives on.
    """
    if patience_s > 0:
        send(processes, signal.SIGTERM)
        wait_until(lambda: not any(map(alive, processes)), patience_s)
    send(processes, signal.SIGKILL)
    if not wait_until(lambda: not any(map(alive, processes)), _END_LIMIT_S):
        pids = ", ".join(str(process.pid) for process in processes if alive(process))
        raise ClusterError(f"processes do not end though they were killed: {pids}")


def end_all(find: Callable[[], Sequence[Process]]) -> None:
    """End what ``find`` returns until it returns nothing twice in a row.

    One look is not enough. What has just been started is not in it, and in the middle of execve(2) a process has no environment
    by which it could be found.

    Raises:
        ClusterError: New processes keep coming.
    """
    deadline, empty = time.monotonic() + _END_LIMIT_S, 0
    while empty < 2:
        found = find()
        end(found, patience_s=0)
        empty = 0 if found else empty + 1
        if time.monotonic() > deadline:
            raise ClusterError(
                f"new processes keep coming: {', '.join(str(process.pid) for process in found)}"
            )
        time.sleep(LOOK_EVERY_S)
