"""What `local` runs: a program by itself, or a batch with its ranks. One object for each allocation that has started."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from pytest_mlhpc.batch.plan import PROTOCOL, Plan, RunPlan
from pytest_mlhpc.batch.processes import CappedLog, describe_exit
from pytest_mlhpc.errors import MlhpcError, ProtocolError, RunFailure
from pytest_mlhpc.provision.command import OUTPUT_CAP, Finished, last_lines, measure
from pytest_mlhpc.provision.guardian import end_processes
from pytest_mlhpc.results.failures import Failure
from pytest_mlhpc.results.lines import Decoder, Fault, Message
from pytest_mlhpc.results.schema import Measurement, to_json

#: Output of a program that is kept in memory; more is read back from its log when it has ended.
IN_MEMORY = 65536

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


class CommandProcess(LocalProcess):
    """A program by itself: its output is kept as far as the cap allows, and searched for metrics at its end."""

    def __init__(self, plan: Plan, process: subprocess.Popen[bytes], log: CappedLog) -> None:
        self._run = plan.runs[0]
        super().__init__(plan, process, self._run.time_limit_s)
        self._log = log
        self._head = bytearray()
        self._failure: Failure | None = None
        self._started_ns = time.time_ns()

    def started(self) -> Message:
        """Return the message that says that the program runs."""
        body = {
            "protocol": PROTOCOL,
            "payload_sha256": self.plan.payload_sha256,
            "host": socket.gethostname(),
        }
        return _message(self._run, "started", body)

    def take(self, data: bytes) -> list[Message]:
        """Keep output; a log that cannot be written ends the program."""
        if len(self._head) <= IN_MEMORY:
            self._head += data
        try:
            self._log.write(data)
        except OSError as error:
            if self._failure is None:
                self._failure = Failure("disk_full", no_room(error, self._log.path))
                self.tell(signal.SIGKILL)
        return []

    def out_of_time(self) -> None:
        """Note it, and end the program."""
        if self._failure is None:
            text = f"the program did not end within {self._run.time_limit_s:g} s"
            self._failure = Failure("time_limit", text, str(self._log.path))
        super().out_of_time()

    def conclude(self, code: int) -> Iterator[Message]:
        """Return the measurement or the failure, and the end."""
        self._log.close()
        yield _result(self._run, self._failure or self._measure(code))
        yield _message(self._run, "end", {"exit": [code]})

    def close(self) -> None:
        """Give back descriptors, the log's too: a cancelled program has no conclusion."""
        self._log.close()
        super().close()

    def _measure(self, code: int) -> Measurement | Failure:
        path = self._log.path
        try:
            output = (
                bytes(self._head) if len(self._head) <= IN_MEMORY else path.read_bytes()[: self._log.written]
            )
        except OSError as error:
            return Failure("no_result", f"cannot read the output {path}: {error.strerror}")
        host, now = socket.gethostname(), time.time_ns()
        return measure(
            self._run, Finished(code, output, self._log.dropped, path, host, self._started_ns, now)
        )


class BatchProcess(LocalProcess):
    """A batch: its standard output is worker lines, its standard input its lifeline."""

    def __init__(self, plan: Plan, process: subprocess.Popen[bytes], log: Path) -> None:
        super().__init__(plan, process, plan.time_limit_s)
        self._log = log
        self._decoder = Decoder({run.run_id: run.nonce for run in plan.runs})
        self._runs = {run.run_id: run for run in plan.runs}
        self._failed: set[str] = set()
        self._ended: set[str] = set()
        self._heard = False

    def take(self, data: bytes) -> list[Message]:
        """Decode worker lines; what is none of them is a failure of the run."""
        self._heard = True
        return [message for item in self._decoder.feed(data) for message in self._check(item)]

    def _check(self, item: Message | Fault) -> list[Message]:
        if isinstance(item, Fault):
            unfinished = [run_id for run_id in self._runs if run_id not in self._ended]
            run = self._runs.get(item.run_id) or self._runs[(unfinished or list(self._runs))[0]]
            return self._fail(run, item.outcome, f"worker lines: {item.text}")
        run = self._runs[item.run_id]
        if item.kind == "started" and (mismatch := self._mismatch(item)):
            self.tell(signal.SIGTERM)
            return [item, *self._fail(run, "protocol_mismatch", mismatch)]
        if item.kind == "failed":
            self._failed.add(item.run_id)
        if item.kind == "end":
            self._ended.add(item.run_id)
            if run.workload == "command" and item.run_id not in self._failed:
                return [self._command(run, item), item]
        return [item]

    def _fail(self, run: RunPlan, outcome: str, text: str) -> list[Message]:
        """Return one failed message for the first fault of a run; others are its consequences."""
        if run.run_id in self._failed:
            return []
        self._failed.add(run.run_id)
        return [_message(run, "failed", {"outcome": outcome, "text": text, "log": str(self._log)})]

    def _mismatch(self, started: Message) -> str:
        theirs = (started.body["protocol"], started.body["payload_sha256"])
        ours = (PROTOCOL, self.plan.payload_sha256)
        if theirs == ours:
            return ""
        return f"the worker has protocol {theirs[0]} and payload {theirs[1]}, we have {ours[0]} and {ours[1]}"

    def _command(self, run: RunPlan, end: Message) -> Message:
        folder = Path(self.plan.directory) / run.run_id
        log = folder / ("rank0.log" if run.launcher == "plain" else "launcher.log")
        now = time.time_ns()
        try:
            size = log.stat().st_size
            with log.open("rb") as file:
                output = file.read(OUTPUT_CAP)
        except OSError as error:
            return _result(run, Failure("no_result", f"cannot read {log}: {error.strerror}"))
        code = next((code for code in end.body["exit"] if code), 0)
        finished = Finished(code, output, max(0, size - OUTPUT_CAP), log, socket.gethostname(), now, now)
        return _result(run, measure(run, finished))

    def out_of_time(self) -> None:
        """Note it, and end the batch, which ends its ranks."""
        self.error = RunFailure(
            "time_limit", f"the allocation did not end within {self.plan.time_limit_s:g} s"
        )
        super().out_of_time()

    def conclude(self, code: int) -> Iterator[Message]:
        """Return faults of an unfinished conversation; sets ``error`` where runs have not come to their end."""
        for fault in self._decoder.finish():
            yield from self._check(fault)
        if self.error is not None or self._ended >= set(self._runs) or self._failed - self._ended:
            return
        words = ""
        with contextlib.suppress(OSError):
            words = last_lines(self._log.read_bytes()[-4096:])
        text = f"the batch {describe_exit(code)} before its runs had ended" + (
            f"; its last lines:\n{words}" if words else ""
        )
        outcome = "channel_broken" if self._heard else "launch_failed"
        self.error = ProtocolError("protocol_mismatch" if "protocol_mismatch" in words else outcome, text)


def no_room(error: OSError, path: Path) -> str:
    """Say which file could not be written, and what to do about it."""
    full = error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
    hint = "; free space, or choose another --state-dir" if full else ""
    return f"cannot write {error.filename or path}: {error.strerror}{hint}"


def _result(run: RunPlan, found: Measurement | Failure) -> Message:
    if isinstance(found, Failure):
        return _message(run, "failed", {"outcome": found.outcome, "text": found.text, "log": found.log})
    return _message(run, "measurement", to_json(found))


def _message(run: RunPlan, kind: str, body: Mapping[str, object]) -> Message:
    return Message(run.run_id, run.nonce, kind, body)


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
