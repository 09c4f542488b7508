"""Runs a program as if nobody were there, and looks at it from outside.

Its standard streams are its own; signals that a process sends us go to it, those that a terminal sends have reached it already;
it ends with us even if we are killed. One thread, which waits for signals and looks in between.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pytest_mlhpc.node.processes import become_subreaper, descendants, die_with_parent, reap
from pytest_mlhpc.node.telemetry.devices import Devices
from pytest_mlhpc.node.telemetry.processes import Reader
from pytest_mlhpc.node.telemetry.sampler import Sampler
from pytest_mlhpc.node.telemetry.samples import Sample
from pytest_mlhpc.screen.kept import halved

#: Signals that are passed on. Others are no messages (faults), or stop us both (SIGTSTP), or cannot be caught.
PASSED = frozenset(
    {
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGWINCH,
    }
)

#: Seconds to the first look; from --stop's SIGTERM to SIGKILL.
FIRST_LOOK_S, GRACE_S = 0.2, 20.0

#: Seconds from one look to the next at what --stop has not ended yet.
POLL_S = 0.1

#: Seconds that SIGCHLD is waited for at most: a thread of a library that does not block the signal may take it from us,
#: and the kernel then drops it (signal(7): the disposition of SIGCHLD is to ignore it).
LONGEST_WAIT_S = 1.0

#: Looks that it takes to say anything, and that are kept: an hour of them. Of more every other one is let go.
LEAST_LOOKS, MOST_LOOKS = 2, 7200

#: What a shell reports for a program that is not there, and for one that cannot be run (POSIX, 2.8.2).
NOT_FOUND, NOT_EXECUTABLE = 127, 126


@dataclass(frozen=True)
class Ended:
    """How the program ended: its exit code, or minus the number of the signal; ``stopped``: by us, as --stop asks."""

    code: int
    stopped: bool = False


class Wrapped:
    """A program that runs under our eyes.

    Args:
        argv: the program and its arguments.
        environment: all of its environment.
        devices: what is looked at beside processes.
        interval_s: seconds from look to look, at least.
        output: file descriptor that is its standard output; None: ours.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        devices: Devices,
        interval_s: float,
        output: int | None = None,
    ) -> None:
        become_subreaper()  # daemons that it forks stay in its tree, and are looked at
        self.samples: list[Sample] = []
        self._sampler = Sampler(Reader(root=os.getpid()), devices, interval_s)
        self._pid = os.getpid()
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, {*PASSED, signal.SIGCHLD})
        try:
            self._process = subprocess.Popen(
                argv,
                env=dict(environment),
                stdout=output,
                preexec_fn=self._child,  # noqa: PLW1509 - one thread
            )
        except BaseException:
            self.close()
            raise

    def watch(self, seconds: float) -> Ended | None:
        """Look until the program ends or *seconds* are over, which is longer where looks are late; None: it runs on."""
        begin = time.monotonic()
        due = begin + FIRST_LOOK_S
        while True:
            now = time.monotonic()
            if now >= begin + seconds and len(self.samples) >= LEAST_LOOKS:
                return None
            if now >= due:
                self.samples.append(self._sampler.take())
                if len(self.samples) >= MOST_LOOKS:
                    self.samples = halved(self.samples)
                    self._sampler.slow_down()
                due = now + self._sampler.pause_s
            until = due if len(self.samples) < LEAST_LOOKS else min(due, begin + seconds)
            ended = self._wait(until - time.monotonic())
            if ended is not None:
                return ended

    def wait(self) -> Ended:
        """Pass signals on until the program ends."""
        while True:
            ended = self._wait(LONGEST_WAIT_S)
            if ended is not None:
                return ended

    def stop(self) -> Ended:
        """End the program, then what it started and left: SIGTERM, and SIGKILL if that is not enough."""
        deadline = time.monotonic() + GRACE_S
        self._send(signal.SIGTERM)
        ended = None
        while ended is None:
            ended = self._wait(deadline - time.monotonic())
            if time.monotonic() >= deadline:
                _kill(signal.SIGKILL)
                deadline = time.monotonic() + 1.0
        _kill(signal.SIGTERM)
        while descendants(os.getpid()) and time.monotonic() < deadline:
            self._wait(POLL_S)
        _kill(signal.SIGKILL)
        return Ended(ended.code, stopped=True)

    def close(self) -> None:
        """Take signals as before; those that came for a program that has ended are for nobody."""
        while signal.sigtimedwait({*PASSED, signal.SIGCHLD}, 0.0) is not None:
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)

    def _wait(self, seconds: float) -> Ended | None:
        info = signal.sigtimedwait({*PASSED, signal.SIGCHLD}, min(max(0.0, seconds), LONGEST_WAIT_S))
        # From a process (sigaction(2)); a terminal's has gone to its whole group.
        if info is not None and info.si_signo != signal.SIGCHLD and info.si_code <= 0:
            self._send(info.si_signo)
        code = reap().get(self._process.pid)
        if code is None:
            return None
        self._process.returncode = code  # it is reaped: Popen must not wait for it
        return Ended(code)

    def _send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, number)

    def _child(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)
        die_with_parent(self._pid)


def _kill(number: int) -> None:
    """Send a signal to all that is below us."""
    for pid in descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def leave(ended: Ended, say: Callable[[str], object]) -> int:
    """Return the exit code to leave with; a program that a signal ended takes us along, so that callers see the same."""
    if ended.stopped:
        return 0
    if ended.code >= 0:
        return ended.code
    number = -ended.code
    say(f"the program was ended by {signal.Signals(number).name if number in _known() else number}")
    if number != signal.SIGKILL:
        with contextlib.suppress(OSError, ValueError):
            _no_core()
            signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return 128 + number  # the signal is ignored here


def _known() -> set[int]:
    return {int(one) for one in signal.Signals}


def _no_core() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
