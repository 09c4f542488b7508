"""A queue against a provisioner that does what the test says, when it says so."""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pytest_mlhpc.errors import ProvisionError
from pytest_mlhpc.jobs.job import Attempt, Job, Outcome
from pytest_mlhpc.jobs.partition_queue import Callbacks
from pytest_mlhpc.jobs.plan import plan_of
from pytest_mlhpc.jobs.provisioner import AllocationEnded, Handle, LineArrived, StateChanged
from pytest_mlhpc.jobs.queue import Driver
from pytest_mlhpc.jobs.spec import JobSpec, JobState
from pytest_mlhpc.node.protocol.lines import Message

#: After so many seconds a test hangs.
HANG_S = 300.0


class ScriptedProvisioner:
    """A provisioner whose allocations change and end when the test says so."""

    def __init__(self) -> None:
        self.submitted: queue.Queue[Handle] = queue.Queue()
        self.adopted: queue.Queue[Handle] = queue.Queue()
        self.cancelled: list[str] = []
        self.cancel_calls: list[int] = []  #: of how many allocations each was
        self.skipped: list[str] = []
        self.refusal = ""
        self.unsure: set[str] = set()  #: allocations of which nobody knows whether they were cancelled
        self.closed = False
        self._events: queue.Queue[Any] = queue.Queue()

    def validate(self, spec):
        return "too big" if spec.name == "big" else ""

    def longest(self):
        return None

    def submit(self, plan):
        if self.refusal:
            raise ProvisionError("rejected", self.refusal)
        handle = Handle(plan.allocation_id, Path(plan.directory))
        self.submitted.put(handle)
        return handle

    def adopt(self, plan, native_id):
        handle = Handle(plan.allocation_id, Path(plan.directory), native_id)
        self.adopted.put(handle)
        return handle

    def send(self, event):
        self._events.put(event)

    def wake(self):
        self._events.put(None)

    def events(self, handles, timeout_s):
        try:
            event = self._events.get(timeout=min(timeout_s, 0.2))
        except queue.Empty:
            return []
        return [event] if event is not None else []

    def skip(self, handle, run_ids):
        self.skipped += run_ids

    def cancel(self, handles):
        self.cancel_calls.append(len(handles))
        self.cancelled += [handle.id for handle in handles]
        return [handle for handle in handles if handle.id in self.unsure]

    def close(self):
        self.closed = True


class QueueWorld:
    """A driver with its surroundings. ``reruns`` says how many re-runs the judge wants of a job, by its name."""

    def __init__(
        self, folder: Path, command: Callable[..., JobSpec], max_jobs: int, unjudged: Any, **options: Any
    ):
        self.provisioner = ScriptedProvisioner()
        self.ledger: list[tuple[str, str]] = []
        self.reruns: dict[str, int] = {}
        self.concluded: list[str] = []
        self.owns_ledger = True
        self._command = command
        callbacks = Callbacks(
            plan=lambda specs, excluded: plan_of(specs, folder, "", excluded),
            submitted=lambda specs, plan: self.ledger.append(("submitted", plan.allocation_id)),
            accepted=lambda allocation, native_id: self.ledger.append(("accepted", native_id)),
            concluded=self.concluded.extend,
            ended=lambda allocation: self.ledger.append(("ended", allocation)),
            judge=self._judge,
            beat=lambda: self.owns_ledger,
            unjudged=unjudged,
        )
        self.driver = Driver("test", self.provisioner, max_jobs, callbacks, **options)
        self.driver.start()

    def _judge(self, job):
        if reruns := self.reruns.pop(job.spec.name, 0):
            return reruns
        first = job.attempts[0]
        failure = first.failure if first.handle is None else None  # it was not submitted
        return Outcome(job.spec.node_id, job.spec.benchmark, failure=failure, attempts=len(job.attempts))

    def add(self, *specs: JobSpec) -> list[Job]:
        """Give the driver a job for each spec."""
        jobs = [Job(spec) for spec in specs]
        self.driver.add(jobs)
        return jobs

    def add_commands(self, count: int) -> list[Job]:
        """Give the driver jobs called job0, job1 and so on."""
        return self.add(*map(self._command, range(count)))

    def submit_one(self) -> tuple[Job, Handle]:
        """Give the driver one job, which is submitted."""
        (job,) = self.add_commands(1)
        return job, self.next()

    def next(self) -> Handle:
        """Return the next allocation that was submitted."""
        return self.provisioner.submitted.get(timeout=HANG_S)

    def next_adopted(self) -> Handle:
        return self.provisioner.adopted.get(timeout=HANG_S)

    def end(self, handle: Handle, error: Exception | None = None, **fields: Any) -> None:
        self.provisioner.send(AllocationEnded(handle, error, **fields))

    def change(self, handle: Handle, state: JobState, reason: str = "", **fields: Any) -> None:
        self.provisioner.send(StateChanged(handle, state, reason, **fields))

    def line(self, handle: Handle, attempt: Attempt, kind: str, **body: Any) -> None:
        """Let a worker line of a run arrive."""
        self.provisioner.send(LineArrived(handle, Message(attempt.run.run_id, attempt.run.nonce, kind, body)))

    def ledger_events(self) -> list[str]:
        return [event for event, _ in self.ledger]

    def ended_allocations(self) -> set[str]:
        """Return the allocations whose end the ledger knows."""
        return {allocation for event, allocation in self.ledger if event == "ended"}

    def close(self, *, detach: bool = False) -> None:
        """End the session and wait for its driver."""
        self.driver.close(detach=detach)
        self.join()

    def join(self) -> None:
        self.driver.join(HANG_S)
        assert not self.driver.is_alive()
        assert self.provisioner.closed


def outcome_of(job: Job) -> Outcome:
    """Wait for the end of a job."""
    assert job.done.wait(HANG_S)
    return job.outcome


def failure_of(job: Job) -> Any:
    return outcome_of(job).failure
