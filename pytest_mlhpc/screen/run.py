"""One screening: run a program and watch it from outside, or look into a running job, and say what limits it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_mlhpc.errors import InfrastructureError, StoreError
from pytest_mlhpc.node.files import unwritten
from pytest_mlhpc.node.processes import become_subreaper, descendants, die_with_parent, reap
from pytest_mlhpc.node.telemetry import hook
from pytest_mlhpc.node.telemetry.readings import Devices, Reader, find_devices
from pytest_mlhpc.node.telemetry.sampler import Sampler
from pytest_mlhpc.node.telemetry.samples import Sample
from pytest_mlhpc.screen import hook_output, usage, watchers
from pytest_mlhpc.screen.hook_output import TrainingTrace
from pytest_mlhpc.screen.limits import ProgramEvidence, judge
from pytest_mlhpc.screen.report import report_data, report_lines
from pytest_mlhpc.screen.usage import find_ranks, halved
from pytest_mlhpc.store.text import count, object_text

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


HOOK = Path(hook.__file__).parent


@dataclass(frozen=True)
class Options:
    """What is looked at, and how."""

    seconds: float
    interval: float
    profile: str = "off"
    stop: bool = False
    page: Path | None = None
    job: str | None = None
    pods: Sequence[str] = ()
    namespace: str = ""
    container: str = ""
    python: str = "python3"
    as_json: bool = False  #: print one object; the program's standard output goes to standard error


def screen_program(options: Options, program: Sequence[str]) -> int:
    """Run a program, say what limits it, and return its exit code."""
    devices = find_devices()
    with hook_folder() as folder:
        try:
            wrapped = ScreenedProgram(
                program,
                environment(os.environ, folder, options.profile),
                devices,
                options.interval,
                output=sys.stderr.fileno() if options.as_json else None,
            )
        except FileNotFoundError:
            say(f"there is no program {program[0]!r}")
            return NOT_FOUND
        except OSError as error:
            say(f"{program[0]!r} cannot be run: {error.strerror}")
            return NOT_EXECUTABLE
        try:
            ended = wrapped.watch(options.seconds)
            missing = [] if wrapped.samples and wrapped.samples[-1].devices else [f"devices ({devices.text})"]
            what = Path(program[0]).name if len(program) == 1 else " ".join(program)
            try:
                _report(options, _short(what), wrapped.samples, hook_output.read_traces(folder), missing)
            except Exception as error:  # noqa: BLE001 - the program would die with us, of a mistake of ours
                say(f"no result: {type(error).__name__}: {error}")
            shutil.rmtree(folder, ignore_errors=True)  # the hook notices, and writes no more
            if ended is None:
                ended = wrapped.stop() if options.stop else wrapped.wait()
        finally:
            wrapped.close()
    return leave(ended, say)


def _print(data: Mapping[str, Any]) -> None:
    """Print the object for programs; who has gone away loses it and nothing else."""
    try:
        sys.stdout.write(object_text("screen", data))
        sys.stdout.flush()
    except (OSError, ValueError, AttributeError) as error:
        say(f"the object cannot be printed: {error}")
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - else Python tries again at its end, and changes the exit code


def say(text: str) -> None:
    """Print it for the user. A reader that goes away (a closed standard error, `2>&1 | head`) must not end the program."""
    try:
        sys.stderr.write(f"mlhpc screen: {text}\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - else Python tries again at its end, and changes the exit code


def environment(before: dict[str, str] | os._Environ[str], folder: Path, profile: str) -> dict[str, str]:
    """Return the program's environment: with the hook first on PYTHONPATH, and where it writes."""
    path = os.pathsep.join([str(HOOK), *([before["PYTHONPATH"]] if before.get("PYTHONPATH") else [])])
    return {
        **before,
        "PYTHONPATH": path,
        "MLHPC_SCREEN": str(folder),
        "MLHPC_SCREEN_PROFILE": "" if profile == "off" else profile,
    }


def screen_running(options: Options) -> int:
    """Look into a running job or pods, and say what limits them.

    Raises:
        InfrastructureError: nothing of the job or pod was found.
    """
    if options.job is not None:
        commands = [watchers.slurm_argv(options.job, options.python)]
        what = f"job {options.job}"
    else:
        commands = [
            watchers.pod_argv(pod, options.namespace, options.container, options.python)
            for pod in options.pods
        ]
        what = f"pod {', '.join(options.pods)}"
    samples, wrong = watchers.watch(commands, options.seconds, options.interval)
    if not any(sample.processes for sample in samples):
        why = "; ".join(wrong) or "no process of it is visible: it belongs to another user, or has ended"
        raise InfrastructureError("nothing_seen", f"{what}: {why}")
    missing = ["steps and torch's profiler (they are only known of programs that screening starts)", *wrong]
    _report(options, what, samples, (), missing)
    return 0


def _report(
    options: Options,
    what: str,
    samples: Sequence[Sample],
    spoken: Sequence[TrainingTrace],
    missing: Sequence[str],
) -> None:
    if len(samples) < 2:
        page = "" if options.page is None else "; no page was written"
        why = f"ended too soon to say what limits it ({count(len(samples), 'sample')})"
        say(f"{what} {why}{page}")
        if options.as_json:
            _print(report_data(what, None, (), [*missing, f"what limits it: it {why}"]))
        return
    evidence = see(samples, spoken)
    findings = judge(evidence)
    missing = [*missing, *not_reported(options, spoken)]
    lines = report_lines(what, evidence, findings, missing)
    if options.as_json:
        _print(report_data(what, evidence, findings, missing))
    else:
        for line in lines:
            say(line)
    if options.page is not None:
        _write_page(options.page, lines, samples, spoken)


def see(samples: Sequence[Sample], spoken: Sequence[TrainingTrace]) -> ProgramEvidence:
    """Return what samples and hook have to say of the time that counts: from the first step that was reported."""
    first = min((one.ends[0] for one in spoken if one.ends), default=None)
    last = max((one.ends[-1] for one in spoken if one.ends), default=None)
    counted = usage.within(samples, first)
    return ProgramEvidence(
        seconds=max(counted[-1].time_s - counted[0].time_s, 0.0),
        ranks=find_ranks(usage.processes(counted), spoken),
        nodes=usage.nodes(counted, last),
        devices=usage.devices(counted),
    )


def not_reported(options: Options, spoken: Sequence[TrainingTrace]) -> list[str]:
    """Return what the hook could not tell, and why."""
    if options.job or options.pods:
        return []
    notes = list(dict.fromkeys(note for one in spoken for note in one.notes))
    if not any(one.ends for one in spoken):
        return notes or ["steps (no process took an optimizer's step in Python with torch)"]
    if options.profile != "off" and not notes and not any(one.profile for one in spoken):
        return ["torch's profiler (too few steps; see --profile and --seconds)"]
    return notes


def _write_page(
    path: Path, lines: Sequence[str], samples: Sequence[Sample], spoken: Sequence[TrainingTrace]
) -> None:
    from pytest_mlhpc.screen.report import charts, html_of
    from pytest_mlhpc.store.locations import replace_file

    try:
        replace_file(path, html_of(lines, charts(samples, spoken)))
    except StoreError as error:  # the program's exit code is worth more
        say(str(error))
    else:
        say(f"curves are in {path}")


def _short(text: str) -> str:
    text = "".join(letter if letter.isprintable() else "?" for letter in text)
    return text if len(text) <= 60 else f"{text[:57]}..."
