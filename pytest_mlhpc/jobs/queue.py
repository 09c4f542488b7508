"""The submit-ahead queue: one thread for each partition keeps its provisioner busy, in test order."""

from __future__ import annotations

import collections
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pytest_mlhpc.batch.plan import Plan
from pytest_mlhpc.errors import InfrastructureError, MlhpcError, StoreError
from pytest_mlhpc.jobs.attempt import Attempt
from pytest_mlhpc.jobs.job import Job
from pytest_mlhpc.jobs.spec import JobSpec, JobState
from pytest_mlhpc.provision.base import AllocationEnded, Event, LineArrived, Provisioner, StateChanged
from pytest_mlhpc.results.failures import Failure
from pytest_mlhpc.results.outcome import Outcome

#: Longest time that a driver waits for events without looking up; every request wakes it at once.
IDLE_S = 5.0


@dataclass(frozen=True)
class Callbacks:
    """What a driver needs of the session; all are called from the driver's thread.

    ``plan`` makes the plan of an attempt; ``submitted`` and ``ended`` write the ledger; ``judge`` gets a job whose
    attempts have all ended and returns its outcome, or how many more attempts it wants.
    """

    plan: Callable[[JobSpec, int], Plan]
    submitted: Callable[[JobSpec, Plan], None]
    ended: Callable[[str], None]
    judge: Callable[[Job], Outcome | int]


class Driver(threading.Thread):
    """Drives one provisioner: keeps up to *max_jobs* allocations in its queue until told to close."""

    def __init__(self, name: str, provisioner: Provisioner, max_jobs: int, callbacks: Callbacks) -> None:
        super().__init__(name=f"mlhpc-{name}", daemon=True)
        self._provisioner = provisioner
        self._max_jobs = max_jobs
        self._callbacks = callbacks
        self._waiting: collections.deque[Job] = collections.deque()
        self._active: dict[str, tuple[Job, Attempt]] = {}
        self._jobs: list[Job] = []
        self._requests: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._closing = False
        self._wake_lock = threading.Lock()  #: a provisioner that closes must not be woken at that moment
        self._gone = False
        self.crash = ""  #: traceback of an error of our own

    # Called from other threads.

    def add(self, jobs: Iterable[Job]) -> None:
        """Queue *jobs* in their order."""
        new = list(jobs)
        self._ask(lambda: self._add(new))

    def cancel(self, job: Job, reason: str) -> None:
        """End *job* wherever it stands; returns at once."""
        self._ask(lambda: self._cancel(job, reason))

    def close(self) -> None:
        """Cancel everything that has not ended; join the thread afterwards."""
        self._ask(self._close)

    def _ask(self, request: Callable[[], None]) -> None:
        self._requests.put(request)
        with self._wake_lock:
            if not self._gone:
                self._provisioner.wake()

    # The thread.

    def run(self) -> None:
        """Work until closed. Whatever happens, nothing is left running and every job has an outcome."""
        outcome, reason = "cancelled", "the session ended"
        try:
            while not self._closing:
                self._step()
        except BaseException:  # noqa: BLE001 - told to the main thread, which ends the session with it
            # pytest's own skip, fail and exit, and SystemExit, are no Exception; a thread would end with them in silence.
            self.crash = traceback.format_exc()
            outcome, reason = "channel_broken", "an internal error stopped the queue"
        try:
            self._shut(outcome, reason)
        except BaseException:  # noqa: BLE001 - as above; every job has its outcome by now
            self.crash += traceback.format_exc()

    def _step(self) -> None:
        self._take_requests(block=not self._active and not self._waiting)
        self._fill()
        if self._active and not self._closing:
            handles = [attempt.handle for _, attempt in self._active.values() if attempt.handle]
            for event in self._provisioner.events(handles, IDLE_S):
                self._on(event)

    def _take_requests(self, *, block: bool) -> None:
        try:
            self._requests.get(block=block)()
            while True:
                self._requests.get_nowait()()
        except queue.Empty:
            return

    def _add(self, jobs: list[Job]) -> None:
        self._jobs += jobs
        for job in jobs:
            job.pending = 1
            self._waiting.append(job)

    def _fill(self) -> None:
        while self._waiting and len(self._active) < self._max_jobs and not self._closing:
            job = self._waiting.popleft()
            if not job.done.is_set():
                self._submit(job)

    def _submit(self, job: Job) -> None:
        reason = self._provisioner.validate(job.spec)
        if reason:
            job.fail("rejected", reason)
            return
        try:
            plan = self._callbacks.plan(job.spec, len(job.attempts))
            self._hand_over(job, plan)
        except InfrastructureError as error:
            job.fail(error.outcome, str(error).removeprefix(f"{error.outcome}: "))
        except (OSError, StoreError) as error:
            job.fail("disk_full", str(error))
        except MlhpcError as error:
            job.fail("launch_failed", str(error))

    def _hand_over(self, job: Job, plan: Plan) -> None:
        attempt = Attempt(
            plan.runs[0], len(job.attempts), directory=plan.directory, submitted_ns=time.time_ns()
        )
        job.attempts.append(attempt)
        self._callbacks.submitted(job.spec, plan)
        try:
            attempt.handle = self._provisioner.submit(plan)
        except MlhpcError:
            self._callbacks.ended(plan.allocation_id)  # refused: there is nothing to clear up
            raise
        self._active[plan.allocation_id] = (job, attempt)
        if attempt.number == 0:
            job.state = JobState.QUEUED

    def _on(self, event: Event) -> None:
        job, attempt = self._active.get(event.handle.id, (None, None))
        if job is None or attempt is None:
            return  # cancelled meanwhile
        if isinstance(event, StateChanged):
            job.reason = event.reason
            if event.state is JobState.RUNNING and not attempt.started_ns:
                attempt.started_ns = time.time_ns()
            job.state = event.state if attempt.number == 0 else JobState.RERUNNING
        elif isinstance(event, LineArrived):
            if event.message.kind == "progress":
                job.progress = event.message.body
            else:
                attempt.receive(event.message)
        elif isinstance(event, AllocationEnded):
            attempt.finish(event.error)
            self._retire(event.handle.id)
            self._conclude(job)

    def _conclude(self, job: Job) -> None:
        job.pending -= 1
        if job.pending > 0:
            return
        verdict = self._callbacks.judge(job)
        if isinstance(verdict, Outcome):
            job.conclude(verdict)
            return
        job.state, job.progress, job.pending = JobState.RERUNNING, {}, verdict
        # To the front: tests are waited for in order, so this one holds up all others.
        self._waiting.extendleft([job] * verdict)

    def _retire(self, allocation_id: str) -> None:
        del self._active[allocation_id]
        self._callbacks.ended(allocation_id)

    def _cancel(self, job: Job, reason: str, outcome: str = "cancelled") -> None:
        for allocation_id, (owner, attempt) in list(self._active.items()):
            if owner is job and attempt.handle:
                self._provisioner.cancel(attempt.handle)
                attempt.failures.append(Failure(outcome, reason))
                self._retire(allocation_id)
        job.fail(outcome, reason)

    def _close(self) -> None:
        self._closing = True

    def _shut(self, outcome: str, reason: str) -> None:
        """Cancel and close, each step whatever became of the one before."""
        try:
            for job, _ in list(self._active.values()):
                self._cancel(job, reason, outcome)
        finally:
            with self._wake_lock:
                self._gone = True
            try:
                self._provisioner.close()
            finally:
                for job in self._jobs:
                    job.fail(outcome, reason)  # an outcome that is there stays
