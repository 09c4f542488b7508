"""The messages of one allocation: worker lines of a batch are decoded and checked, faults of the channel become failures.

Messages that the controller makes itself are here too, in the same form.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pytest_mlhpc.node.protocol.lines import Decoder, Fault, Message
from pytest_mlhpc.node.protocol.plan import PROTOCOL, Plan, RunPlan
from pytest_mlhpc.node.protocol.schema import Measurement, to_json
from pytest_mlhpc.provision.command import OUTPUT_CAP, FinishedProgram, measure
from pytest_mlhpc.store.record import Failure


class Conversation:
    """The worker lines of one allocation. ``heard``: whether any came; ``mismatch``: a difference of protocol or payload.

    Args:
        plan: the plan of the batch.
        log: the batch's own output, for the texts of failures.
        there: the plan's directory as nodes see it, empty where that is the same: paths in messages become those here.
    """

    def __init__(self, plan: Plan, log: Path, there: str = "") -> None:
        self._there = there
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
        """Whether every run has ended."""
        return self._ended >= set(self._runs)

    @property
    def failing(self) -> bool:
        """Whether a run has failed and its end has not come."""
        return bool(self._failed - self._ended)

    def take(self, data: bytes) -> list[Message]:
        """Decode worker lines; an invalid line is a failure of its run."""
        self.heard = True
        return [message for item in self._decoder.feed(data) for message in self._check(item)]

    def finish(self) -> list[Message]:
        """End the conversation; return failures for unfinished lines."""
        return [message for fault in self._decoder.finish() for message in self._check(fault)]

    def damaged(self, text: str) -> list[Message]:
        """Return the failure of the run that was active when the channel was damaged."""
        return self._check(Fault("truncated_result", text))

    def _check(self, item: Message | Fault) -> list[Message]:
        if isinstance(item, Fault):
            unfinished = [run_id for run_id in self._runs if run_id not in self._ended]
            run = self._runs.get(item.run_id) or self._runs[(unfinished or list(self._runs))[0]]
            return self._fail(run, item.outcome, f"worker lines: {item.text}")
        run = self._runs[item.run_id]
        if self._there:
            item = replace(item, body=self._with_paths_here(item.body))
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

    def _with_paths_here(self, body: Mapping[str, object]) -> dict[str, object]:
        """Return *body* with the paths of files that were copied from there."""
        return {
            name: f"{self._plan.directory}{value[len(self._there) :]}"
            if isinstance(value, str) and value.startswith(f"{self._there}/")
            else value
            for name, value in body.items()
        }

    def _fail(self, run: RunPlan, outcome: str, text: str) -> list[Message]:
        """Return one failed message for the first fault of a run; others are its consequences."""
        if run.run_id in self._failed:
            return []
        self._failed.add(run.run_id)
        return [run_message(run, "failed", {"outcome": outcome, "text": text, "log": str(self._log)})]

    def _mismatch(self, started: Message) -> str:
        worker = (started.body["protocol"], started.body["payload_sha256"])
        own = (PROTOCOL, self._plan.payload_sha256)
        if worker == own:
            return ""
        return f"the worker has protocol {worker[0]} and payload {worker[1]}, we have {own[0]} and {own[1]}"

    def _command(self, run: RunPlan, end: Message) -> Message:
        folder = Path(self._plan.directory) / run.run_id
        names = ("container.log", "rank0.log" if run.launcher == "plain" else "launcher.log")
        log = next((folder / name for name in names if (folder / name).exists()), folder / names[1])
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
        finished = FinishedProgram(code, output, max(0, size - OUTPUT_CAP), log, host, began, ended, folder)
        return result_message(run, measure(run, finished))


def result_message(run: RunPlan, found: Measurement | Failure) -> Message:
    """Return the measurement or failed message of a run's result."""
    if isinstance(found, Failure):
        return run_message(run, "failed", {"outcome": found.outcome, "text": found.text, "log": found.log})
    return run_message(run, "measurement", to_json(found))


def run_message(run: RunPlan, kind: str, body: Mapping[str, object]) -> Message:
    """Return one message of *run*."""
    return Message(run.run_id, run.nonce, kind, body)
