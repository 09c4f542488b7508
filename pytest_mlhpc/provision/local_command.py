"""`local` without a batch: a program that the harness starts itself, for the price of starting it."""

from __future__ import annotations

import errno
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from pytest_mlhpc.batch.plan import PROTOCOL, Plan, RunPlan
from pytest_mlhpc.batch.processes import CappedLog
from pytest_mlhpc.errors import ProvisionError
from pytest_mlhpc.provision.command import OUTPUT_CAP, Finished, measure
from pytest_mlhpc.provision.local_process import LocalProcess, no_room, popen
from pytest_mlhpc.provision.messages import result_message, run_message
from pytest_mlhpc.results.failures import Failure
from pytest_mlhpc.results.lines import Message
from pytest_mlhpc.results.schema import Measurement

#: Output of a program that is kept in memory; more is read back from its log when it has ended.
IN_MEMORY = 65536

#: Errors of starting a program that say something of the machine, not of the program.
SHORT = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


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
        return run_message(self._run, "started", body)

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
        yield result_message(self._run, self._failure or self._measure(code))
        yield run_message(self._run, "end", {"exit": [code]})

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


def start_command(plan: Plan, environment: Mapping[str, str]) -> CommandProcess | Failure:
    """Start the program of *plan*'s only run, or say why it cannot be started.

    Raises:
        ProvisionError: ``disk_full``, its log cannot be made.
    """
    run = plan.runs[0]
    try:
        log = CappedLog(Path(plan.directory) / "output.log", OUTPUT_CAP)
    except OSError as error:
        raise ProvisionError("disk_full", no_room(error, Path(plan.directory))) from error
    try:
        process = popen(run.argv, environment, run.cwd, log=None)
    except (OSError, ValueError) as error:
        log.close()
        short = isinstance(error, OSError) and error.errno in SHORT
        return Failure("launch_failed" if short else "command_not_found", _cannot_start(run, error))
    return CommandProcess(plan, process, log)


def _cannot_start(run: RunPlan, error: OSError | ValueError) -> str:
    if isinstance(error, OSError) and run.cwd is not None and error.filename == run.cwd:
        return f"the folder {run.cwd!r} to start {run.argv[0]!r} in: {error.strerror}"
    why = error.strerror if isinstance(error, OSError) else str(error)
    where = f"relative to {run.cwd or str(Path.cwd())!r}" if "/" in run.argv[0] else "in the folders of PATH"
    return f"cannot start {run.argv[0]!r}: {why} (looked for {where})"
