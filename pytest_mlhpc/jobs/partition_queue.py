"""The queue of one partition: which jobs wait, which allocations are active, and when a job is concluded. It has no thread."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pytest_mlhpc.errors import InfrastructureError, MlhpcError, RunFailure, StoreError
from pytest_mlhpc.jobs.job import (
    ActiveAllocation,
    AdoptedAllocation,
    Attempt,
    Job,
    Outcome,
    attempt_error,
    failed_nodes,
    grant_nodes,
    may_retry,
    release_nodes,
    runs_that_fit,
    used_nodes,
)
from pytest_mlhpc.jobs.programs import with_needed
from pytest_mlhpc.jobs.provisioner import (
    AllocationEnded,
    Event,
    Handle,
    LineArrived,
    Provisioner,
    StateChanged,
)
from pytest_mlhpc.jobs.spec import JobSpec, JobState, fits_into, may_share
from pytest_mlhpc.node.files import unwritten
from pytest_mlhpc.node.protocol.plan import Plan
from pytest_mlhpc.store.record import Failure

#: Time limit for the batch of released nodes to end by itself, in seconds: it checks five times a second, and a network file
#: system may show the request late.
RELEASE_S = 15.0


@dataclass(frozen=True)
class Callbacks:
    """What the queue needs of the session. All are called from the driver's thread.

    ``plan`` returns the plan of attempts (spec, number) that avoids the named nodes. ``submitted``, ``accepted`` (with the
    scheduler's own id) and ``ended`` (after all jobs with a run in it are concluded) write the ledger; ``concluded`` writes
    that runs are recorded. ``judge`` gets a job whose attempts have all ended, and returns its outcome or the number of
    further attempts. ``unjudged`` gets a job that has an outcome without ``judge``. ``beat`` is called every few seconds
    while there is work, and returns whether this session still owns its ledger.
    """

    plan: Callable[[Sequence[tuple[JobSpec, int]], Sequence[str]], Plan]
    submitted: Callable[[Sequence[JobSpec], Plan], None]
    accepted: Callable[[str, str], None]
    ended: Callable[[str], None]
    concluded: Callable[[Sequence[str]], None]
    judge: Callable[[Job], Outcome | int]
    beat: Callable[[], bool] = lambda: True
    unjudged: Callable[[Job], None] = lambda _: None


class PartitionQueue:
    """At most *max_jobs* allocations are active, in the order of jobs. With *pack*, jobs of the same needs share them; vettings always do."""

    def __init__(self, provisioner: Provisioner, max_jobs: int, callbacks: Callbacks, pack: bool) -> None:
        self._provisioner = provisioner
        self._max_jobs = max_jobs
        self._callbacks = callbacks
        self._pack = pack
        self._waiting: collections.deque[Job] = collections.deque()
        self._active: dict[str, ActiveAllocation] = {}
        #: open in the ledger, as one of their jobs is not concluded
        self._ended: dict[str, ActiveAllocation] = {}
        #: Ended, and perhaps not gone: they stay in the ledger.
        self._unsure: dict[str, ActiveAllocation] = {}
        self._jobs: list[Job] = []
        self._released: dict[str, float] = {}  #: allocation id -> end of its test (monotonic, s)

    @property
    def idle(self) -> bool:
        """Whether no job waits and no allocation is active."""
        return not self._active and not self._waiting

    @property
    def handles(self) -> list[Handle]:
        """The active allocations."""
        return [allocation.handle for allocation in self._active.values()]

    @property
    def remaining(self) -> list[Handle]:
        """Allocations that are open in the ledger."""
        owned = (*self._active.values(), *self._ended.values(), *self._unsure.values())
        return [allocation.handle for allocation in owned]

    @property
    def resumable(self) -> list[Handle]:
        """Allocations with runs that a later session may resume."""
        owned = (*self._active.values(), *self._ended.values())
        return [allocation.handle for allocation in owned if allocation.others]

    def add(self, jobs: Iterable[Job]) -> None:
        """Queue *jobs* in their order."""
        jobs = list(jobs)
        self._jobs += jobs
        for job in jobs:
            job.pending += 1
            self._waiting.append(job)

    def adopt(self, allocations: Iterable[AdoptedAllocation]) -> None:
        """Adopt allocations that an earlier session submitted, in their order."""
        known = {id(job) for job in self._jobs}
        for adopted in allocations:
            handle = self._provisioner.adopt(adopted.plan, adopted.native_id)
            for job, attempt in adopted.runs.values():
                if id(job) not in known:
                    known.add(id(job))
                    self._jobs.append(job)
                job.pending += 1
                job.become(JobState.QUEUED)
                job.attempts.append(attempt)
                attempt.handle = handle
            shared = len(adopted.plan.runs) > 1
            active = ActiveAllocation(handle, adopted.runs, shared, adopted.others)
            self._active[adopted.plan.allocation_id] = active

    def fill(self) -> None:
        """Submit jobs until *max_jobs* allocations are active."""
        while len(self._active) < self._max_jobs:
            first = next((job for job in self._waiting if job.ready or job.done.is_set()), None)
            if first is None:
                break
            if jobs := self._take_next(first):
                self._submit(jobs)
        self._cancel_overdue()
        self._close_ended()

    def _take_next(self, first: Job) -> list[Job]:
        """Remove and return *first*, if it still has to run, with the jobs that share its allocation."""
        self._waiting.remove(first)
        if first.done.is_set() or self._left_out(first) or not self._possible(first):
            return []
        if first.opponent is not None:
            return self._runs_of_both(first)
        packed = [first]
        if may_share(first.spec, pack=self._pack) and not first.blocked:
            longest_s = self._provisioner.longest()
            for job in list(self._waiting):
                if job.done.is_set() or not job.ready or job.blocked:
                    continue
                if not fits_into([one.spec for one in packed], job.spec, longest_s):
                    continue
                self._waiting.remove(job)
                if self._possible(job):
                    packed.append(job)
        return packed

    def _left_out(self, job: Job) -> bool:
        """End a job without a record whose need was given up: nobody waits for it, or a later session runs both."""
        blocked = job.blocked
        if blocked is None or not blocked.given_up:
            return False
        self._fail(job, blocked.outcome, blocked.text)
        return True

    def _runs_of_both(self, job: Job) -> list[Job]:
        """Return *job* as often as runs of its comparison fit into one allocation; none, if these are too few."""
        runs, refusal = runs_that_fit(job, self._provisioner.longest())
        if refusal:
            self._refused([job], Failure("rejected", refusal))
            return []
        job.pending = job.planned = runs
        return [job] * runs

    def _possible(self, job: Job) -> bool:
        sides = [job.spec] if job.opponent is None else [job.spec, job.opponent.spec]
        reason = next(filter(None, map(self._provisioner.validate, sides)), "")
        if reason:
            self._refused([job], Failure("rejected", reason))
        return not reason

    def _submit(self, jobs: list[Job]) -> None:
        blocked = jobs[0].blocked
        try:
            self._submit_plan(jobs, blocked)
        except InfrastructureError as error:
            self._refused(jobs, Failure(error.outcome, str(error).removeprefix(f"{error.outcome}: ")))
        except (OSError, StoreError) as error:
            self._refused(jobs, Failure(unwritten(error), str(error)))
        except RunFailure as error:
            text = str(error).removeprefix(f"{error.outcome}: ")
            self._refused(jobs, Failure(error.outcome, text, blocked.log if blocked else ""))
        except MlhpcError as error:
            self._refused(jobs, Failure("launch_failed", str(error)))

    def _refused(self, jobs: list[Job], failure: Failure) -> None:
        """End attempts that were refused. Their job is judged by its other attempts, if any."""
        for job in jobs:
            new = [attempt for attempt in job.attempts if attempt.handle is None and not attempt.over]
            if not job.attempts:  # without a plan there is no record
                self._fail(job, failure.outcome, failure.text)
                continue
            for attempt in new[:1]:
                attempt.failures.append(replace(failure, log=failure.log or attempt.directory))
                attempt.finish(None)
            job.refused = failure
            job.pending -= 1
            if job.pending == 0 and not job.done.is_set():
                self._conclude(job)

    def _submit_plan(self, jobs: list[Job], blocked: Failure | None) -> None:
        numbered: list[tuple[JobSpec, int]] = []
        for index, job in enumerate(jobs):  # several runs of one job may be packed together
            number = job.next_number + sum(one is job for one in jobs[:index])
            spec = job.spec_of(number)
            numbered.append((spec if blocked else with_needed(spec, job.needed), number))
        excluded = sorted({node for job in jobs for node in job.excluded})
        plan = self._callbacks.plan(numbered, excluded)
        runs = {}
        for job, run, (_, number) in zip(jobs, plan.runs, numbered, strict=True):
            folder = plan.directory if len(plan.runs) == 1 else f"{plan.directory}/{run.run_id}"
            shared = len(plan.runs) > 1
            attempt = Attempt(run, number, directory=folder, submitted_ns=time.time_ns(), shared=shared)
            job.attempts.append(attempt)
            runs[run.run_id] = (job, attempt)
        if blocked:
            raise RunFailure(blocked.outcome, blocked.text)
        self._callbacks.submitted([job.spec for job in jobs], plan)
        try:
            handle = self._provisioner.submit(plan)
        except MlhpcError:
            self._callbacks.ended(plan.allocation_id)  # refused: no job exists
            raise
        self._active[plan.allocation_id] = ActiveAllocation(handle, runs, shared=len(plan.runs) > 1)
        for job, attempt in runs.values():
            attempt.handle = handle
            if attempt.number == 0 or job.opponent is not None:
                job.become(JobState.QUEUED)
        if handle.native_id:
            self._accepted(plan.allocation_id, handle.native_id)

    def _accepted(self, allocation_id: str, native_id: str) -> None:
        for _, attempt in self._active[allocation_id].runs.values():
            attempt.job_id = native_id
        self._callbacks.accepted(allocation_id, native_id)

    def process(self, event: Event) -> None:
        """Process an event of an allocation."""
        allocation = self._active.get(event.handle.id)
        if allocation is None:
            return  # cancelled meanwhile
        if isinstance(event, StateChanged):
            self._change_state(allocation, event)
        elif isinstance(event, LineArrived):
            self._receive(allocation, event)
        elif isinstance(event, AllocationEnded):
            ended = self._active.pop(event.handle.id)
            if event.unsure:
                self._unsure[event.handle.id] = ended
            else:
                self._ended[event.handle.id] = ended
            for job, attempt in allocation.unfinished:
                attempt.finish(attempt_error(attempt, event.error))
                self._end_attempt(job, attempt)
            self._close_ended()

    def _change_state(self, allocation: ActiveAllocation, event: StateChanged) -> None:
        if event.native_id:
            self._accepted(event.handle.id, event.native_id)
        for job, attempt in allocation.unfinished:
            job.reason = event.reason
            attempt.nodes = event.nodes or attempt.nodes
            attempt.beside = event.beside or attempt.beside
            if event.state is JobState.RUNNING and not attempt.allocated_ns:
                attempt.allocated_ns = event.since_ns or time.time_ns()
            if not allocation.shared or event.state is not JobState.RUNNING:
                first = attempt.number == 0 or job.opponent is not None
                job.become(event.state if first else JobState.RERUNNING)

    def _receive(self, allocation: ActiveAllocation, event: LineArrived) -> None:
        job, attempt = allocation.runs.get(event.message.run_id, (None, None))
        if job is None or attempt is None or attempt.over:
            return
        if event.message.kind == "progress":
            job.progress = event.message.body
            return
        attempt.receive(event.message)
        if job.spec.holds_nodes and event.message.kind == "started":
            grant_nodes(job, attempt, event.message)
        if not allocation.shared:
            return  # its end is that of the allocation
        if event.message.kind == "started":
            first = attempt.number == 0 or job.opponent is not None
            job.become(JobState.RUNNING if first else JobState.RERUNNING)
        elif event.message.kind == "end":
            attempt.finish(None)
            self._end_attempt(job, attempt)
            self._close_ended()

    def _end_attempt(self, job: Job, attempt: Attempt) -> None:
        """Retry an ended attempt if its failure permits that; else conclude the job after its last attempt."""
        job.pending -= 1
        if job.opponent is not None:
            self._compare(job)
        elif not job.lost and not job.done.is_set() and may_retry(job, attempt):
            failure = attempt.failure
            job.excluded.update(failed_nodes(job, attempt))
            job.attempts.remove(attempt)
            job.lost.append(attempt)
            job.become(JobState.DECLARED)
            job.progress = {}
            job.reason = f"again, after {failure.text}" if failure else "again"
            job.pending += 1
            self._waiting.appendleft(job)
        elif job.pending == 0 and (not job.done.is_set() or job.granted):
            self._conclude(job)

    def _compare(self, job: Job) -> None:
        """Judge a comparison after each of its runs. Once it is decided, its allocation ends: no other job uses it."""
        if job.done.is_set() or not isinstance(verdict := self._callbacks.judge(job), Outcome):
            return
        runs = [attempt.run.run_id for attempt in job.attempts]
        rest = [one for one in self._active.values() if any(other is job for other, _ in one.unfinished)]
        for attempt in job.attempts:
            attempt.over = True
        job.pending = 0
        self._cancel_allocations(rest)
        job.conclude(verdict)
        self._callbacks.concluded(runs)

    def _conclude(self, job: Job) -> None:
        if job.opponent is not None:
            self._compare(job)
            return
        verdict = self._callbacks.judge(job)
        if isinstance(verdict, Outcome):
            job.conclude(verdict)
            self._callbacks.concluded([attempt.run.run_id for attempt in (*job.lost, *job.attempts)])
            if job.granted:
                job.become(JobState.ENDED)  # its outcome came before
            return
        job.become(JobState.RERUNNING)
        job.progress, job.pending = {}, verdict
        job.excluded.update(used_nodes(job))
        # To the front: tests are waited for in order, so this one holds up all others.
        self._waiting.extendleft([job] * verdict)

    def _close_ended(self) -> None:
        """Note in the ledger the end of allocations whose jobs are all concluded: re-runs may need their results until then."""
        for allocation_id, allocation in list(self._ended.items()):
            if not allocation.others and all(job.done.is_set() for job, _ in allocation.runs.values()):
                del self._ended[allocation_id]
                self._callbacks.ended(allocation_id)

    def cancel(self, unwanted: Mapping[Job, str]) -> None:
        """Cancel allocations that only these jobs use (job -> reason), by one call for all.

        A run that shares its allocation with others is skipped instead.
        """
        ending: list[ActiveAllocation] = []
        for allocation in self._active.values():
            mine = [(attempt, unwanted[job]) for job, attempt in allocation.unfinished if job in unwanted]
            for attempt, reason in mine:
                attempt.failures.append(Failure("cancelled", reason))
                attempt.ended_ns = attempt.ended_ns or time.time_ns()
                attempt.over = True
            if mine and not allocation.unfinished and not allocation.others:
                ending.append(allocation)
            elif mine:
                self._provisioner.skip(allocation.handle, [attempt.run.run_id for attempt, _ in mine])
        self._cancel_allocations(ending)
        for job, reason in unwanted.items():
            self._fail(job, "cancelled", reason)
        self._close_ended()

    def _cancel_allocations(self, allocations: Sequence[ActiveAllocation]) -> None:
        """Cancel *allocations* by one call; those that may not be gone stay active."""
        if not allocations:
            return
        unsure = {handle.id for handle in self._provisioner.cancel([one.handle for one in allocations])}
        for allocation_id in [one.handle.id for one in allocations if one.handle.id not in unsure]:
            self._ended[allocation_id] = self._active.pop(allocation_id)

    def release(self, job: Job) -> None:
        """Release the nodes that the test of *job* held: their batch ends by itself, or is cancelled after RELEASE_S."""
        for allocation in self._active.values():
            if any(owner is job for owner, _ in allocation.unfinished):
                requested = all(release_nodes(attempt) for _, attempt in allocation.unfinished)
                self._released.setdefault(
                    allocation.handle.id, time.monotonic() - (0 if requested else RELEASE_S)
                )

    @property
    def releasing(self) -> bool:
        """Whether released allocations are still active."""
        return any(allocation_id in self._active for allocation_id in self._released)

    def _cancel_overdue(self) -> None:
        limit = time.monotonic() - RELEASE_S
        due = [one for one, since in self._released.items() if since <= limit]
        for allocation_id in due:
            del self._released[allocation_id]
        overdue = [self._active[one] for one in due if one in self._active]
        self._cancel_allocations(overdue)
        for allocation in overdue:
            self._end_test_nodes(allocation)

    def _end_test_nodes(self, allocation: ActiveAllocation, failure: Failure | None = None) -> None:
        """End the attempts that tests held of a cancelled allocation; with *failure* if their tests had not ended."""
        for job, attempt in allocation.unfinished:
            if job.granted:
                attempt.failures += [failure] if failure else []
                attempt.finish(None)
                self._end_attempt(job, attempt)

    def cancel_all(self, outcome: str, reason: str) -> None:
        """Cancel all allocations that no later session may resume; those that may not be gone stay in the ledger.

        Ended runs are judged and recorded, even if their allocation goes on or re-runs are missing.
        """
        for allocation in list(self._active.values()):
            for job, attempt in allocation.unfinished:
                if attempt.measurement is not None and attempt.ended_ns:
                    attempt.finish(None)
                    self._end_attempt(job, attempt)
        out = list(self._active.values())
        self._cancel_allocations([one for one in out if not one.others])
        for allocation in out:
            released = allocation.handle.id in self._released
            self._end_test_nodes(allocation, None if released else Failure(outcome, reason))
            for _, attempt in allocation.unfinished:
                attempt.failures.append(Failure(outcome, reason))
                attempt.ended_ns = attempt.ended_ns or time.time_ns()
        for job in self._jobs:
            if not job.done.is_set() and job.attempts and job.attempts[0].over:
                job.refused = Failure(outcome, reason)
                self._conclude(job)
        self.fail_all(outcome, reason)
        self._close_ended()

    def abandon(self) -> None:
        """Drop all allocations without a call: another session has adopted them."""
        for owned in (self._active, self._ended, self._unsure):
            owned.clear()
        self._waiting.clear()
        reason = "another session took these jobs over, as this one seemed dead"
        self.fail_all("channel_broken", reason)

    def fail_all(self, outcome: str, reason: str) -> None:
        """Give every job without an outcome this one."""
        for job in self._jobs:
            self._fail(job, outcome, reason)

    def _fail(self, job: Job, outcome: str, reason: str) -> None:
        """End *job* without the judge, unless it has an outcome."""
        if not job.done.is_set():
            job.fail(outcome, reason)
            self._callbacks.unjudged(job)

    def leave(self) -> None:
        """Leave all allocations to a later session, but cancel those that only hold nodes for a test."""
        waiting = [
            one for one in self._active.values() if any(job.spec.holds_nodes for job, _ in one.runs.values())
        ]
        unsure = {handle.id for handle in self._provisioner.cancel([one.handle for one in waiting])}
        for allocation in waiting:
            self._end_test_nodes(allocation, Failure("cancelled", "the session left its jobs to a later one"))
            if allocation.handle.id not in unsure:
                self._ended[allocation.handle.id] = self._active.pop(allocation.handle.id)
        for job in self._jobs:
            if job.spec.holds_nodes:
                self._fail(
                    job, "cancelled", "no later session can go on with nodes that a test holds while it runs"
                )
        self._close_ended()
        for allocation in self._active.values():
            for job, attempt in allocation.unfinished:
                # Without an id nobody may have taken it yet; the reason says who does not answer.
                known = f"job {attempt.job_id} is {job.state.value}" if attempt.job_id else job.reason
                self._fail(job, "detached", f"{known or 'its job is queued'}; a later session takes it over")
        for job in self._jobs:
            submitted = "" if job.attempts else "not submitted yet; "
            self._fail(job, "detached", f"{submitted}a later session adopts it")
