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
from pytest_mlhpc.provision.reapers import UNDER_WAY_S
from pytest_mlhpc.provision.slurm.allocation import LOOK_S, Allocation
from pytest_mlhpc.provision.slurm.asking import Asker
from pytest_mlhpc.provision.slurm.backoff import Backoff
from pytest_mlhpc.provision.slurm.canceller import Canceller
from pytest_mlhpc.provision.slurm.cancelling import (
    GONE_S,
    cancel_jobs,
    confirm_gone,
)
from pytest_mlhpc.provision.slurm.causes import damaged, never_scheduled, requeued
from pytest_mlhpc.provision.slurm.client import (
    Job,
    PartitionLimits,
    QosLimits,
    SlurmClient,
    SlurmError,
)
from pytest_mlhpc.provision.slurm.follow import Follower, present
from pytest_mlhpc.provision.slurm.limits import beyond, longest
from pytest_mlhpc.provision.slurm.options import SlurmSettings, settings_of
from pytest_mlhpc.provision.slurm.submitting import Submitter, lines_folder, prepare
from pytest_mlhpc.provision.slurm.words import PLACE_AFTER_S, Investigator, waiting_text
from pytest_mlhpc.system.model import Partition

#: Least time between two rounds, in seconds.
ROUND_S = 0.05

