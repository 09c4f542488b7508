"""Run a program unchanged and watch it from outside; the folder that its hook writes to."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_mlhpc.errors import InfrastructureError
from pytest_mlhpc.node.files import unwritten
from pytest_mlhpc.node.processes import become_subreaper, descendants, die_with_parent, reap
from pytest_mlhpc.node.telemetry.devices import Devices
from pytest_mlhpc.node.telemetry.processes import Reader
from pytest_mlhpc.node.telemetry.sampler import Sampler
from pytest_mlhpc.node.telemetry.samples import Sample
from pytest_mlhpc.screen.usage import halved

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


class ScreenedProgram:
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


PREFIX = f"mlhpc-screen-{socket.gethostname()}-"  # a temporary folder may be shared by nodes that do not see each other's locks


@contextlib.contextmanager
def hook_folder() -> Iterator[Path]:
    """Make the folder, and remove it in the end; before, remove those of screenings that were killed.

    Raises:
        InfrastructureError: ``disk_full``, there is no room for it.
    """
    try:
        _remove_left(Path(tempfile.gettempdir()))
        folder, lock = _locked()
    except OSError as error:
        text = f"screening has no folder for what the program tells: {error}"
        raise InfrastructureError(
            unwritten(error), f"{text}; make room there, or name another one in TMPDIR"
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _locked() -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        try:
            lock = _lock(folder)
        except OSError:  # a file system without locks; nobody can take this for one that was left, either
            return folder, os.open(os.devnull, os.O_RDONLY)
        if lock is not None:
            return folder, lock


def _remove_left(where: Path) -> None:
    """Remove our folders that nobody holds."""
    for folder in where.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid != os.geteuid():
                continue
            lock = _lock(folder)
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _lock(folder: Path) -> int | None:
    """Return a descriptor that holds the folder; None: somebody else does, or it has just been removed."""
    with contextlib.ExitStack() as undo:
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            undo.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(descriptor), folder.lstat()):
                return None
        except (FileNotFoundError, BlockingIOError):
            return None
        undo.pop_all()
        return descriptor
