"""Provisioner `slurm`: one job for each allocation, followed through files, one poller for all of a partition."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_mlhpc.batch.plan import Plan
from pytest_mlhpc.errors import MlhpcError, ProvisionError
from pytest_mlhpc.jobs.spec import JobSpec, JobState
from pytest_mlhpc.jobs.submitted import job_name
from pytest_mlhpc.provision.base import AllocationEnded, Event, Handle, LineArrived, StateChanged
from pytest_mlhpc.provision.conversation import Conversation
from pytest_mlhpc.provision.slurm.allocation import Allocation
from pytest_mlhpc.provision.slurm.asking import Asker
from pytest_mlhpc.provision.slurm.cancelling import cancel_jobs, confirm_gone
from pytest_mlhpc.provision.slurm.causes import damaged, never_scheduled, requeued
from pytest_mlhpc.provision.slurm.client import (
    Job,
    PartitionLimits,
    QosLimits,
    SlurmClient,
    SlurmError,
    State,
)
from pytest_mlhpc.provision.slurm.follow import Follower, present
from pytest_mlhpc.provision.slurm.limits import beyond, longest
from pytest_mlhpc.provision.slurm.options import SlurmSettings, settings_of
from pytest_mlhpc.provision.slurm.submitting import Submitter, lines_folder, prepare
from pytest_mlhpc.provision.slurm.words import PLACE_AFTER_S, Investigator, waiting_text
from pytest_mlhpc.system.model import Partition

#: Time between two looks at the files of running batches, and at the folder while all jobs wait, in seconds.
LOOK_S, LOOK_WAITING_S = 0.5, 1.0

#: How long the files of a job that Slurm calls completed may lag behind on a network file system, in seconds.
FILES_LAG_S = 30.0

#: How often the accounting is asked for the energy of a run before its record is made without.
ASK_ENERGY = 6

#: How long neither queue nor accounting may know a job before it counts as lost, in seconds (accounting lags).
UNKNOWN_LIMIT_S = 60.0


@dataclass(frozen=True)
class Clock:
    """Time, as tests and benchmarks may make it up."""

    monotonic: Callable[[], float] = time.monotonic
    wait: Callable[[threading.Event, float], bool] = lambda event, seconds: event.wait(seconds)


class SlurmProvisioner:
    """Runs plans in Slurm jobs. Jobs outlive this object: :meth:`cancel` ends them, :meth:`adopt` takes them over.

    Args:
        partition: what systems.yaml says of it.
        client: how Slurm is reached.
        payload: sha256 -> where the zip lies, seen from the nodes; None where a plan needs none.
    """

    def __init__(
        self,
        partition: Partition,
        client: SlurmClient,
        payload: Callable[[str], Path | None],
        clock: Clock | None = None,
    ) -> None:
        self._partition = partition
        self._settings: SlurmSettings = settings_of(partition)
        self._client = client
        self._payload = payload
        self._clock = clock or Clock()
        self._allocations: dict[str, Allocation] = {}
        self._ended: list[Handle] = []  #: whose end was read from files, not yet from Slurm
        self._found: list[Event] = []
        self._awake = threading.Event()
        self._trouble = ""  #: why Slurm did not answer
        self._limits: tuple[PartitionLimits | None, QosLimits | None] | None = None
        self._investigator = Investigator(client)
        self._submitter = Submitter(client)
        self._asker = Asker(client, self._investigator, self._settings.pending_limit_s)

    # The protocol.

    def validate(self, spec: JobSpec) -> str:
        """Return why *spec* is beyond the limits of systems.yaml, the partition or its QoS, or an empty string."""
        if self._limits is None:
            self._limits = self._investigator.limits(self._settings.partition, self._settings.qos)
        return beyond(spec, self._partition, self._settings, *self._limits)

    def longest(self) -> float | None:
        """Return the longest allocation that systems.yaml, the partition and its QoS give, in seconds; None: any."""
        if self._limits is None:
            self._limits = self._investigator.limits(self._settings.partition, self._settings.qos)
        return longest(self._settings, *self._limits)

    def submit(self, plan: Plan) -> Handle:
        """Write the job script and submit it; where Slurm does not answer, that is tried again later.

        Raises:
            ProvisionError: ``rejected`` in Slurm's own words, or ``disk_full``.
        """
        allocation = self._follow(plan, "")
        prepare(plan, self._partition, self._payload(plan.payload_sha256))
        self._found += self._submitter.submit(allocation, self._clock.monotonic())
        self._allocations[plan.allocation_id] = allocation
        return allocation.handle

    def adopt(self, plan: Plan, native_id: str) -> Handle:
        """Take over the job of an earlier session; all that its batch wrote so far is read again."""
        allocation = self._follow(plan, native_id)
        allocation.submit_tries = 1  # without an id: look for it by name before submitting
        self._allocations[plan.allocation_id] = allocation
        self._asker.soon()
        return allocation.handle

    def events(self, handles: Sequence[Handle], timeout_s: float) -> list[Event]:  # noqa: ARG002 - all are ours
        """Return what happened, waiting at most *timeout_s* if nothing did or until :meth:`wake`."""
        until = self._clock.monotonic() + timeout_s
        while True:
            woken = self._awake.is_set()
            self._awake.clear()
            self._look()  # first, as what has begun needs no submission
            self._submit_waiting()
            self._poll_if_due()
            now = self._clock.monotonic()
            if self._found or woken or now >= until:
                found, self._found = self._found, []
                return found
            pause = LOOK_S if any(one.up for one in self._allocations.values()) else LOOK_WAITING_S
            self._clock.wait(self._awake, max(0.0, min(pause, until - now)))

    def wake(self) -> None:
        """Make a waiting :meth:`events` return at once; the only call for other threads."""
        self._awake.set()

    def skip(self, handle: Handle, run_ids: Sequence[str]) -> None:
        """Leave a note for the batch, which looks for it before it starts a run."""
        for run_id in run_ids:
            try:
                (handle.directory / f"{run_id}.skip").touch()
            except OSError:
                return  # a courtesy: the run is made for nothing then

    def cancel(self, handles: Sequence[Handle]) -> list[Handle]:
        """Cancel jobs and wait until they are gone; return those of which that is not sure."""
        known = [self._allocations.pop(handle.id) for handle in handles if handle.id in self._allocations]
        wanted = {handle.id for handle in handles}
        self._found = [event for event in self._found if event.handle.id not in wanted]
        tried = [one for one in known if one.submit_tries]
        unanswered = {one.name for one in tried if not self._submitter.accepted(one)}
        named = [(one.name, one.handle.native_id) for one in tried if one.name not in unanswered]
        unsure = unanswered | cancel_jobs(self._client, named)
        return [one.handle for one in known if one.name in unsure]

    def close(self) -> None:
        """Make sure that jobs whose batch said that it was over are gone; the others go on."""
        ended, self._ended = self._ended, []
        confirm_gone(self._client, [handle.native_id for handle in ended if handle.native_id])

    # Submitting.

    def _follow(self, plan: Plan, native_id: str) -> Allocation:
        directory = Path(plan.directory)
        return Allocation(
            handle=Handle(plan.allocation_id, directory, native_id),
            plan=plan,
            name=job_name(plan.allocation_id),
            since=self._clock.monotonic(),
            folder=lines_folder(plan),
            follower=Follower(lines_folder(plan), plan.allocation_id),
            conversation=Conversation(plan, directory / "slurm.out"),
            accounted=self._settings.energy,
        )

    def _submit_waiting(self) -> None:
        now = self._clock.monotonic()
        for allocation in list(self._allocations.values()):
            if allocation.submitted or allocation.up or now < allocation.next_try:
                continue
            try:
                self._found += self._submitter.submit(allocation, now)
            except ProvisionError as error:
                self._end(allocation, error)
                continue
            if allocation.handle.native_id:
                self._found.append(
                    StateChanged(allocation.handle, JobState.QUEUED, native_id=allocation.handle.native_id)
                )

    # Looking.

    def _look(self) -> None:
        now = self._clock.monotonic()
        there: dict[Path, set[str]] = {}
        for allocation in list(self._allocations.values()):
            if not allocation.up:
                if allocation.folder not in there:
                    there[allocation.folder] = present(allocation.folder)
                if allocation.handle.id not in there[allocation.folder]:
                    continue
            self._found += allocation.look(now)
            if allocation.conversation.mismatch and not allocation.cancelling:
                allocation.cancelling = True  # it would compute to the end for nothing
                cancel_jobs(self._client, [(allocation.name, allocation.handle.native_id)], wait_s=0.0)
            if allocation.exit is not None and allocation.conversation.complete and not allocation.doubtful:
                self._end(allocation, None)
            elif allocation.damage:
                self._give_up(allocation, damaged(allocation.damage))

    def _give_up(self, allocation: Allocation, error: MlhpcError) -> None:
        """End an allocation once its job is surely gone; else the next look tries again, as the ledger must not forget it."""
        if not cancel_jobs(self._client, [(allocation.name, allocation.handle.native_id)]):
            self._end(allocation, error)

    def _end(self, allocation: Allocation, error: MlhpcError | None) -> None:
        for message in allocation.conversation.finish() if error is None else []:
            self._found.append(LineArrived(allocation.handle, message))
        del self._allocations[allocation.handle.id]
        self._ended.append(allocation.handle)
        self._found.append(AllocationEnded(allocation.handle, error))

    # Asking.

    def _poll_if_due(self) -> None:
        now = self._clock.monotonic()
        if not self._asker.due(self._allocations.values(), now):
            return
        asked = [one for one in self._allocations.values() if one.submitted]
        try:
            jobs = self._asker.jobs(asked, now)
        except SlurmError as error:
            self._tell_trouble(str(error))
            return
        self._trouble = ""
        for allocation in asked:
            self._update(allocation, jobs.get(allocation.handle.native_id))
        in_doubt = [one for one in asked if one.needs_words and one.handle.id in self._allocations]
        for allocation in in_doubt:
            self._clear_up(allocation, jobs.get(allocation.handle.native_id))

    def _update(self, allocation: Allocation, job: Job | None) -> None:
        now = self._clock.monotonic()
        if job is None:
            allocation.unknown_since = allocation.unknown_since or now
            if now - allocation.unknown_since > UNKNOWN_LIMIT_S:
                self._clear_up(allocation, None)
            return
        allocation.job, allocation.unknown_since = job, None
        if job.state.pending and allocation.up:
            self._give_up(allocation, requeued(job))
        elif job.state.pending:
            self._waits(allocation, job, now)
        elif not job.state.ended:
            self._found += allocation.state(JobState.RUNNING, "", job.nodes)
        elif allocation.exit is None:
            # The last lines may have come while Slurm was asked, and lag behind on a network file system.
            self._found += allocation.look(now)
            since_end = time.time() - job.end_ns / 1e9 if job.end_ns else FILES_LAG_S
            lags = job.state is State.COMPLETED and since_end < FILES_LAG_S
            if not lags or allocation.conversation.complete:
                self._clear_up(allocation, job)

    def _waits(self, allocation: Allocation, job: Job, now: float) -> None:
        waited = now - allocation.since
        if waited >= self._asker.limit_of(allocation):
            error = never_scheduled(
                job, waited, self._settings.pending_limit_s, self._investigator.unavailable(job)
            )
            self._give_up(allocation, error)
            return
        ahead = self._investigator.ahead(job, now) if waited > PLACE_AFTER_S else None
        self._found += allocation.state(JobState.QUEUED, waiting_text(job, ahead))

    def _clear_up(self, allocation: Allocation, job: Job | None) -> None:
        """Let out what waited for Slurm's words, and end the allocation if it has ended."""
        if allocation.handle.id not in self._allocations:
            return
        over = allocation.exit is not None or job is None or job.state.ended
        if over and job is not None and not job.state.ended and not allocation.conversation.complete:
            return  # the batch has gone, the job goes in a moment: its state tells why
        findings = self._investigator.findings(job)
        if allocation.accounted and not findings.accounted(allocation.doubtful):
            allocation.asked += 1
            if allocation.asked < ASK_ENERGY:
                return
        allocation.asked = 0
        for message in findings.amended(allocation.release()):
            self._found.append(LineArrived(allocation.handle, message))
        if not over:
            return
        if allocation.conversation.complete:
            self._end(allocation, None)
        else:
            self._end(allocation, findings.cause(allocation.exit, allocation.last_words()))

    def _tell_trouble(self, text: str) -> None:
        if text != self._trouble:
            self._trouble = text
            for allocation in self._allocations.values():
                if allocation.pending:
                    self._found += allocation.state(JobState.QUEUED, f"Slurm does not answer: {text}")
