"""Polling: one query of the scheduler about all jobs of a partition, the events that follow, the queries that explain one job, and when the next poll is due.

Read here when an allocation counts as pending, running, given up or ended.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pytest_mlhpc.errors import MlhpcError
from pytest_mlhpc.jobs.provisioner import AllocationEnded, Event, LineArrived
from pytest_mlhpc.jobs.spec import JobState
from pytest_mlhpc.provision.scheduler.allocation import JobAllocation
from pytest_mlhpc.provision.scheduler.causes import (
    JobEvidence,
    left_queue_error,
    never_scheduled_error,
    never_starts,
    requeued_error,
    silent_batch_error,
    unavailable_hosts,
    waiting_text,
)
from pytest_mlhpc.provision.scheduler.client import (
    UNDER_WAY_S,
    SchedulerClient,
    SchedulerError,
    SchedulerJob,
    SchedulerNode,
    SchedulerUnavailable,
)

#: Seconds from a submission to the first query: what a job waits for is known by then.
FIRST_POLL_S = 3.0
#: Bounds of the time between queries while jobs wait; in between a tenth of the longest wait.
MIN_POLL_S, MAX_POLL_S = 10.0, 120.0
#: A batch whose heartbeat (every 5 s) is older than this is queried, in seconds: two missed beats and a slow file system.
#: A batch that was killed silently is reported within 15 s that way; a false alarm costs one query.
SILENT_BATCH_S = 12.0
#: A query that precedes the end of this tolerance by less counts as made for the silence, in seconds.
RECENT_POLL_S = 0.5
#: A batch without heartbeat for so long is lost, in seconds, where its scheduler tells nothing of nodes: Grid Engine 8.1.9 calls a
#: job running for ever whose host has died. Sixty missed beats; file systems answer again within minutes.
LOST_BATCH_S = 300.0
#: Least time between queries for a reason that a file gave.
URGENT_POLL_S = 2.0
#: Time between queries while the scheduler does not answer, first and last.
MIN_RETRY_S, MAX_RETRY_S = 5.0, 60.0
#: Cancelled jobs may take so long to go, in seconds: KillWait is 30 s by default, and epilogs follow.
GONE_S = 90.0
#: Failures beyond which the pause grows no more: 2.0 to the power of 1024 is too much for a float.
MAX_DOUBLINGS = 10


@dataclass(frozen=True)
class PollState:
    """What the time of the next query depends on. Ages are in seconds; None: there is none."""

    youngest_wait: float | None  #: age of the youngest pending job that no query has returned yet
    longest_wait: float | None  #: age of the oldest pending job
    silence: float | None  #: longest time without heartbeat of a running batch
    urgent: bool  #: a file shows a fault
    failures: int  #: queries in a row that got no answer
    limit_in: float | None = None  #: time until a pending job has waited for its limit; negative: it has


def next_poll_in(now: PollState, since_last: float) -> float | None:
    """Return the seconds until the next query (0: now), *since_last* seconds after the last one; None: no query is needed."""
    if now.failures:
        return max(0.0, retry_pause_s(now.failures) - since_last)
    waits: list[float] = []
    if now.urgent:
        waits.append(URGENT_POLL_S - since_last)
    if now.silence is not None:
        waits.append(_silence_poll_in(now.silence, since_last))
    if now.youngest_wait is not None:
        waits.append(max(FIRST_POLL_S - now.youngest_wait, MIN_POLL_S - since_last))
    if now.longest_wait is not None:
        waits.append(min(max(now.longest_wait / 10, MIN_POLL_S), MAX_POLL_S) - since_last)
    if now.limit_in is not None:
        waits.append(max(now.limit_in, URGENT_POLL_S - since_last))
    return max(0.0, min(waits)) if waits else None


def retry_pause_s(failures: int) -> float:
    """Return the pause after *failures* (at least one) calls in a row without an answer, in seconds."""
    return float(min(MIN_RETRY_S * 2.0 ** min(failures - 1, MAX_DOUBLINGS), MAX_RETRY_S))


def _silence_poll_in(silence: float, since_last: float) -> float:
    """Return the seconds until a silent batch is queried: when the silence gets too long, then at the usual interval."""
    overdue = silence - SILENT_BATCH_S
    if since_last > overdue + RECENT_POLL_S:
        return -overdue
    return MIN_POLL_S - since_last


class Backoff:
    """The pause after calls without an answer. All kinds of calls of a client share it: each may take its whole time limit.

    Args:
        monotonic: the clock, in seconds.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self.trouble = ""  #: the error of the last call without an answer
        self._monotonic = monotonic
        self._failures: Counter[str] = Counter()  #: kind of call -> its calls in a row without an answer
        self._until = float("-inf")

    def waits(self) -> bool:
        """Return whether the scheduler must not be called now."""
        return self._monotonic() < self._until

    def failed(self, kind: str, error: Exception) -> None:
        """Note that a call got no answer."""
        self._failures[kind] += 1
        self._until = self._monotonic() + retry_pause_s(self._failures[kind])
        self.trouble = str(error)

    def answered(self, kind: str) -> None:
        """Note that a call was answered. Other kinds stay paused: a scheduler may serve queries and refuse submissions."""
        del self._failures[kind]


