"""Jobs, their attempts, the allocations that carry them, the retry policy, the outcome that a test gets, and nodes that it is granted."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pytest_mlhpc.errors import InfrastructureError, MlhpcError, ProvisionError, RunFailure
from pytest_mlhpc.jobs.provisioner import Handle
from pytest_mlhpc.jobs.spec import JobSpec, JobState, allocation_time_s, longest_allocation_s
from pytest_mlhpc.node.batch.output import REQUESTS, append
from pytest_mlhpc.node.cores import with_filled
from pytest_mlhpc.node.protocol.lines import Message
from pytest_mlhpc.node.protocol.plan import HELD, VETTED, FinishedRun, Plan, RunPlan
from pytest_mlhpc.node.protocol.schema import Measurement, SchemaError, from_json
from pytest_mlhpc.node.run_files import place_of_run
from pytest_mlhpc.node.vet.finding import VetVerdict
from pytest_mlhpc.store.record import FAILURES, INFRASTRUCTURE, Failure, Judgement, Verdict


@dataclass(frozen=True)
class GrantedNodes:
    """Nodes that a test holds. ``directory`` is the folder through which their batch is asked (``node/batch/program_requests.py``)."""

    id: str  #: the scheduler's own id of the allocation, or ours where it has none
    nodes: tuple[str, ...]
    partition: str
    cores_per_node: int
    directory: str


@dataclass(frozen=True)
class Outcome:
    """The end of one declared job: measured and judged, or failed, all attempts considered.

    ``measurement`` is attempt 0's. ``failure`` is set when the run was broken; a slow run has a judgement that says
    so instead. ``record_id`` names the stored record. ``directory`` holds plan and logs.
    """

    node_id: str
    benchmark: str
    measurement: Measurement | None = None
    judgement: Judgement | None = None
    failure: Failure | None = None
    attempts: int = 0
    record_id: str = ""
    directory: str = ""
    vetting: VetVerdict | None = None  #: instead of a measurement: what was found of the nodes
    granted: GrantedNodes | None = None  #: instead of a measurement: nodes that are the test's while it runs
    artifacts: tuple[str, ...] = ()  #: names or globs of files in the run's folder that the test may read
    needed: Mapping[str, FinishedRun] = field(default_factory=dict)  #: what the runs that it needed have left
    comparison: tuple[Any, ...] = ()  #: of A against B: a result for each metric (``session/against.py``)

    @property
    def finished_run(self) -> FinishedRun:
        """Where it left its files."""
        folder, log = place_of_run(Path(self.directory), self.record_id)
        return FinishedRun(str(folder), str(log), self.artifacts)


#: Outcomes that the infrastructure causes. The attempt is retried, away from failed nodes.
RETRYABLE = frozenset({"node_failure", "preempted", "not_begun"})


@dataclass
class Attempt:
    """One attempt of a job: the messages of its run, its times and its failures.

    Times are integer ns UTC, zero while unknown: of the submission, of the allocation, of the run's begin and end. Those of
    the run are by its node's clock, so that only their difference can be compared with the others.
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
    energy_j: float | None = None  #: by the scheduler's accounting
    beside: str = ""  #: another user of the machine that this run should have had alone
    shared: bool = False  #: other runs have the same allocation, before or after it
    adopted: bool = False  #: an earlier session submitted it: the present time is not that of the run
    made_from: tuple[str, str, str] | None = None  #: purpose, branch, commit of the session that submitted it
    #: result of the vetting of the allocation's nodes (``node/batch/vetting.py``)
    vetted: Mapping[str, Any] | None = None
    over: bool = False  #: no message will follow
    heard: bool = False  #: the run began
    measurement: Measurement | None = None
    failures: list[Failure] = field(default_factory=list)

    def receive(self, message: Message) -> None:
        """Process a message of the run."""
        if (message.run_id, message.nonce) != (self.run.run_id, self.run.nonce):
            self._fail("foreign_result", f"a {message.kind} line came from run {message.run_id}")
        elif message.kind == "started":
            self.heard = True
            self.step_id = str(message.body.get("step") or "")
        elif message.kind == "vetted":
            self.vetted = _merge_vettings(self.vetted, message.body)
        elif message.kind == "measurement":
            self._receive_measurement(message)
        elif message.kind == "failed":
            self._receive_failure(message)
        elif message.kind == "end":
            self._receive_end(message)

    def finish(self, error: MlhpcError | None) -> None:
        """End the attempt, with the error of its allocation unless that ended as planned."""
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
        """Duration of the run, in seconds; 0 if it never began."""
        began = self.started_ns or (0 if self.shared else self.allocated_ns)
        return max(0, self.ended_ns - began) / 1e9 if began else 0.0

    @property
    def queue_s(self) -> float:
        """Wait for nodes, in seconds."""
        return max(0, (self.allocated_ns or self.ended_ns) - self.submitted_ns) / 1e9

    @property
    def failure(self) -> Failure | None:
        """The reported failure."""
        return first_failure(self.failures)

    def _receive_measurement(self, message: Message) -> None:
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

    def _receive_failure(self, message: Message) -> None:
        outcome, text = str(message.body.get("outcome")), str(message.body.get("text", ""))
        if outcome not in FAILURES and outcome not in INFRASTRUCTURE:
            outcome, text = "worker_exit", f"{outcome}: {text}"
        nodes = message.body.get("nodes")
        named = tuple(map(str, nodes)) if isinstance(nodes, list) else ()
        log = str(message.body.get("log") or "") or self.directory
        self.failures.append(Failure(outcome, text, log, named))

    def _receive_end(self, message: Message) -> None:
        began, ended = message.body.get("started_ns"), message.body.get("ended_ns")
        if isinstance(began, int) and isinstance(ended, int) and 0 < began <= ended:
            self.started_ns, self.ended_ns = began, ended
        self.step_id = str(message.body.get("step") or self.step_id)
        self.run = with_filled(self.run, message.body)
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


