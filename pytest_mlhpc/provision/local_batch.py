"""`local` with a batch: worker lines come in, a broken conversation is a failure with a name."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from pytest_mlhpc.batch.plan import Plan
from pytest_mlhpc.batch.processes import describe_exit
from pytest_mlhpc.errors import ProtocolError, ProvisionError, RunFailure
from pytest_mlhpc.provision.command import last_lines
from pytest_mlhpc.provision.conversation import Conversation
from pytest_mlhpc.provision.guardian import remove_socket_folder, socket_base, socket_prefix
from pytest_mlhpc.provision.local_process import LocalProcess, no_room, popen
from pytest_mlhpc.results.lines import Message


class BatchProcess(LocalProcess):
    """A batch: its standard output is worker lines, its standard input its lifeline."""

    def __init__(self, plan: Plan, process: subprocess.Popen[bytes], log: Path, sockets: str) -> None:
        super().__init__(plan, process, plan.time_limit_s)
        self._sockets = sockets
        self._log = log
        self._conversation = Conversation(plan, log)

    def take(self, data: bytes) -> list[Message]:
        """Decode worker lines; a batch that does not fit to us is ended."""
        messages = self._conversation.take(data)
        if self._conversation.mismatch:
            self.tell(signal.SIGTERM)
        return messages

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
        yield from self._conversation.finish()
        if self.error is not None or self._conversation.complete or self._conversation.failing:
            return
        words = ""
        with contextlib.suppress(OSError):
            words = last_lines(self._log.read_bytes()[-4096:])
        text = f"the batch {describe_exit(code)} before its runs had ended" + (
            f"; its last lines:\n{words}" if words else ""
        )
        outcome = "channel_broken" if self._conversation.heard else "launch_failed"
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
