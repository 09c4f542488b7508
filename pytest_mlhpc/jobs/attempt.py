"""One attempt of a job: what was sent out, what came home, and what is wrong with it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_mlhpc.batch.plan import HELD, VETTED, RunPlan
from pytest_mlhpc.errors import InfrastructureError, MlhpcError, RunFailure
from pytest_mlhpc.provision.base import Handle
from pytest_mlhpc.results.failures import FAILURES, INFRASTRUCTURE, Failure
from pytest_mlhpc.results.lines import Message
from pytest_mlhpc.results.schema import Measurement, SchemaError, from_json


@dataclass
class Attempt:
    """Gathers the messages of one run.

    Times are integer ns UTC, zero while unknown: submitted, nodes were had (``allocated_ns``), the run began and ended.
    Those of the run are its node's own, so that only their difference means something beside the others.
    """

    run: RunPlan
    number: int
    handle: Handle | None = None
    directory: str = ""
    submitted_ns: int = 0
    allocated_ns: int = 0
    started_ns: int = 0
    ended_ns: int = 0
    nodes: tuple[str, ...] = ()
    job_id: str = ""  #: the scheduler's own id of the allocation
    step_id: str = ""  #: and of this run within it
    energy_j: float | None = None  #: as the scheduler accounts it
    shared: bool = False  #: other runs have the same allocation, before or after it
    adopted: bool = False  #: an earlier session submitted it, so that now says nothing of when it ran
    made_from: tuple[str, str, str] | None = None  #: purpose, branch, commit of the session that submitted it
    vetted: Mapping[str, Any] | None = (
        None  #: what vetting said of the allocation's nodes (``batch/vetting.py``)
    )
    over: bool = False  #: nothing more will come
    heard: bool = False  #: the run began
    measurement: Measurement | None = None
    failures: list[Failure] = field(default_factory=list)

    def receive(self, message: Message) -> None:
        """Take in a measurement, failed or end message."""
        if (message.run_id, message.nonce) != (self.run.run_id, self.run.nonce):
            self._fail("foreign_result", f"a {message.kind} line came from run {message.run_id}")
        elif message.kind == "started":
            self.heard = True
            self.step_id = str(message.body.get("step") or "")
        elif message.kind == "vetted":
            self.vetted = _joined(self.vetted, message.body)
        elif message.kind == "measurement":
            self._measured(message)
        elif message.kind == "failed":
            self._failed(message)
        elif message.kind == "end":
            self._ended(message)

    def finish(self, error: MlhpcError | None) -> None:
        """Note that nothing more will come, and why, if that was not the plan's own end."""
        self.ended_ns = self.ended_ns or (self.allocated_ns if self.adopted else 0) or time.time_ns()
        if isinstance(error, (InfrastructureError, RunFailure)):
            text = str(error).removeprefix(f"{error.outcome}: ")
            self.failures.append(Failure(error.outcome, text, self.directory, getattr(error, "nodes", ())))
        elif error is not None:
            self._fail("launch_failed", str(error))
        if not self.failures and not self._has_result:
            self._fail("no_result", "the run ended without reporting a result")
        self.over = True  # last: other threads read the failure after it

    @property
    def _has_result(self) -> bool:
        if self.run.workload == VETTED:
            return "verdict" in (self.vetted or {})
        return self.measurement is not None or self.run.workload == HELD

    @property
    def run_s(self) -> float:
        """How long the run took, in seconds; of one that never began 0."""
        began = self.started_ns or (0 if self.shared else self.allocated_ns)
        return max(0, self.ended_ns - began) / 1e9 if began else 0.0

    @property
    def queue_s(self) -> float:
        """How long it waited for nodes, in seconds."""
        return max(0, (self.allocated_ns or self.ended_ns) - self.submitted_ns) / 1e9

    @property
    def failure(self) -> Failure | None:
        """The failure that is told: the machine's before the run's, the first of several."""
        return next((f for f in self.failures if f.infrastructure), next(iter(self.failures), None))

    def _measured(self, message: Message) -> None:
        if self.measurement is not None:
            self._fail("duplicate_result", "the run reported two results")
            return
        try:
            measurement = from_json(Measurement, dict(message.body))
        except SchemaError as error:
            of_metric = ".metrics[" in str(error) or str(error).startswith("metric ")
            self._fail("metric_invalid" if of_metric else "truncated_result", str(error))
            return
        if (measurement.run_id, measurement.nonce) != (self.run.run_id, self.run.nonce):
            self._fail("foreign_result", f"the result carries the id of run {measurement.run_id}")
            return
        self.measurement = measurement

    def _failed(self, message: Message) -> None:
        outcome, text = str(message.body.get("outcome")), str(message.body.get("text", ""))
        if outcome not in FAILURES and outcome not in INFRASTRUCTURE:
            outcome, text = "worker_exit", f"{outcome}: {text}"
        nodes = message.body.get("nodes")
        named = tuple(map(str, nodes)) if isinstance(nodes, list) else ()
        log = str(message.body.get("log") or "") or self.directory
        self.failures.append(Failure(outcome, text, log, named))

    def _ended(self, message: Message) -> None:
        began, ended = message.body.get("started_ns"), message.body.get("ended_ns")
        if isinstance(began, int) and isinstance(ended, int) and 0 < began <= ended:
            self.started_ns, self.ended_ns = began, ended
        self.step_id = str(message.body.get("step") or self.step_id)
        energy = message.body.get("energy_j")
        self.energy_j = float(energy) if isinstance(energy, (int, float)) else None
        codes = message.body.get("exit") or []
        bad = [code for code in codes if code]
        if bad and not self.failures:
            killed = [code for code in bad if code < 0]
            if killed:
                self._fail("worker_killed", f"a process was killed by signal {-killed[0]}")
            else:
                self._fail("worker_exit", f"a process ended with exit code {bad[0]}")

    def _fail(self, outcome: str, text: str, log: str = "") -> None:
        self.failures.append(Failure(outcome, text, log or self.directory))


def _joined(before: Mapping[str, Any] | None, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return *body* with the unfit nodes of an earlier vetting, without which the allocation was made again."""
    unfit = [one.get("unfit") for one in (before or {}, body)]
    probed = {"probed": before["probed"]} if before and "probed" in before else {}
    return {
        **probed,
        **body,
        "unfit": {host: why for one in unfit if isinstance(one, dict) for host, why in one.items()},
    }
