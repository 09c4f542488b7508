"""What a batch tells of its runs: worker lines come in, checked messages go out; a broken conversation has a name."""

from __future__ import annotations

import socket
from pathlib import Path

from pytest_mlhpc.batch.plan import PROTOCOL, Plan, RunPlan
from pytest_mlhpc.provision.command import OUTPUT_CAP, Finished, measure
from pytest_mlhpc.provision.messages import result_message, run_message
from pytest_mlhpc.results.failures import Failure
from pytest_mlhpc.results.lines import Decoder, Fault, Message


class Conversation:
    """The worker lines of one allocation. ``heard`` whether anything came; ``mismatch`` what does not fit together.

    Args:
        plan: what the batch was told to do.
        log: where the batch's own words are, for the texts of failures.
    """

    def __init__(self, plan: Plan, log: Path) -> None:
        self.heard = False
        self.mismatch = ""
        self._plan = plan
        self._log = log
        self._decoder = Decoder({run.run_id: run.nonce for run in plan.runs})
        self._runs = {run.run_id: run for run in plan.runs}
        self._failed: set[str] = set()
        self._ended: set[str] = set()

    @property
    def complete(self) -> bool:
        """Whether every run has come to its end."""
        return self._ended >= set(self._runs)

    @property
    def failing(self) -> bool:
        """Whether a run has failed and its end was not heard of."""
        return bool(self._failed - self._ended)

    def take(self, data: bytes) -> list[Message]:
        """Decode worker lines; what is none of them is a failure of the run."""
        self.heard = True
        return [message for item in self._decoder.feed(data) for message in self._check(item)]

    def finish(self) -> list[Message]:
        """Say that nothing more will come; return failures for what was left unfinished."""
        return [message for fault in self._decoder.finish() for message in self._check(fault)]

    def damaged(self, text: str) -> list[Message]:
        """Return the failure of the run that was under way when the channel was damaged."""
        return self._check(Fault("truncated_result", text))

    def _check(self, item: Message | Fault) -> list[Message]:
        if isinstance(item, Fault):
            unfinished = [run_id for run_id in self._runs if run_id not in self._ended]
            run = self._runs.get(item.run_id) or self._runs[(unfinished or list(self._runs))[0]]
            return self._fail(run, item.outcome, f"worker lines: {item.text}")
        run = self._runs[item.run_id]
        if item.kind == "started" and (mismatch := self._mismatch(item)):
            self.mismatch = mismatch
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
        ours = (PROTOCOL, self._plan.payload_sha256)
        if theirs == ours:
            return ""
        return f"the worker has protocol {theirs[0]} and payload {theirs[1]}, we have {ours[0]} and {ours[1]}"

    def _command(self, run: RunPlan, end: Message) -> Message:
        folder = Path(self._plan.directory) / run.run_id
        log = folder / ("rank0.log" if run.launcher == "plain" else "launcher.log")
        times = [end.body.get(name) for name in ("started_ns", "ended_ns")]
        began, ended = (time if isinstance(time, int) else 0 for time in times)
        host = str(end.body.get("host") or socket.gethostname())
        try:
            size = log.stat().st_size
            with log.open("rb") as file:
                output = file.read(OUTPUT_CAP)
        except OSError as error:
            return result_message(run, Failure("no_result", f"cannot read {log}: {error.strerror}"))
        code = next((code for code in end.body["exit"] if code), 0)
        finished = Finished(code, output, max(0, size - OUTPUT_CAP), log, host, began, ended)
        return result_message(run, measure(run, finished))