#: How often the accounting is asked for the energy of a run before its record is made without.
ASK_ENERGY = 6


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
        self._unsure: dict[str, Allocation] = {}  #: cancelled, but nobody knows whether they are gone
        #: Name and id of jobs whose end was read from files, not yet from Slurm.
        self._ended: list[tuple[str, str]] = []
        self._found: list[Event] = []
        self._awake = threading.Event()
        self._trouble = ""  #: why Slurm did not answer
        self._limits: tuple[PartitionLimits | None, QosLimits | None] | None = None
        self._backoff = Backoff(self._now)
        self._investigator = Investigator(client, self._backoff)
        self._canceller = Canceller(client, self._backoff, self._now)
        self._submitter = Submitter(client, self._backoff, self._now)
        self._asker = Asker(client, self._backoff, self._investigator, self._settings.pending_limit_s)

    def _now(self) -> float:
        return self._clock.monotonic()

    # The protocol.

    def validate(self, spec: JobSpec) -> str:
        """Return why *spec* is beyond the limits of systems.yaml, the partition or its QoS, or an empty string."""
        return beyond(spec, self._partition, self._settings, *self._known_limits())

    def longest(self) -> float | None:
        """Return the longest allocation that systems.yaml, the partition and its QoS give, in seconds; None: any."""
        return longest(self._settings, *self._known_limits())

    def _known_limits(self) -> tuple[PartitionLimits | None, QosLimits | None]:
        if self._limits is None:
            self._limits = self._investigator.limits(self._settings.partition, self._settings.qos)
        return self._limits or (None, None)

    def submit(self, plan: Plan) -> Handle:
        """Write the job script and submit it; where Slurm does not answer, that is tried again later.

        Raises:
            ProvisionError: ``rejected`` in Slurm's own words, or ``disk_full``.
        """
        allocation = self._follow(plan, "")
        prepare(plan, self._partition, self._payload(plan.payload_sha256))
        self._found += self._submitter.submit(allocation)
        self._allocations[plan.allocation_id] = allocation
        return allocation.handle

    def adopt(self, plan: Plan, native_id: str) -> Handle:
        """Take over the job of an earlier session; all that its batch wrote so far is read again."""
        allocation = self._follow(plan, native_id)
        if not native_id:  # look for it by name before submitting
            allocation.submit_tries, allocation.lost_at = 1, self._now()
        self._allocations[plan.allocation_id] = allocation
        self._asker.soon()
        return allocation.handle

    def events(self, handles: Sequence[Handle], timeout_s: float) -> list[Event]:  # noqa: ARG002 - all are ours
        """Return what happened, waiting at most *timeout_s* if nothing did or until :meth:`wake`."""
        until = self._now() + timeout_s
        while True:
            woken = self._awake.is_set()
            if woken:
                self._awake.clear()
            self._look()  # first, as what has begun needs no submission
            if not woken:
                self._talk()
            now = self._now()
            if self._found or woken or now >= until:
                found, self._found = self._found, []
                return found
            look = min((one.next_look for one in self._allocations.values()), default=now + LOOK_S)
            pause = min(max(look - now, ROUND_S), LOOK_S)
            self._clock.wait(self._awake, max(0.0, min(pause, until - now)))

    def _talk(self) -> None:
        """Say to Slurm and ask of it what is due; each call may take its whole time limit, so no two in vain."""
        for step in (self._submit_waiting, self._cancel_due, self._poll_if_due):
            if self._awake.is_set():
                return
            step()

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
        known = [
            owned.pop(handle.id)
            for handle in handles
            for owned in (self._allocations, self._unsure)
            if handle.id in owned
        ]
        wanted = {handle.id for handle in handles}
        self._found = [event for event in self._found if event.handle.id not in wanted]
        named = [(one.name, one.handle.native_id) for one in known if one.submit_tries or one.submitted]
        unsure = cancel_jobs(self._client, named)
        left = {one.handle.id: one for one in known if one.name in unsure or self._under_way(one)}
        self._unsure |= left
        return [one.handle for one in left.values()]

    def close(self) -> None:
        """Make sure that jobs whose batch said that it was over are gone; the others go on."""
        ended, self._ended = self._ended, []
        confirm_gone(self._client, ended)

    # Submitting.

    def _follow(self, plan: Plan, native_id: str) -> Allocation:
        directory, folder = Path(plan.directory), lines_folder(plan)
        return Allocation(
            handle=Handle(plan.allocation_id, directory, native_id),
            plan=plan,
            name=job_name(plan.allocation_id),
            since=self._now(),
            folder=folder,
            follower=Follower(folder, plan.allocation_id),
            conversation=Conversation(plan, directory / "slurm.out"),
            accounted=self._settings.energy,
        )

    def _submit_waiting(self) -> None:
        for allocation in list(self._allocations.values()):
            if self._awake.is_set():
                return
            if allocation.submitted or allocation.up:
                continue
            try:
                self._found += self._submitter.submit(allocation)
            except ProvisionError as error:
                self._end(allocation, error, unsure=allocation.lost_at is not None)
                continue
            if allocation.handle.native_id:
                self._found.append(
                    StateChanged(allocation.handle, JobState.QUEUED, native_id=allocation.handle.native_id)
                )

    def _under_way(self, allocation: Allocation) -> bool:
        """Whether a submission without answer may still get through."""
        return allocation.lost_at is not None and self._now() - allocation.lost_at < UNDER_WAY_S

    # Looking.

    def _look(self) -> None:
        now = self._now()
        due = [one for one in self._allocations.values() if now >= one.next_look]
        there = {folder: present(folder) for folder in {one.folder for one in due}}
        for allocation in due:
            found = there[allocation.folder].get(allocation.handle.id, set())
            if not (found or allocation.up):
                allocation.next_look = now + LOOK_S
                continue
            self._found += allocation.look(now, over_there="over" in found)
            if allocation.conversation.mismatch:
                allocation.cancelling = True  # it would compute to the end for nothing
            if allocation.exit is not None and allocation.conversation.complete and not allocation.doubtful:
                self._end(allocation, None)
            elif allocation.damage:
                self._give_up(allocation, damaged(allocation.damage))

    # Ending.

    def _give_up(self, allocation: Allocation, error: MlhpcError) -> None:
        """Let an allocation end with *error* once its job is surely gone, as the ledger must not forget it before."""
        allocation.cancelling = True
        allocation.given_up = allocation.given_up or error

    def _cancel_due(self) -> None:
        self._canceller.cancel(self._allocations.values())

    def _confirm(self, allocation: Allocation, job: Job | None) -> None:
        """End an allocation that was given up if its job is gone, or does not go although Slurm was told."""
        assert allocation.given_up is not None  # noqa: S101 - for the type checker
        now = self._now()
        if allocation.unknown(now) if job is None else job.state.ended:
            self._end(allocation, allocation.given_up, unsure=self._under_way(allocation))
        elif allocation.cancelled_at is not None and now - allocation.cancelled_at > GONE_S:
            self._end(allocation, allocation.given_up, unsure=True)

    def _end(self, allocation: Allocation, error: MlhpcError | None, *, unsure: bool = False) -> None:
        for message in allocation.conversation.finish() if error is None else []:
            self._found.append(LineArrived(allocation.handle, message))
        del self._allocations[allocation.handle.id]
        if allocation.submit_tries or allocation.submitted:
            self._ended.append((allocation.name, allocation.handle.native_id))
        self._found.append(AllocationEnded(allocation.handle, error, unsure))

    # Asking.

    def _poll_if_due(self) -> None:
        now = self._now()
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
        for allocation in asked:
            if self._awake.is_set() or self._backoff.waits():
                return  # Slurm has stopped answering, or somebody wants to go on
            self._clear_up(allocation, jobs.get(allocation.handle.native_id))

    def _update(self, allocation: Allocation, job: Job | None) -> None:
        now = self._now()
        if job is None:
            allocation.unknown_since = now if allocation.unknown_since is None else allocation.unknown_since
        else:
            allocation.job, allocation.unknown_since = job, None
        if allocation.given_up is not None:
            self._confirm(allocation, job)
        elif job is None:
            return
        elif job.state.pending and allocation.up:
            # One answer may be older than what the batch has said.
            allocation.strange += 1
            if job.restarts or allocation.strange > 1:
                self._give_up(allocation, requeued(job))
        elif job.state.pending:
            self._waits(allocation, job, now)
        elif not job.state.ended:
            allocation.strange = 0
            self._found += allocation.state(JobState.RUNNING, "", job.nodes)

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
        if allocation.handle.id not in self._allocations or allocation.given_up is not None:
            return
        over = self._over(allocation, job)
        if over is None or not (over or (job is not None and allocation.doubtful)):
            return
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

    def _over(self, allocation: Allocation, job: Job | None) -> bool | None:
        """Return whether nothing more will come of an allocation; None: wait for what comes in a moment."""
        now = self._now()
        gone = allocation.unknown(now) if job is None else job.state.ended
        if not gone and allocation.exit is None:
            return False
        self._found += allocation.look(now)  # the last lines may have come while Slurm was asked
        if allocation.conversation.complete:
            return True
        if job is not None and not job.state.ended:
            return None  # the batch has gone, the job goes in a moment: its state tells why
        return None if allocation.lags(job, now) else True

    def _tell_trouble(self, text: str) -> None:
        if text != self._trouble:
            self._trouble = text
            for allocation in self._allocations.values():
                if allocation.pending:
                    self._found += allocation.state(JobState.QUEUED, f"Slurm does not answer: {text}")