def first_failure(failures: Sequence[Failure]) -> Failure | None:
    """Return the failure that counts: the infrastructure's before the run's, the first of several."""
    return next((one for one in failures if one.infrastructure), next(iter(failures), None))


def _merge_vettings(before: Mapping[str, Any] | None, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return *body* with the unfit nodes of an earlier vetting, which the allocation then avoided."""
    unfit = [one.get("unfit") for one in (before or {}, body)]
    probed = {"probed": before["probed"]} if before and "probed" in before else {}
    return {
        **probed,
        **body,
        "unfit": {host: why for one in unfit if isinstance(one, dict) for host, why in one.items()},
    }


#: Runs of one block of a comparison, A B B A: a steady drift of the machine hits both sides alike.
BLOCK = 4


def is_first_side(number: int) -> bool:
    """Return whether attempt *number* of a comparison, from 1, is a run of A."""
    return (number - 1) % BLOCK in (0, BLOCK - 1)


@dataclass(frozen=True)
class Opponent:
    """The other side of a comparison: B against the A of the job's own spec.

    ``runs`` are wanted of both sides together, in one allocation; below ``fewest`` nothing could be said. Both are even.
    """

    spec: JobSpec
    runs: int
    fewest: int


@dataclass(eq=False)
class Job:
    """A declared job: its state, its attempts and its outcome.

    Only its driver's thread writes it; others read single fields, and the outcome once ``done`` is set.
    """

    spec: JobSpec
    state: JobState = JobState.DECLARED
    since: float = field(default_factory=time.monotonic)  #: start of that state (monotonic, s)
    reason: str = ""
    progress: Mapping[str, Any] = field(default_factory=dict)  #: body of the last progress line
    attempts: list[Attempt] = field(default_factory=list)
    #: attempts that the infrastructure ended, and that were retried
    lost: list[Attempt] = field(default_factory=list)
    excluded: set[str] = field(default_factory=set)  #: nodes that failed during its attempts
    refused: Failure | None = None  #: why a re-run was refused
    unbuilt: Failure | None = None  #: why a build that it needs failed, before anything was submitted
    #: what it is compared with; its attempts then count from 1 and alternate
    opponent: Opponent | None = None
    planned: int = 0  #: runs of a comparison that were submitted
    pending: int = 0  #: attempts submitted or waiting to be
    outcome: Outcome | None = None
    done: threading.Event = field(default_factory=threading.Event)
    taken: bool = False  #: its test has read the outcome
    previous: Job | None = None  #: the one before it in test order
    needs: Mapping[str, Job] = field(default_factory=dict)  #: jobs that end before it is submitted

    @property
    def needed(self) -> Mapping[str, FinishedRun]:
        """What the runs that it needs have left: of a further attempt, the same as of the first."""
        for attempt in (*self.lost, *self.attempts):
            return attempt.run.needed
        return {name: job.outcome.finished_run for name, job in self.needs.items() if job.outcome}

    @property
    def blocked(self) -> Failure | None:
        """Why it cannot run: a build was not made, or a run that it needs has failed. Known once it is ready."""
        if self.unbuilt or self.lost or self.attempts:
            return self.unbuilt
        for name, job in self.needs.items():
            failure = job.outcome.failure if job.outcome else None
            if failure is None:
                continue
            if failure.infrastructure or failure.given_up:
                return replace(failure, text=f"the run {name} that it needs: {failure.text}")
            text = f"the run {name} ({' '.join(job.spec.argv)[:200]}) that it needs: {failure.outcome}: {failure.text}"
            return replace(failure, outcome="prepare_failed", text=text)
        return None

    def take(self) -> None:
        """Note that its test has read the outcome, for which that of each run that it needs was read, too."""
        self.taken = True
        for job in self.needs.values():
            job.take()

    @property
    def ready(self) -> bool:
        """Whether it may be submitted: what it needs has ended.

        Nodes that a test holds are requested once no earlier job can be re-run. Otherwise the nodes would wait idle for
        their test, the test for earlier tests, and these for re-runs that wait for the nodes.
        """
        if not (self.lost or self.attempts or all(job.done.is_set() for job in self.needs.values())):
            return False
        before = self.previous if self.spec.holds_nodes else None
        while before is not None and before.done.is_set():
            before = before.previous
        return before is None

    def spec_of(self, number: int) -> JobSpec:
        """Return what attempt *number* runs."""
        return self.spec if self.opponent is None or is_first_side(number) else self.opponent.spec

    @property
    def next_number(self) -> int:
        """The number of its next attempt. None of a comparison is 0: only first attempts feed histories."""
        return 1 + max(
            (attempt.number for attempt in self.attempts), default=0 if self.opponent is not None else -1
        )

    @property
    def granted(self) -> bool:
        """Whether its test was granted nodes, which it holds until its end."""
        return self.outcome is not None and self.outcome.granted is not None

    def become(self, state: JobState) -> None:
        """Set the state; ``since`` changes only with it."""
        if state is not self.state:
            self.state, self.since = state, time.monotonic()

    def conclude(self, outcome: Outcome) -> None:
        """Set the outcome and ``done``; the first outcome counts."""
        if self.outcome is None:
            self.outcome = outcome
            self.become(JobState.CANCELLED if _cancelled(outcome) else JobState.ENDED)
            self.done.set()

    def fail(self, outcome: str, text: str) -> None:
        """End the job without a measurement."""
        directory = self.attempts[-1].directory if self.attempts else ""
        self.conclude(
            Outcome(
                node_id=self.spec.node_id,
                benchmark=self.spec.benchmark,
                failure=Failure(outcome, text, directory),
                attempts=len(self.attempts),
                directory=directory,
            )
        )


def runs_that_fit(job: Job, longest_s: float | None) -> tuple[int, str]:
    """Return how many runs of a comparison fit into one allocation of at most *longest_s* seconds, and why these are too few."""
    if job.opponent is None:
        return 1, ""
    spec, fewest, runs = job.spec, job.opponent.fewest, job.opponent.runs
    limit_s = longest_allocation_s(spec, longest_s)
    while runs >= fewest and allocation_time_s([spec] * runs) > limit_s:
        runs -= 2
    if runs >= fewest:
        return runs, ""
    excess_s = allocation_time_s([spec] * fewest) - limit_s
    return 0, (
        f"a comparison needs {fewest} runs in one allocation, and one of {spec.target.partition.id} lasts at most "
        f"{limit_s:.0f} s: set time_limit={max(1, int(spec.time_limit_s - excess_s / fewest))} of the test, or less"
    )


def _cancelled(outcome: Outcome) -> bool:
    return outcome.failure is not None and outcome.failure.outcome == "cancelled"


@dataclass(frozen=True)
class ActiveAllocation:
    """A submitted allocation: its handle, and the attempt of each of its runs."""

    handle: Handle
    runs: Mapping[str, tuple[Job, Attempt]]  #: run id -> job and attempt
    shared: bool = False  #: its plan has several runs, which end one by one
    others: frozenset[str] = frozenset()  #: unrecorded runs that no test of this session needs

    @property
    def unfinished(self) -> list[tuple[Job, Attempt]]:
        """Attempts that have not ended."""
        return [(job, attempt) for job, attempt in self.runs.values() if not attempt.over]


@dataclass(frozen=True)
class AdoptedAllocation:
    """An allocation of an earlier session, with those of its runs that this session's tests need."""

    plan: Plan
    native_id: str
    runs: Mapping[str, tuple[Job, Attempt]]
    others: frozenset[str] = frozenset()


def used_nodes(job: Job) -> set[str]:
    """Return the nodes that re-runs avoid: those that ran the job, as long as the partition has enough others."""
    nodes = {node for attempt in job.attempts for node in attempt.nodes}
    return nodes if len(nodes) + job.spec.nodes <= job.spec.target.partition.nodes.max else set()


def failed_nodes(job: Job, attempt: Attempt) -> set[str]:
    """Return the nodes that caused the failure of *attempt*, and that a retry avoids.

    A run of several nodes avoids none where the partition may not have enough others: it would wait for ever.
    """
    failure = attempt.failure
    if failure is None or (job.spec.nodes > 1 and not _has_other_nodes(job, failure)):
        return set()
    return set(failure.nodes)


def may_retry(job: Job, attempt: Attempt) -> bool:
    """Return whether *attempt* failed for a reason that says nothing about the benchmark."""
    failure = attempt.failure
    if failure is None:
        return False
    if attempt.adopted and failure.outcome == "cancelled":
        return True  # cancelled by the session that submitted it; this one needs the result
    if failure.outcome == "unfit_nodes":
        return not job.spec.node and _has_other_nodes(job, failure)
    on_one_node = bool(job.spec.node) and failure.outcome == "node_failure"
    return failure.outcome in RETRYABLE and not on_one_node


def _has_other_nodes(job: Job, failure: Failure) -> bool:
    """Return whether the partition has enough nodes besides those that are excluded or failed by name."""
    excluded = job.excluded.union(failure.nodes)
    return bool(failure.nodes) and len(excluded) + job.spec.nodes <= job.spec.target.partition.nodes.max


def attempt_error(attempt: Attempt, error: MlhpcError | None) -> MlhpcError | None:
    """Return the error of an allocation for *attempt*: a run that never began does not have the failure of the others."""
    if attempt.shared and not attempt.heard and isinstance(error, RunFailure):
        return ProvisionError("not_begun", f"the job that it shared ended before it began: {error}")
    return error


def grant_nodes(job: Job, attempt: Attempt, started: Message) -> None:
    """Give *job* its outcome with the nodes of *started*: its test begins, and the allocation goes on."""
    if job.done.is_set():
        return
    named = started.body.get("nodes")
    nodes = tuple(map(str, named)) if isinstance(named, list) else attempt.nodes
    attempt.nodes = nodes or attempt.nodes
    granted = GrantedNodes(
        id=attempt.job_id or attempt.run.run_id,
        nodes=nodes,
        partition=job.spec.target.partition.name,
        cores_per_node=job.spec.target.partition.nodes.cores,
        directory=str(request_folder(attempt)),
    )
    job.conclude(
        Outcome(
            node_id=job.spec.node_id,
            benchmark=job.spec.benchmark,
            judgement=Judgement(Verdict.UNJUDGED),
            attempts=len(job.attempts),
            record_id=attempt.run.run_id,
            directory=attempt.directory,
            granted=granted,
        )
    )
    job.become(JobState.RUNNING)
    job.reason = ""


def release_nodes(attempt: Attempt) -> bool:
    """Ask the batch to release its nodes; return whether the request could be written."""
    try:
        append(request_folder(attempt) / REQUESTS, {"kind": "release"})
    except OSError:
        return False
    return True


def request_folder(attempt: Attempt) -> Path:
    """Return the folder of requests and answers. A run that holds nodes never shares its allocation."""
    return Path(attempt.directory) / attempt.run.run_id
