"""Polling: one query of Slurm about all jobs of a partition, and the events that follow from its answers.

Read here when an allocation counts as pending, running, given up or ended.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection

from pytest_mlhpc.errors import MlhpcError
from pytest_mlhpc.jobs.provisioner import AllocationEnded, Event, LineArrived
from pytest_mlhpc.jobs.spec import JobState
from pytest_mlhpc.provision.reapers import UNDER_WAY_S
from pytest_mlhpc.provision.slurm.allocation import SlurmAllocation
from pytest_mlhpc.provision.slurm.causes import (
    never_scheduled_error,
    never_starts,
    requeued_error,
    waiting_text,
)
from pytest_mlhpc.provision.slurm.client import SlurmClient, SlurmError, SlurmJob, SlurmUnavailable
from pytest_mlhpc.provision.slurm.diagnosis import QUEUE_AFTER_S, Diagnosis
from pytest_mlhpc.provision.slurm.pacing import GONE_S, Backoff, PollState, next_poll_in

#: Most queries of the accounting for the energy of a run; then its record is made without.
MAX_ENERGY_QUERIES = 6
#: Pending limit of a job whose reason waiting does not end, in seconds: an administrator may be raising a limit.
NEVER_STARTING_LIMIT_S = 30.0

#: A heartbeat, which comes every 5 s, counts as silent after this age, in seconds.
BEAT_TOLERANCE_S = 2.0


class ActiveAllocations:
    """The active allocations of one partition by id, and the events that were not yet returned.

    Args:
        now: the provisioner's clock, in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.allocations: dict[str, SlurmAllocation] = {}
        self.events: list[Event] = []
        #: Unique names of jobs whose end was read from files, and not yet confirmed by Slurm.
        self.ended_jobs: list[str] = []

    def take_events(self) -> list[Event]:
        """Return the events, and clear them."""
        events, self.events = self.events, []
        return events

    def give_up(self, allocation: SlurmAllocation, error: MlhpcError) -> None:
        """Let an allocation end with *error* once its job is surely gone; the ledger needs it until then."""
        allocation.cancelling = True
        allocation.given_up = allocation.given_up or error

    def under_way(self, allocation: SlurmAllocation) -> bool:
        """Return whether Slurm may still accept a submission that got no answer."""
        return allocation.unanswered_at is not None and self.now() - allocation.unanswered_at < UNDER_WAY_S

    def end(self, allocation: SlurmAllocation, error: MlhpcError | None, *, unsure: bool = False) -> None:
        """End an allocation; *unsure*: its job may still exist or appear."""
        for message in allocation.conversation.finish() if error is None else []:
            self.events.append(LineArrived(allocation.handle, message))
        del self.allocations[allocation.handle.id]
        if allocation.submit_tries or allocation.submitted:
            self.ended_jobs.append(allocation.name)
        self.events.append(AllocationEnded(allocation.handle, error, unsure))


class JobQuery:
    """The query about all jobs of a partition. Times are of the provisioner's monotonic clock, in seconds."""

    def __init__(
        self, client: SlurmClient, backoff: Backoff, diagnosis: Diagnosis, pending_limit_s: float
    ) -> None:
        self._client = client
        self._backoff = backoff
        self._diagnosis = diagnosis
        self.pending_limit_s = pending_limit_s
        self._last = -1e9
        self._failures = 0

    def soon(self) -> None:
        """Query at the next reason: earlier answers are outdated."""
        self._last = -1e9

    def due(self, allocations: Collection[SlurmAllocation], now: float) -> bool:
        """Return whether a query is due."""
        if self._backoff.waits():
            return False
        due = next_poll_in(self._poll_state(allocations, now), now - self._last)
        return due is not None and due <= 0

    def jobs(self, allocations: Collection[SlurmAllocation], now: float) -> dict[str, SlurmJob]:
        """Return id -> job of *allocations* that the queue or the accounting knows.

        Raises:
            SlurmError: no answer; the next query is due after a pause.
        """
        self._last = now
        if not allocations:
            return {}
        names = {one.name for one in allocations}  # Slurm reuses ids, not names
        try:
            found = self._client.jobs(
                ids=[one.handle.native_id for one in allocations], user=str(os.getuid())
            )
        except SlurmError as error:
            self._failures += 1
            if isinstance(error, SlurmUnavailable):
                self._backoff.failed("ask", error)
            raise
        self._failures = 0
        self._backoff.answered("ask")
        jobs = {job.id: job for job in found if job.name in names}
        unknown = [one.handle.native_id for one in allocations if one.handle.native_id not in jobs]
        if unknown:
            accounted = self._diagnosis.from_accounting(unknown)
            jobs |= {job.id: job for job in accounted.values() if job.name in names}
        return jobs

    def limit_of(self, allocation: SlurmAllocation) -> float:
        """Return how long a pending job may wait by its reason, in seconds."""
        job = allocation.job
        if job and never_starts(job.state, job.reason):
            return min(self.pending_limit_s, NEVER_STARTING_LIMIT_S)
        return self.pending_limit_s

    def _poll_state(self, allocations: Collection[SlurmAllocation], now: float) -> PollState:
        waiting = [one for one in allocations if one.pending]
        silences = [now - one.beat_at for one in allocations if one.started and one.beat_at]
        silence = max(silences, default=0.0)
        return PollState(
            youngest_wait=min((now - one.since for one in waiting if one.job is None), default=None),
            longest_wait=max((now - one.since for one in waiting), default=None),
            silence=silence if silence > BEAT_TOLERANCE_S else None,
            urgent=any(one.urgent for one in allocations),
            failures=self._failures,
            limit_in=min((self.limit_of(one) - (now - one.since) for one in waiting), default=None),
        )


