"""The board of one partition: which jobs wait, which allocations are out, and what becomes of each. No thread of its own."""

from __future__ import annotations

import collections
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from pytest_mlhpc.errors import InfrastructureError, MlhpcError, StoreError
from pytest_mlhpc.jobs.again import error_of, failed_nodes, seen_nodes, was_taken
from pytest_mlhpc.jobs.allocation import Adopted, Allocation
from pytest_mlhpc.jobs.attempt import Attempt
from pytest_mlhpc.jobs.callbacks import Callbacks
from pytest_mlhpc.jobs.job import Job
from pytest_mlhpc.jobs.lending import ask_back, lend
from pytest_mlhpc.jobs.packing import fits, shares
from pytest_mlhpc.jobs.spec import JobSpec, JobState
from pytest_mlhpc.provision.base import (
    AllocationEnded,
    Event,
    Handle,
    LineArrived,
    Provisioner,
    StateChanged,
)
from pytest_mlhpc.results.failures import Failure
from pytest_mlhpc.results.outcome import Outcome

#: How long the batch of nodes that were given back may take to end by itself, in seconds: it looks five times a second, and
#: a network file system may be slow to tell.
RELEASE_S = 15.0


class Board:
    """Keeps up to *max_jobs* allocations out, jobs in their order; with *pack*, jobs of the same needs share them; vettings do anyway."""

    def __init__(self, provisioner: Provisioner, max_jobs: int, callbacks: Callbacks, pack: bool) -> None:
        self._provisioner = provisioner
        self._max_jobs = max_jobs
        self._callbacks = callbacks
        self._pack = pack
        self._waiting: collections.deque[Job] = collections.deque()
        self._active: dict[str, Allocation] = {}
        self._ended: dict[str, Allocation] = {}  #: not yet in the ledger, as a job of theirs is not concluded
        self._unsure: dict[
            str, Allocation
        ] = {}  #: nobody knows whether they are gone: they stay in the ledger
        self._jobs: list[Job] = []
        self._released: dict[str, float] = {}  #: allocation id -> when its test was over (monotonic)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._active and not self._waiting

    @property
    def handles(self) -> list[Handle]:
        """Allocations that are out."""
        return [allocation.handle for allocation in self._active.values()]

    @property
    def left(self) -> list[Handle]:
        """Allocations that the ledger still has."""
        owned = (*self._active.values(), *self._ended.values(), *self._unsure.values())
        return [allocation.handle for allocation in owned]

    @property
    def kept(self) -> list[Handle]:
        """Allocations that are left on purpose, as they hold runs for which a later session may ask."""
        owned = (*self._active.values(), *self._ended.values())
        return [allocation.handle for allocation in owned if allocation.others]

    def add(self, jobs: Iterable[Job]) -> None:
        """Queue *jobs* in their order."""
        jobs = list(jobs)
        self._jobs += jobs
        for job in jobs:
            job.pending += 1
            self._waiting.append(job)

    def adopt(self, taken: Iterable[Adopted]) -> None:
        """Take over allocations that an earlier session submitted, in their order."""
        known = {id(job) for job in self._jobs}
        for adopted in taken:
            handle = self._provisioner.adopt(adopted.plan, adopted.native_id)
            for job, attempt in adopted.runs.values():
                if id(job) not in known:
                    known.add(id(job))
                    self._jobs.append(job)
                job.pending += 1
                job.state = JobState.QUEUED
                job.attempts.append(attempt)
                attempt.handle = handle
            shared = len(adopted.plan.runs) > 1
            self._active[adopted.plan.allocation_id] = Allocation(
                handle, adopted.runs, shared, adopted.others
            )

    def fill(self) -> None:
        """Submit as much as fits."""
        while len(self._active) < self._max_jobs:
            first = next((job for job in self._waiting if job.ready or job.done.is_set()), None)
            if first is None:
                break
            if jobs := self._next(first):
                self._submit(jobs)
        self._end_overdue()
        self._write_off()

    def _next(self, first: Job) -> list[Job]:
        """Take *first* if it still has to run, and those that may share its allocation."""
        self._waiting.remove(first)
        if first.done.is_set() or not self._possible(first):
            return []
        packed = [first]
        if shares(first.spec, pack=self._pack):
            longest_s = self._provisioner.longest()
            for job in list(self._waiting):
                if job.done.is_set():
                    continue
                if not fits([one.spec for one in packed], job.spec, longest_s):
                    continue
                self._waiting.remove(job)
                if self._possible(job):
                    packed.append(job)
        return packed

    def _possible(self, job: Job) -> bool:
        reason = self._provisioner.validate(job.spec)
        if reason:
            self._refused([job], Failure("rejected", reason))
        return not reason

    def _submit(self, jobs: list[Job]) -> None:
        try:
            self._hand_over(jobs)
        except InfrastructureError as error:
            self._refused(jobs, Failure(error.outcome, str(error).removeprefix(f"{error.outcome}: ")))
        except (OSError, StoreError) as error:
            self._refused(jobs, Failure("disk_full", str(error)))
        except MlhpcError as error:
            self._refused(jobs, Failure("launch_failed", str(error)))

    def _refused(self, jobs: list[Job], failure: Failure) -> None:
        """End attempts that were not taken. Their job is judged by what there is, which may be that alone."""
        for job in jobs:
            new = [attempt for attempt in job.attempts if attempt.handle is None and not attempt.over]
            if not job.attempts:  # nothing was planned that there could be a record of
                self._fail(job, failure.outcome, failure.text)
                continue
            for attempt in new[:1]:
                attempt.failures.append(replace(failure, log=attempt.directory))
                attempt.finish(None)
            job.refused = failure
            job.pending -= 1
            if job.pending == 0 and not job.done.is_set():
                self._conclude(job)

    def _hand_over(self, jobs: list[Job]) -> None:
        numbered: list[tuple[JobSpec, int]] = []
        for job in jobs:  # several re-runs of one job may be packed together
            ahead = sum(spec is job.spec for spec, _ in numbered)
            last = max((attempt.number for attempt in job.attempts), default=-1)
            numbered.append((job.spec, last + 1 + ahead))
        excluded = sorted({node for job in jobs for node in job.excluded})
        plan = self._callbacks.plan(numbered, excluded)
        runs = {}
        for job, run, (_, number) in zip(jobs, plan.runs, numbered, strict=True):
            folder = plan.directory if len(plan.runs) == 1 else f"{plan.directory}/{run.run_id}"
            shared = len(plan.runs) > 1
            attempt = Attempt(run, number, directory=folder, submitted_ns=time.time_ns(), shared=shared)
            job.attempts.append(attempt)
            runs[run.run_id] = (job, attempt)
        self._callbacks.submitted([spec for spec, _ in numbered], plan)
        try:
            handle = self._provisioner.submit(plan)
        except MlhpcError:
            self._callbacks.ended(plan.allocation_id)  # refused: there is nothing to clear up
            raise
        self._active[plan.allocation_id] = Allocation(handle, runs, shared=len(plan.runs) > 1)
        for job, attempt in runs.values():
            attempt.handle = handle
            if attempt.number == 0:
                job.state = JobState.QUEUED
        if handle.native_id:
            self._accepted(plan.allocation_id, handle.native_id)

    def _accepted(self, allocation_id: str, native_id: str) -> None:
        for _, attempt in self._active[allocation_id].runs.values():
            attempt.job_id = native_id
        self._callbacks.accepted(allocation_id, native_id)

    def on(self, event: Event) -> None:
        """Take in what happened to an allocation."""
        allocation = self._active.get(event.handle.id)
        if allocation is None:
            return  # cancelled meanwhile
        if isinstance(event, StateChanged):
            self._moved(allocation, event)
        elif isinstance(event, LineArrived):
            self._heard(allocation, event)
        elif isinstance(event, AllocationEnded):
            ended = self._active.pop(event.handle.id)
            if event.unsure:
                self._unsure[event.handle.id] = ended
            else:
                self._ended[event.handle.id] = ended
            for job, attempt in allocation.unfinished:
                attempt.finish(error_of(attempt, event.error))
                self._over(job, attempt)
            self._write_off()

    def _moved(self, allocation: Allocation, event: StateChanged) -> None:
        if event.native_id:
            self._accepted(event.handle.id, event.native_id)
        for job, attempt in allocation.unfinished:
            job.reason = event.reason
            attempt.nodes = event.nodes or attempt.nodes
            if event.state is JobState.RUNNING and not attempt.allocated_ns:
                attempt.allocated_ns = event.since_ns or time.time_ns()
            if not allocation.shared or event.state is not JobState.RUNNING:
                job.state = event.state if attempt.number == 0 else JobState.RERUNNING

    def _heard(self, allocation: Allocation, event: LineArrived) -> None:
        job, attempt = allocation.runs.get(event.message.run_id, (None, None))
        if job is None or attempt is None or attempt.over:
            return
        if event.message.kind == "progress":
            job.progress = event.message.body
            return
        attempt.receive(event.message)
        if job.spec.held and event.message.kind == "started":
            lend(job, attempt, event.message)
        if not allocation.shared:
            return  # its end is the allocation's
        if event.message.kind == "started":
            job.state = JobState.RUNNING if attempt.number == 0 else JobState.RERUNNING
        elif event.message.kind == "end":
            attempt.finish(None)
            self._over(job, attempt)
            self._write_off()

    def _over(self, job: Job, attempt: Attempt) -> None:
        """One attempt has ended: run it again if it was taken from us, else conclude the job with its last."""
        job.pending -= 1
        if not job.lost and not job.done.is_set() and was_taken(job, attempt):
            failure = attempt.failure
            job.excluded.update(failed_nodes(job, attempt))
            job.attempts.remove(attempt)
            job.lost.append(attempt)
            job.state, job.progress = JobState.DECLARED, {}
            job.reason = f"again, after {failure.text}" if failure else "again"
            job.pending += 1
            self._waiting.appendleft(job)
        elif job.pending == 0 and (not job.done.is_set() or job.lent):
            self._conclude(job)

    def _conclude(self, job: Job) -> None:
        verdict = self._callbacks.judge(job)
        if isinstance(verdict, Outcome):
            job.conclude(verdict)
            self._callbacks.concluded([attempt.run.run_id for attempt in (*job.lost, *job.attempts)])
            if job.lent:
                job.state = JobState.ENDED  # its outcome came before
            return
        job.state, job.progress, job.pending = JobState.RERUNNING, {}, verdict
        job.excluded.update(seen_nodes(job))
        # To the front: tests are waited for in order, so this one holds up all others.
        self._waiting.extendleft([job] * verdict)

    def _write_off(self) -> None:
        """Tell the ledger which allocations nobody needs any more: while a job still has re-runs, its results are needed."""
        for allocation_id, allocation in list(self._ended.items()):
            if not allocation.others and all(job.done.is_set() for job, _ in allocation.runs.values()):
                del self._ended[allocation_id]
                self._callbacks.ended(allocation_id)

    def cancel(self, unwanted: Mapping[Job, str]) -> None:
        """End what runs for nobody but these jobs (each with its reason), by one call for all.

        A run that shares its allocation with others is told to be left out.
        """
        ending: list[Allocation] = []
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
        self._end(ending)
        for job, reason in unwanted.items():
            self._fail(job, "cancelled", reason)
        self._write_off()

    def _end(self, allocations: Sequence[Allocation]) -> None:
        """End *allocations* by one call; those of which that is not sure stay active."""
        if not allocations:
            return
        unsure = {handle.id for handle in self._provisioner.cancel([one.handle for one in allocations])}
        for allocation_id in [one.handle.id for one in allocations if one.handle.id not in unsure]:
            self._ended[allocation_id] = self._active.pop(allocation_id)

    def release(self, job: Job) -> None:
        """Give back nodes that the test of *job* held: their batch ends by itself, or is ended when it does not."""
        for allocation in self._active.values():
            if any(owner is job for owner, _ in allocation.unfinished):
                told = all(ask_back(attempt) for _, attempt in allocation.unfinished)
                self._released.setdefault(allocation.handle.id, time.monotonic() - (0 if told else RELEASE_S))

    @property
    def releasing(self) -> bool:
        """Whether nodes were given back and have not gone yet."""
        return any(allocation_id in self._active for allocation_id in self._released)

    def _end_overdue(self) -> None:
        limit = time.monotonic() - RELEASE_S
        due = [one for one, since in self._released.items() if since <= limit]
        for allocation_id in due:
            del self._released[allocation_id]
        overdue = [self._active[one] for one in due if one in self._active]
        self._end(overdue)
        for allocation in overdue:
            self._take_back(allocation)

    def _take_back(self, allocation: Allocation, failure: Failure | None = None) -> None:
        """Record what tests held of an allocation that is being ended; *failure*: their tests were not over."""
        for job, attempt in allocation.unfinished:
            if job.lent:
                attempt.failures += [failure] if failure else []
                attempt.finish(None)
                self._over(job, attempt)

    def cancel_all(self, outcome: str, reason: str) -> None:
        """End everything but what a later session may wait for; what is not surely gone stays in the ledger."""
        ours = [allocation for allocation in self._active.values() if not allocation.others]
        unsure = (
            {handle.id for handle in self._provisioner.cancel([one.handle for one in ours])}
            if ours
            else set()
        )
        for allocation in list(self._active.values()):
            allocation_id = allocation.handle.id
            self._take_back(allocation, None if allocation_id in self._released else Failure(outcome, reason))
            for _, attempt in allocation.unfinished:
                attempt.failures.append(Failure(outcome, reason))
                attempt.ended_ns = attempt.ended_ns or time.time_ns()
            if allocation_id not in unsure and not allocation.others:
                self._ended[allocation_id] = self._active.pop(allocation_id)
        self.fail_all(outcome, reason)
        self._write_off()

    def abandon(self, outcome: str, reason: str) -> None:
        """Forget everything without touching it: it is another session's now."""
        for owned in (self._active, self._ended, self._unsure):
            owned.clear()
        self._waiting.clear()
        self.fail_all(outcome, reason)

    def fail_all(self, outcome: str, reason: str) -> None:
        """Give every job an outcome; one that is there stays."""
        for job in self._jobs:
            self._fail(job, outcome, reason)

    def _fail(self, job: Job, outcome: str, reason: str) -> None:
        """End *job* without the judge; what has an outcome keeps it."""
        if not job.done.is_set():
            job.fail(outcome, reason)
            self._callbacks.unjudged(job)

    def leave(self) -> None:
        """Leave everything to a later session, but for nodes that a test would hold now."""
        held = [one for one in self._active.values() if any(job.spec.held for job, _ in one.runs.values())]
        unsure = {handle.id for handle in self._provisioner.cancel([one.handle for one in held])}
        for allocation in held:
            self._take_back(allocation, Failure("cancelled", "the session left its jobs to a later one"))
            if allocation.handle.id not in unsure:
                self._ended[allocation.handle.id] = self._active.pop(allocation.handle.id)
        for job in self._jobs:
            if job.spec.held:
                self._fail(
                    job, "cancelled", "no later session can go on with nodes that a test holds while it runs"
                )
        self._write_off()
        for allocation in self._active.values():
            for job, attempt in allocation.unfinished:
                # Without an id nobody may have taken it yet; the reason says who does not answer.
                known = f"job {attempt.job_id} is {job.state.value}" if attempt.job_id else job.reason
                self._fail(job, "detached", f"{known or 'its job is queued'}; a later session takes it over")
        for job in self._jobs:
            submitted = "" if job.attempts else "not submitted yet; "
            self._fail(job, "detached", f"{submitted}a later session goes on with it")
