"""`local` with a batch: worker lines come in, a broken conversation is a failure with a name."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from pytest_mlhpc.batch.plan import PROTOCOL, Plan, RunPlan
from pytest_mlhpc.batch.processes import describe_exit
from pytest_mlhpc.errors import ProtocolError, ProvisionError, RunFailure
from pytest_mlhpc.provision.command import OUTPUT_CAP, Finished, last_lines, measure
from pytest_mlhpc.provision.guardian import remove_socket_folder, socket_base, socket_prefix
from pytest_mlhpc.provision.local_process import LocalProcess, no_room, popen, result_message, run_message
from pytest_mlhpc.results.failures import Failure
from pytest_mlhpc.results.lines import Decoder, Fault, Message


class BatchProcess(LocalProcess):
    """A batch: its standard output is worker lines, its standard input its lifeline."""

    def __init__(self, plan: Plan, process: subprocess.Popen[bytes], log: Path, sockets: str) -> None:
        super().__init__(plan, process, plan.time_limit_s)
        self._sockets = sockets
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
        return [run_message(run, "failed", {"outcome": outcome, "text": text, "log": str(self._log)})]

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
            return result_message(run, Failure("no_result", f"cannot read {log}: {error.strerror}"))
        code = next((code for code in end.body["exit"] if code), 0)
        finished = Finished(code, output, max(0, size - OUTPUT_CAP), log, socket.gethostname(), now, now)
        return result_message(run, measure(run, finished))

    def out_of_time(self) -> None:
        """Note it, and end the batch, which ends its ranks."""
        self.error = RunFailure(
            "time_limit", f"the allocation did not end within {self.plan.time_limit_s:g} s"
        )
        super().out_of_time()

    def close(self) -> None:
        """Give back descriptors and the socket folder, which a batch that was killed could not remove."""
        super().close()
        remove_socket_folder(self._sockets)

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


def start_batch(plan: Plan, environment: Mapping[str, str], payload: Path) -> BatchProcess:
    """Start a batch for *plan* from the zip *payload*.

    Raises:
        ProvisionError: ``launch_failed`` or ``disk_full``.
    """
    if not payload.is_file():
        raise ProvisionError("launch_failed", f"the payload {payload} is missing")
    python, directory = plan.runs[0].python, Path(plan.directory)
    path = os.pathsep.join(filter(None, (str(payload), environment.get("PYTHONPATH"))))
    log = directory / "batch.log"
    argv = [python, "-m", "pytest_mlhpc.batch.main", str(directory / "plan.json")]
    try:
        sockets = tempfile.mkdtemp(prefix=socket_prefix(environment["MLHPC_SESSION"]), dir=socket_base())
    except OSError as error:
        raise ProvisionError("disk_full", no_room(error, Path(socket_base()))) from error
    environment = {**environment, "PYTHONPATH": path, "MLHPC_SOCKETS": sockets}
    try:
        with log.open("wb") as file:
            # Started in the plan's directory: python -m looks there before it looks into the payload.
            process = popen(argv, environment, plan.directory, log=file.fileno())
    except OSError as error:
        remove_socket_folder(sockets)
        if error.filename == str(log):
            raise ProvisionError("disk_full", no_room(error, log)) from error
        raise ProvisionError("launch_failed", f"cannot start {python!r}: {error.strerror}") from error
    return BatchProcess(plan, process, log, sockets)
