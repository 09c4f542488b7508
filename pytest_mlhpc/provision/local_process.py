"""The process at the top of one allocation on this machine: its output, its time, its end."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pytest_mlhpc.batch.plan import Plan
from pytest_mlhpc.errors import MlhpcError
from pytest_mlhpc.provision.guardian import end_processes
from pytest_mlhpc.results.lines import Message

#: Time between SIGTERM and SIGKILL when a limit has passed or an allocation is cancelled, in seconds.
GRACE_S = 5.0

#: A process younger than this got its number after the one that it descends from, on any pid_max (proc(5): >= 32768).
PIDS_RISE_S = 10.0

#: Most reads from one pipe before the others get their turn; each is at most 64 KiB.
READS = 16

#: The same after the process has ended: a stranger that holds the pipe may write for ever.
READS_AT_END = 16384


class LocalProcess:
    """The process at the top of one allocation. Subclasses know what its output means.

    ``error`` is set where the allocation did not come to the end that its plan says.
    """

    grace_s = GRACE_S

    def __init__(self, plan: Plan, process: subprocess.Popen[bytes], time_limit_s: float) -> None:
        self.plan = plan
        self.error: MlhpcError | None = None
        self.deadline = time.monotonic() + time_limit_s
        self._process = process
        self._started = time.monotonic()
        self._told_to_end = False
        if process.stdout is None:
            raise ValueError("the process was started without a pipe for its output")
        self.output = process.stdout.fileno()
        os.set_blocking(self.output, False)
        self.pidfd = _pidfd(process.pid)

    @property
    def pid(self) -> int:
        """The pid of the top process, which leads a process group of its own."""
        return self._process.pid

    def read(self, reads: int = READS) -> tuple[list[Message], bool]:
        """Return the messages that the available output completes, and whether output may still come."""
        messages: list[Message] = []
        for _ in range(reads):
            try:
                data = os.read(self.output, 1 << 16)
            except BlockingIOError:
                return messages, True
            if not data:
                return messages, False
            messages += self.take(data)
        return messages, True

    def take(self, data: bytes) -> list[Message]:
        """Take what the process printed."""
        raise NotImplementedError

    def conclude(self, code: int) -> Iterator[Message]:
        """Return the last messages: the process has ended, all output was taken, nothing is left running."""
        raise NotImplementedError

    def has_ended(self) -> bool:
        """Return whether the top process has ended."""
        return self._process.poll() is not None

    def end(self) -> list[Message]:
        """After :meth:`has_ended`: end what is left, take the last output, and return the last messages."""
        self.end_leftovers()
        messages, _ = self.read(READS_AT_END)
        return [*messages, *self.conclude(self._process.returncode)]

    def end_leftovers(self) -> None:
        """End descendants that outlived the top process, wherever they went.

        The numbers of short-lived processes' children are larger than theirs, so most of /proc need not be read.
        """
        candidates = None
        if time.monotonic() - self._started < PIDS_RISE_S:
            last = _last_pid()
            if last == self.pid:
                return  # nobody has started a process since
            if last > self.pid:
                names = os.listdir("/proc")  # noqa: PTH208 - names alone, for every program
                candidates = [int(name) for name in names if name.isdigit() and int(name) > self.pid]
        end_processes("MLHPC_ALLOCATION", self.plan.allocation_id, 0.5, candidates)

    def out_of_time(self) -> None:
        """The deadline has passed: SIGTERM at first, SIGKILL when the grace time is over too."""
        if self._told_to_end:
            self.deadline = float("inf")
            self.cancel(0.0)
            return
        self._told_to_end = True
        self.deadline = time.monotonic() + self.grace_s
        self.tell(signal.SIGTERM)

    def tell(self, number: int) -> None:
        """Send a signal to the process group, as long as its number is surely ours."""
        if self._process.returncode is not None:
            return
        with contextlib.suppress(
            ProcessLookupError, PermissionError
        ):  # gone, or set-uid: the sweep comes later
            os.killpg(self.pid, number)

    def cancel(self, grace_s: float | None = None) -> None:
        """End everything of this allocation; returns when nothing is left."""
        if not self.has_ended():
            self.tell(signal.SIGTERM)
        end_processes(
            "MLHPC_ALLOCATION", self.plan.allocation_id, self.grace_s if grace_s is None else grace_s
        )
        if not self.has_ended():
            self.tell(signal.SIGKILL)
            self._process.wait()

    def close(self) -> None:
        """Give back descriptors. The process has ended."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def no_room(error: OSError, path: Path) -> str:
    """Say which file could not be written, and what to do about it."""
    full = error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
    hint = "; free space, or choose another --state-dir" if full else ""
    return f"cannot write {error.filename or path}: {error.strerror}{hint}"


def popen(
    argv: Sequence[str], environment: Mapping[str, str], cwd: str | None, *, log: int | None
) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own, its output on a pipe. With *log*, errors go there and stdin is a pipe.

    There is no function to run in the child, so that Python starts it by vfork, however large the harness is.
    """
    return subprocess.Popen(
        list(argv),
        env=environment,
        cwd=cwd,
        stdin=subprocess.DEVNULL if log is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if log is None else log,
        start_new_session=True,
        bufsize=0,
    )


def _pidfd(pid: int) -> int:
    """Return a descriptor that is readable once the process has ended, or -1 before Linux 5.3."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


def _last_pid() -> int:
    """Return the number of the youngest process in our pid namespace, 0 if that is unknown (proc(5), loadavg)."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/loadavg", "rb") as file:  # noqa: PTH123 - short and often
        return int(file.read().split()[4])
    return 0