class Poller:
    """Polls Slurm about the active allocations of one partition.

    Args:
        active: the active allocations; events are added there.
        query: the query about all their jobs.
        diagnosis: further queries about single jobs.
        backoff: no call is made while it waits.
        awake: set by another thread that needs the provisioner: the rest waits for the next poll.
    """

    def __init__(
        self,
        active: ActiveAllocations,
        query: JobQuery,
        diagnosis: Diagnosis,
        backoff: Backoff,
        awake: threading.Event,
    ) -> None:
        self._active = active
        self._query = query
        self._diagnosis = diagnosis
        self._backoff = backoff
        self._awake = awake
        self._trouble = ""  #: the error of the last query, empty after an answer

    def soon(self) -> None:
        """Query at the next reason: earlier answers are outdated."""
        self._query.soon()

    def poll_if_due(self) -> None:
        """Query about all jobs if that is due, and process the answers."""
        now = self._active.now()
        if not self._query.due(self._active.allocations.values(), now):
            return
        submitted = [one for one in self._active.allocations.values() if one.submitted]
        try:
            jobs = self._query.jobs(submitted, now)
        except SlurmError as error:
            self._report_trouble(str(error))
            return
        self._trouble = ""
        for allocation in submitted:
            self._update(allocation, jobs.get(allocation.handle.native_id))
        for allocation in submitted:
            if self._awake.is_set() or self._backoff.waits():
                self._query.soon()  # another thread needs the provisioner, or Slurm does not answer any more
                return
            self._conclude(allocation, jobs.get(allocation.handle.native_id))

    def _update(self, allocation: SlurmAllocation, job: SlurmJob | None) -> None:
        now = self._active.now()
        if job is None:
            allocation.unknown_since = now if allocation.unknown_since is None else allocation.unknown_since
        else:
            allocation.job, allocation.unknown_since = job, None
        if allocation.given_up is not None:
            self._confirm(allocation, job)
        elif job is None:
            return
        elif job.state.pending and allocation.started:
            # One answer may be older than the batch's report.
            allocation.strange_answers += 1
            if job.restarts or allocation.strange_answers > 1:
                self._active.give_up(allocation, requeued_error(job))
        elif job.state.running:
            allocation.strange_answers = 0
            self._active.events += allocation.state_events(JobState.RUNNING, "", job.nodes)
        elif not job.state.ended and not allocation.started:
            self._update_pending(allocation, job, now)  # an unknown state is not running either

    def _update_pending(self, allocation: SlurmAllocation, job: SlurmJob, now: float) -> None:
        waited = now - allocation.since
        if waited >= self._query.limit_of(allocation):
            error = never_scheduled_error(
                job, waited, self._query.pending_limit_s, self._diagnosis.unavailable_nodes(job)
            )
            self._active.give_up(allocation, error)
            return
        ahead = self._diagnosis.jobs_ahead(job, now) if waited > QUEUE_AFTER_S else None
        self._active.events += allocation.state_events(JobState.QUEUED, waiting_text(job, ahead))

    def _conclude(self, allocation: SlurmAllocation, job: SlurmJob | None) -> None:
        """Report the doubtful messages after a diagnosis, and end the allocation if it has ended."""
        if allocation.handle.id not in self._active.allocations or allocation.given_up is not None:
            return
        ended = self._has_ended(allocation, job)
        if ended is None or not (ended or (job is not None and allocation.doubtful)):
            return
        evidence = self._diagnosis.evidence(job)
        if self._backoff.waits():
            return  # Slurm stopped answering midway: half of the evidence may lead to a wrong cause
        if allocation.awaits_energy and not evidence.has_energy(allocation.doubtful):
            allocation.energy_queries += 1
            if allocation.energy_queries < MAX_ENERGY_QUERIES:
                return
        allocation.energy_queries = 0
        for message in evidence.amend(allocation.release_doubtful()):
            self._active.events.append(LineArrived(allocation.handle, message))
        if not ended:
            return
        if allocation.conversation.complete:
            self._active.end(allocation, None)
        else:
            self._active.end(allocation, evidence.cause(allocation.exit, allocation.log_tail()))

    def _has_ended(self, allocation: SlurmAllocation, job: SlurmJob | None) -> bool | None:
        """Return whether an allocation has ended; None: its last lines or its state follow in a moment."""
        now = self._active.now()
        gone = allocation.presumed_gone(now) if job is None else job.state.ended
        if not gone and allocation.exit is None:
            return False
        self._active.events += allocation.read(now)  # the last lines may have come during the query
        if allocation.conversation.complete:
            return True
        if job is not None and not job.state.ended:
            return None  # the batch has ended, the job ends in a moment: its state shows why
        return None if allocation.lags(job, now) else True

    def _confirm(self, allocation: SlurmAllocation, job: SlurmJob | None) -> None:
        """End an allocation that was given up, if its job is gone or outlives its cancellation by GONE_S."""
        assert allocation.given_up is not None  # noqa: S101 - for the type checker
        now = self._active.now()
        if allocation.presumed_gone(now) if job is None else job.state.ended:
            self._active.end(allocation, allocation.given_up, unsure=self._active.under_way(allocation))
        elif allocation.cancelled_at is not None and now - allocation.cancelled_at > GONE_S:
            self._active.end(allocation, allocation.given_up, unsure=True)

    def _report_trouble(self, text: str) -> None:
        if text != self._trouble:
            self._trouble = text
            for allocation in self._active.allocations.values():
                if allocation.pending:
                    self._active.events += allocation.state_events(
                        JobState.QUEUED, f"Slurm does not answer: {text}"
                    )
