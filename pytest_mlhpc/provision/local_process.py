"""The processes of provisioner `local`: a batch or a single program, its output, its time limit, its end.

Read here what becomes of an allocation's process tree on this machine, and which messages its output yields.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pytest_mlhpc.errors import MlhpcError, ProtocolError, ProvisionError, RunFailure
from pytest_mlhpc.node.cores import filled_on_node, on_node
from pytest_mlhpc.node.files import EXIT_UNSAFE, UNSAFE, check_private, open_private, outcome_of, unwritten
from pytest_mlhpc.node.processes import (
    ERRORS_CAP,
    CappedLog,
    JoinedLines,
    describe_exit,
    last_lines,
    start_in_new_session,
)
from pytest_mlhpc.node.protocol.lines import Message
from pytest_mlhpc.node.protocol.plan import PROTOCOL, Plan, RunPlan
from pytest_mlhpc.node.protocol.schema import Measurement
from pytest_mlhpc.node.run_files import link_files, start_error
from pytest_mlhpc.provision.command import OUTPUT_CAP, FinishedProgram, measure
from pytest_mlhpc.provision.conversation import Conversation, result_message, run_message
from pytest_mlhpc.provision.guardian import (
    end_processes,
    mark_of,
    remove_socket_folder,
    socket_base,
    socket_prefix,
)
from pytest_mlhpc.provision.payload import no_room
from pytest_mlhpc.store.record import Failure

#: Time between SIGTERM and SIGKILL when a limit has passed or an allocation is cancelled, in seconds.
GRACE_S = 5.0

#: Descendants of a process younger than this have higher pids, on any pid_max (proc(5): >= 32768), in seconds.
PIDS_ASCEND_S = 10.0

#: Most reads from one pipe before the others get their turn; each is at most 64 KiB.
READS = 16

#: The same after the process has ended: another process with the pipe open may write for ever.
FINAL_READS = 16384
#: Most bytes of a program's output in memory; more is read back from its log after its end.
MEMORY_BYTES = 65536

#: Errors of starting a program that the machine caused, not the program.
_SHORTAGES = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


class LocalProcess:
    """The top process of one allocation. Subclasses interpret its output.

    ``error`` is set where the allocation did not end as planned.
    """

    grace_s = GRACE_S

    def __init__(self, plan: Plan, process: subprocess.Popen[bytes], time_limit_s: float) -> None:
        self.plan = plan
        self.cookie = plan.allocation_id  #: what its processes carry in MLHPC_ALLOCATION
        self.signalled = False
        self.error: MlhpcError | None = None
        self.deadline = time.monotonic() + time_limit_s
        self._process = process
        self._started = time.monotonic()
        self._terminated = False
        if process.stdout is None:
            raise ValueError("the process was started without a pipe for its output")
        pipes = (process.stdout, process.stderr)
        #: Where it is heard: at its standard output, and of a program at its standard error.
        self.outputs = tuple(pipe.fileno() for pipe in pipes if pipe is not None)
        for fd in self.outputs:
            os.set_blocking(fd, False)
        self.pidfd = _pidfd(process.pid)

    @property
    def pid(self) -> int:
        """The pid of the top process, which leads a process group of its own."""
        return self._process.pid

    def read(self, fd: int, reads: int = READS) -> tuple[list[Message], bool]:
        """Return the messages that what *fd* has completes, and whether more may come there."""
        messages: list[Message] = []
        for _ in range(reads):
            try:
                data = os.read(fd, 1 << 16)
            except BlockingIOError:
                return messages, True
            if not data:
                return messages, False
            messages += self.take(data, error=fd != self.outputs[0])
        return messages, True

    def take(self, data: bytes, *, error: bool) -> list[Message]:
        """Process standard output, or standard error; return the messages that it completes."""
        raise NotImplementedError

    def final_messages(self, code: int) -> Iterator[Message]:
        """Return the last messages, after the process and its descendants have ended and all output was read."""
        raise NotImplementedError

    def has_ended(self) -> bool:
        """Return whether the top process has ended."""
        return self._process.poll() is not None

    def finish(self) -> list[Message]:
        """After :meth:`has_ended`: end the descendants, read the last output, and return the last messages."""
        self.end_leftovers()
        messages = [message for fd in self.outputs for message in self.read(fd, FINAL_READS)[0]]
        return [*messages, *self.final_messages(self._process.returncode)]

    def end_leftovers(self) -> None:
        """End descendants that outlived the top process, whatever their session or group.

        Children of a short-lived process have higher pids, so most of /proc need not be read.
        """
        candidates = None
        if time.monotonic() - self._started < PIDS_ASCEND_S:
            last = _last_pid()
            if last == self.pid:
                return  # no process was started since
            if last > self.pid:
                names = os.listdir("/proc")  # noqa: PTH208 - names alone, for every program
                candidates = [int(name) for name in names if name.isdigit() and int(name) > self.pid]
        end_processes("MLHPC_ALLOCATION", self.cookie, 0.5, candidates)

    def on_deadline(self) -> None:
        """End the process after its deadline: SIGTERM first, SIGKILL after the grace time."""
        if self._terminated:
            self.deadline = float("inf")
            self.cancel(0.0)
            return
        self._terminated = True
        self.deadline = time.monotonic() + self.grace_s
        self.send_signal(signal.SIGTERM)

    def send_signal(self, number: int) -> None:
        """Send a signal to the process group, unless the process was reaped and its id may be another's."""
        if self._process.returncode is not None:
            return
        self.signalled = True
        # Gone, or set-uid: end_processes() follows.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def cancel(self, grace_s: float | None = None) -> None:
        """End all processes of this allocation; returns when none is left."""
        if not self.has_ended():
            self.send_signal(signal.SIGTERM)
        end_processes("MLHPC_ALLOCATION", self.cookie, self.grace_s if grace_s is None else grace_s)
        if not self.has_ended():
            self.send_signal(signal.SIGKILL)
            self._process.wait()

    def close(self) -> None:
        """Close descriptors. The process has ended."""
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._close_pidfd()

    def _close_pidfd(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


#: Variables that differ between plans of one environment.
OF_PLAN = frozenset({"MLHPC_ALLOCATION", "MLHPC_RUN", "PYTEST_CURRENT_TEST"})


@dataclass(frozen=True)
class RunningBatch:
    """A batch that has done all runs of its plan and waits for the next one; what it imported serves that one, too.

    ``environment`` is all that it was started with, but for what differs between plans. ``allocation`` is its first one,
    whose id its processes carry.
    """

    process: subprocess.Popen[bytes]
    python: str
    environment: Mapping[str, str]
    cores: frozenset[int]
    allocation: str
    sockets: str
    started: float = field(default_factory=time.monotonic)

    def serves(self, python: str, environment: Mapping[str, str]) -> bool:
        """Return whether a plan with *environment* may be given to it: it lives, and would be started the same way."""
        same = (self.python, self.environment) == (python, without_ids(environment))
        silent = self.process.stdout is not None and not select.select([self.process.stdout], [], [], 0)[0]
        return same and self.cores == os.sched_getaffinity(0) and silent and self.process.poll() is None

    def give(self, plan: Plan) -> bool:
        """Let it do the runs of *plan*; return False if it is gone."""
        path = Path(plan.directory) / "plan.json"
        if self.process.stdin is None or b"\n" in os.fsencode(path):
            return False
        try:
            self.process.stdin.write(os.fsencode(path) + b"\n")
            self.process.stdin.flush()
        except (OSError, ValueError):
            return False
        return True

    def end(self) -> None:
        """End it and all its processes, and remove its socket folder."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE_S)
        end_processes("MLHPC_ALLOCATION", self.allocation, 0.5)
        self.process.wait()
        remove_socket_folder(self.sockets)


def without_ids(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are the same for all plans of one environment."""
    return {name: text for name, text in environment.items() if name not in OF_PLAN}


class BatchProcess(LocalProcess):
    """A batch: its standard output is worker lines; it ends when its standard input closes.

    Where all its runs are warm (``node/batch/warm.py``) it does further plans instead of ending.
    """

    def __init__(self, plan: Plan, batch: RunningBatch, log: Path) -> None:
        super().__init__(plan, batch.process, plan.time_limit_s)
        self.cookie, self._started = batch.allocation, batch.started
        self._batch = batch
        self._log = log
        self._conversation = Conversation(plan, log)

    @property
    def waits(self) -> RunningBatch | None:
        """The batch, where it has done all runs as it should and waits for the next plan."""
        conversation = self._conversation
        done = conversation.complete and not conversation.mismatch and self.error is None
        alive = not self.signalled and not self.has_ended()
        return self._batch if stays(self.plan) and done and alive else None

    def finish(self) -> list[Message]:
        """Do as for any process, or nothing where the batch goes on: it has ended all processes of its runs."""
        return [] if self.waits else super().finish()

    def take(self, data: bytes, *, error: bool = False) -> list[Message]:  # noqa: ARG002 - its standard error is a file
        """Decode worker lines; end a batch whose protocol or payload does not match."""
        messages = self._conversation.take(data)
        if self._conversation.mismatch:
            self.send_signal(signal.SIGTERM)
        return messages

    def on_deadline(self) -> None:
        """Set the error, and end the batch, which ends its ranks."""
        self.error = RunFailure(
            "time_limit", f"the allocation did not end within {self.plan.time_limit_s:g} s"
        )
        super().on_deadline()

    def close(self) -> None:
        """Close descriptors and remove the socket folder, which a killed batch leaves; a batch that goes on keeps its own."""
        if self.waits is None:
            super().close()
            remove_socket_folder(self._batch.sockets)
        else:
            self._close_pidfd()

    def final_messages(self, code: int) -> Iterator[Message]:
        """Return faults of an unfinished conversation; sets ``error`` where runs have not ended."""
        yield from self._conversation.finish()
        if self.error is not None or self._conversation.complete or self._conversation.failing:
            return
        tail = ""
        with contextlib.suppress(OSError):
            tail = last_lines(self._log.read_bytes()[-4096:])
        text = f"the batch {describe_exit(code)} before its runs had ended" + (
            f"; its last lines:\n{tail}" if tail else ""
        )
        if code == EXIT_UNSAFE:
            self.error = ProvisionError(UNSAFE, text)
            return
        outcome = "channel_broken" if self._conversation.heard else "launch_failed"
        self.error = ProtocolError("protocol_mismatch" if "protocol_mismatch" in tail else outcome, text)


def stays(plan: Plan) -> bool:
    """Return whether the batch of *plan* does further plans: a process that it has made ready for its ranks is worth that."""
    return plan.vetting is None and all(run.warm and not run.builds for run in plan.runs)


def start_batch(
    plan: Plan, environment: Mapping[str, str], payload: Path, waiting: list[RunningBatch]
) -> BatchProcess:
    """Start a batch for *plan* from the zip *payload*, or take one from those that are *waiting*.

    Raises:
        ProvisionError: ``launch_failed``, ``disk_full``, ``not_writable``, or ``unsafe_directory``: another user could have
            changed its files.
    """
    python, directory = plan.runs[0].python, Path(plan.directory)
    try:
        check_private(payload)
        check_private(directory / "plan.json")
    except FileNotFoundError as error:
        raise ProvisionError("launch_failed", f"the payload {payload} is missing") from error
    except OSError as error:
        raise ProvisionError(outcome_of(error, "launch_failed"), no_room(error, payload)) from error
    path = os.pathsep.join(filter(None, (str(payload), environment.get("PYTHONPATH"))))
    environment = {**environment, "PYTHONPATH": path}
    log = directory / "batch.log"
    if stays(plan):
        for batch in [one for one in waiting if one.serves(python, environment)]:
            waiting.remove(batch)
            if batch.give(plan):
                return BatchProcess(plan, batch, log)
            batch.end()
    try:
        sockets = tempfile.mkdtemp(prefix=socket_prefix(environment["MLHPC_SESSION"]), dir=socket_base())
    except OSError as error:
        raise ProvisionError(unwritten(error), no_room(error, Path(socket_base()))) from error
    more = ["--more"] if stays(plan) else []
    argv = [python, "-m", "pytest_mlhpc.node.batch.main", *more, str(directory / "plan.json")]
    try:
        with os.fdopen(open_private(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            # Started in the plan's directory: python -m searches there before it searches the payload.
            process = popen(
                argv, {**environment, "MLHPC_SOCKETS": sockets}, plan.directory, log=file.fileno()
            )
    except OSError as error:
        remove_socket_folder(sockets)
        if error.filename == str(log):
            raise ProvisionError(unwritten(error), no_room(error, log)) from error
        raise ProvisionError("launch_failed", f"cannot start {python!r}: {error.strerror}") from error
    cores = frozenset(os.sched_getaffinity(0))
    common = without_ids(environment)
    return BatchProcess(plan, RunningBatch(process, python, common, cores, plan.allocation_id, sockets), log)


class CommandProcess(LocalProcess):
    """A single program: its output is logged up to a cap, and searched for metrics at its end."""

    def __init__(self, plan: Plan, run: RunPlan, process: subprocess.Popen[bytes], log: CappedLog) -> None:
        self._run = run
        super().__init__(plan, process, self._run.time_limit_s)
        self._log = log
        self._errors: CappedLog | None = None
        self._joined = JoinedLines()
        self._head = bytearray()
        self._failure: Failure | None = None
        self._started_ns = time.time_ns()

    def started(self) -> Message:
        """Return the message of the program's start."""
        body = {
            "protocol": PROTOCOL,
            "payload_sha256": self.plan.payload_sha256,
            "host": socket.gethostname(),
        }
        return run_message(self._run, "started", body)

    def take(self, data: bytes, *, error: bool) -> list[Message]:
        """Log output, and standard error apart, too; a log that cannot be written ends the program."""
        try:
            if error:
                self._errors = self._errors or CappedLog(self._log.path.with_name("errors.log"), ERRORS_CAP)
                self._errors.write(data)
            self._write(self._joined.feed(data, error=error))
        except OSError as full:
            if self._failure is None:
                self._failure = Failure(unwritten(full), no_room(full, self._log.path))
                self.send_signal(signal.SIGKILL)
        return []

    def _write(self, joined: bytes) -> None:
        if joined and len(self._head) <= MEMORY_BYTES:
            self._head += joined
        if joined:
            self._log.write(joined)

    def on_deadline(self) -> None:
        """Set the failure, and end the program."""
        if self._failure is None:
            text = f"the program did not end within {self._run.time_limit_s:g} s"
            self._failure = Failure("time_limit", text, str(self._log.path))
        super().on_deadline()

    def final_messages(self, code: int) -> Iterator[Message]:
        """Return the measurement or the failure, and the end."""
        with contextlib.suppress(OSError):  # of a full disk the failure tells
            self._write(self._joined.finish())
        self._close_logs()
        yield result_message(self._run, self._failure or self._measure(code))
        filled = filled_on_node(self.plan.runs[0], self._run)
        yield run_message(self._run, "end", {"exit": [code], **filled})

    def close(self) -> None:
        """Close descriptors, the logs' too: a cancelled program has no final messages. An empty folder of the run goes."""
        self._close_logs()
        with contextlib.suppress(OSError):
            _own_folder(self.plan).rmdir()
        super().close()

    def _close_logs(self) -> None:
        for log in (self._log, self._errors):
            if log is not None:
                log.close()

    def _measure(self, code: int) -> Measurement | Failure:
        path = self._log.path
        try:
            output = (
                bytes(self._head)
                if len(self._head) <= MEMORY_BYTES
                else path.read_bytes()[: self._log.written]
            )
        except OSError as error:
            return Failure("no_result", f"cannot read the output {path}: {error.strerror}")
        host, now = socket.gethostname(), time.time_ns()
        times, folder = (self._started_ns, now), _own_folder(self.plan)
        return measure(
            self._run, FinishedProgram(code, output, self._log.dropped, path, host, *times, folder)
        )


def start_command(plan: Plan, environment: Mapping[str, str]) -> CommandProcess | Failure:
    """Start the program of *plan*'s only run, or return why it cannot be started.

    Raises:
        ProvisionError: ``disk_full`` or ``not_writable``, its log cannot be created.
    """
    run = on_node(plan.runs[0])
    environment = {**environment, **run.variables}
    cwd = run.cwd or str(_own_folder(plan))
    try:
        log = CappedLog(Path(plan.directory) / "output.log", OUTPUT_CAP)
        if run.cwd is None:
            _own_folder(plan).mkdir(mode=0o700, exist_ok=True)
            link_files(run, Path(plan.directory), _own_folder(plan))
    except OSError as error:
        raise ProvisionError(unwritten(error), no_room(error, Path(plan.directory))) from error
    try:
        process = popen(with_limit_mark(run.argv, environment, cwd), environment, cwd, log=None)
    except (OSError, ValueError) as error:
        log.close()
        short = isinstance(error, OSError) and error.errno in _SHORTAGES
        return Failure("launch_failed" if short else "command_not_found", start_error(run, error))
    return CommandProcess(plan, run, process, log)


def _own_folder(plan: Plan) -> Path:
    """Return the folder in which the program of *plan*'s only run starts where it names no other."""
    return Path(plan.directory) / plan.runs[0].run_id


def popen(
    argv: Sequence[str], environment: Mapping[str, str], cwd: str | None, *, log: int | None
) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own, its output and its errors on pipes. With *log*, errors go there and stdin is a pipe.

    No function runs in the child, so that Python starts it by vfork, however large this process is.
    """
    return start_in_new_session(
        argv,
        env=environment,
        cwd=cwd,
        stdin=subprocess.DEVNULL if log is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if log is None else log,
        bufsize=0,
    )


def with_limit_mark(argv: Sequence[str], environment: Mapping[str, str], cwd: str | None) -> list[str]:
    """Return *argv* run by prlimit (util-linux), which sets the limit mark of its processes; unchanged where prlimit is missing.

    A program that is missing, or that the kernel would not start, is unchanged, too: it fails by itself.
    """
    tool = shutil.which("prlimit")
    program = (
        Path(cwd or ".", argv[0]) if "/" in argv[0] else shutil.which(argv[0], path=environment.get("PATH"))
    )
    try:
        if tool is None or program is None or not os.access(program, os.X_OK):
            return list(argv)
        with open(program, "rb") as file:  # noqa: PTH123 - short and often
            if not file.read(4).startswith((b"#!", b"\x7fELF")):
                return list(argv)
    except OSError:
        return list(argv)
    mark = mark_of(environment.get("MLHPC_SESSION", ""), environment.get("MLHPC_ALLOCATION", ""))
    return [tool, f"--locks={mark}", "--", *argv]


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