T = TypeVar("T")

#: Interval between reads of a partition's whole queue, for the position of waiting jobs, in seconds.
QUEUE_INTERVAL_S = 300.0
#: A job waits this long before its position is reported, in seconds.
QUEUE_AFTER_S = 30.0
#: Pause after an accounting that did not answer, in seconds: each try may take 10 s and more.
ACCOUNTING_RETRY_S = 60.0


class Diagnosis:
    """Queries about single jobs, nodes and limits. An unanswered one yields less evidence, never an error."""

    def __init__(self, client: SchedulerClient, backoff: Backoff) -> None:
        self.title, self.key = client.title, client.key
        self._client = client
        self._backoff = backoff
        self._positions: tuple[float, dict[str, int]] = (-1e9, {})
        self._accounting_again = 0.0  #: when an accounting that did not answer is queried again

    def from_accounting(self, ids: Sequence[str]) -> dict[str, SchedulerJob]:
        """Return jobs that left the queue, from the accounting; none while it does not answer."""
        now = time.monotonic()
        if now < self._accounting_again:
            return {}
        try:
            return {job.id: job for job in self._client.accounting(ids)}
        except SchedulerError:
            self._accounting_again = time.monotonic() + ACCOUNTING_RETRY_S
            return {}

    def evidence(self, job: SchedulerJob | None) -> JobEvidence:
        """Return what the scheduler knows of *job*, its steps and nodes."""
        if job is None:
            return JobEvidence(None, title=self.title)
        steps = job.steps
        accounted = self.from_accounting([job.id]).get(job.id)
        if accounted is not None:
            steps = accounted.steps
        else:
            steps = self._query(lambda: self._client.steps([job.id]).get(job.id, ()), ())
        return JobEvidence(job, steps, self._nodes(job.nodes), self.title)

    def unavailable_nodes(self, job: SchedulerJob) -> tuple[SchedulerNode, ...]:
        """Return the nodes that the reason of a pending job names."""
        hosts = unavailable_hosts(job.reason)
        try:
            return self._nodes(self._client.expand(hosts)) if hosts else ()
        except SchedulerError:
            return ()

    def _nodes(self, names: Sequence[str]) -> tuple[SchedulerNode, ...]:
        return self._query(lambda: tuple(self._client.nodes(names)), ()) if names else ()

    def _query(self, call: Callable[[], T], unknown: T) -> T:
        """Return the answer of a call, *unknown* without one: no answer here is indispensable."""
        if self._backoff.waits():
            return unknown
        try:
            answer = call()
        except SchedulerUnavailable as error:
            self._backoff.failed("investigate", error)
            return unknown
        except SchedulerError:
            return unknown
        self._backoff.answered("investigate")
        return answer

    def jobs_ahead(self, job: SchedulerJob, now: float) -> int | None:
        """Return how many pending jobs of the partition go first, some minutes old at most; None if unknown."""
        queried, positions = self._positions
        if now - queried > QUEUE_INTERVAL_S:
            unknown: list[SchedulerJob] = []
            queue = self._query(lambda: self._client.queue(job.partition), unknown)
            positions = {one.id: position for position, one in enumerate(queue)}
            self._positions = (now, positions)
        return positions.get(job.id)


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
        self.allocations: dict[str, JobAllocation] = {}
        self.events: list[Event] = []
        #: Unique names of jobs whose end was read from files, and not yet confirmed by the scheduler.
        self.ended_jobs: list[str] = []

    def take_events(self) -> list[Event]:
        """Return the events, and clear them."""
        events, self.events = self.events, []
        return events

    def give_up(self, allocation: JobAllocation, error: MlhpcError) -> None:
        """Let an allocation end with *error* once its job is surely gone; the ledger needs it until then."""
        allocation.cancelling = True
        allocation.given_up = allocation.given_up or error

    def under_way(self, allocation: JobAllocation) -> bool:
        """Return whether the scheduler may still accept a submission that got no answer."""
        return allocation.unanswered_at is not None and self.now() - allocation.unanswered_at < UNDER_WAY_S

    def end(self, allocation: JobAllocation, error: MlhpcError | None, *, unsure: bool = False) -> None:
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
        self, client: SchedulerClient, backoff: Backoff, diagnosis: Diagnosis, pending_limit_s: float
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

    def due(self, allocations: Collection[JobAllocation], now: float) -> bool:
        """Return whether a query is due."""
        if self._backoff.waits():
            return False
        due = next_poll_in(self._poll_state(allocations, now), now - self._last)
        return due is not None and due <= 0

    def jobs(self, allocations: Collection[JobAllocation], now: float) -> dict[str, SchedulerJob]:
        """Return id -> job of *allocations* that the queue or the accounting knows.

        Raises:
            SchedulerError: no answer; the next query is due after a pause.
        """
        self._last = now
        if not allocations:
            return {}
        names = {one.name for one in allocations}  # schedulers reuse ids, not names
        try:
            found = self._client.jobs(
                ids=[one.handle.native_id for one in allocations], user=str(os.getuid())
            )
        except SchedulerError as error:
            self._failures += 1
            if isinstance(error, SchedulerUnavailable):
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

    def limit_of(self, allocation: JobAllocation) -> float:
        """Return how long a pending job may wait by its reason, in seconds."""
        job = allocation.job
        if job and (job.stuck or never_starts(job.state, job.reason)):
            return min(self.pending_limit_s, NEVER_STARTING_LIMIT_S)
        return self.pending_limit_s

    def _poll_state(self, allocations: Collection[JobAllocation], now: float) -> PollState:
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
    """Polls the scheduler about the active allocations of one partition.

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
        except SchedulerError as error:
            self._report_trouble(str(error))
            return
        self._trouble = ""
        for allocation in submitted:
            self._update(allocation, jobs.get(allocation.handle.native_id))
        for allocation in submitted:
            if self._awake.is_set() or self._backoff.waits():
                self._query.soon()  # another thread needs the provisioner, or the scheduler does not answer any more
                return
            self._conclude(allocation, jobs.get(allocation.handle.native_id))

    def _update(self, allocation: JobAllocation, job: SchedulerJob | None) -> None:
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
                self._active.give_up(allocation, requeued_error(job, self._diagnosis.title))
        elif job.state.running:
            allocation.strange_answers = 0
            if not job.nodes and self._is_lost(allocation):
                silence = now - allocation.beat_at
                self._active.give_up(allocation, silent_batch_error(job, silence, self._diagnosis.title))
                return
            self._active.events += allocation.state_events(JobState.RUNNING, "", job.nodes)
        elif not job.state.ended and not allocation.started:
            self._update_pending(allocation, job, now)  # an unknown state is not running either

    def _is_lost(self, allocation: JobAllocation) -> bool:
        """Return whether the batch has begun, and has had no heartbeat for LOST_BATCH_S, by its files as they are now."""
        now = self._active.now()
        if not allocation.started or now - allocation.beat_at <= LOST_BATCH_S:
            return False
        self._active.events += allocation.read(now)
        return now - allocation.beat_at > LOST_BATCH_S and not allocation.conversation.complete

    def _update_pending(self, allocation: JobAllocation, job: SchedulerJob, now: float) -> None:
        waited = now - allocation.since
        if waited >= self._query.limit_of(allocation):
            error = never_scheduled_error(
                job,
                waited,
                self._query.pending_limit_s,
                self._diagnosis.unavailable_nodes(job),
                key=self._diagnosis.key,
            )
            self._active.give_up(allocation, error)
            return
        ahead = self._diagnosis.jobs_ahead(job, now) if waited > QUEUE_AFTER_S else None
        self._active.events += allocation.state_events(JobState.QUEUED, waiting_text(job, ahead))

    def _conclude(self, allocation: JobAllocation, job: SchedulerJob | None) -> None:
        """Report the doubtful messages after a diagnosis, and end the allocation if it has ended."""
        if allocation.handle.id not in self._active.allocations or allocation.given_up is not None:
            return
        ended = self._has_ended(allocation, job)
        if ended is None or not (ended or (job is not None and allocation.doubtful)):
            return
        evidence = self._diagnosis.evidence(job)
        if self._backoff.waits():
            return  # it stopped answering midway: half of the evidence may lead to a wrong cause
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
        elif job is None and allocation.pending and allocation.job and allocation.job.state.pending:
            self._active.end(allocation, left_queue_error(allocation.job, self._diagnosis.title))
        else:
            self._active.end(allocation, evidence.cause(allocation.exit, allocation.log_tail()))

    def _has_ended(self, allocation: JobAllocation, job: SchedulerJob | None) -> bool | None:
        """Return whether an allocation has ended; None: its last lines or its state follow in a moment."""
        now = self._active.now()
        gone = allocation.presumed_ended(now) if job is None else job.state.ended
        if not gone and allocation.exit is None:
            return False
        self._active.events += allocation.read(now)  # the last lines may have come during the query
        if allocation.conversation.complete:
            return True
        if job is not None and not job.state.ended:
            return None  # the batch has ended, the job ends in a moment: its state shows why
        return None if allocation.lags(job, now) else True

    def _confirm(self, allocation: JobAllocation, job: SchedulerJob | None) -> None:
        """End an allocation that was given up, if its job is gone or outlives its cancellation by GONE_S."""
        assert allocation.given_up is not None  # noqa: S101 - for the type checker
        now = self._active.now()
        if allocation.presumed_ended(now) if job is None else job.state.ended:
            self._active.end(allocation, allocation.given_up, unsure=self._active.under_way(allocation))
        elif allocation.cancelled_at is not None and now - allocation.cancelled_at > GONE_S:
            self._active.end(allocation, allocation.given_up, unsure=True)

    def _report_trouble(self, text: str) -> None:
        if text != self._trouble:
            self._trouble = text
            for allocation in self._active.allocations.values():
                if allocation.pending:
                    self._active.events += allocation.state_events(
                        JobState.QUEUED, f"{self._diagnosis.title} does not answer: {text}"
                    )
