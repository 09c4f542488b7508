"""Provisioner `slurm`: one job for each allocation, followed through files, one poller for all of a partition."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from pytest_mlhpc.batch.plan import Plan
from pytest_mlhpc.errors import ProvisionError
from pytest_mlhpc.jobs.spec import JobSpec, JobState
from pytest_mlhpc.jobs.submitted import job_name
from pytest_mlhpc.provision.base import Event, Handle, StateChanged
from pytest_mlhpc.provision.clock import Clock
from pytest_mlhpc.provision.conversation import Conversation
from pytest_mlhpc.provision.slurm.allocation import LOOK_S, Allocation
from pytest_mlhpc.provision.slurm.asking import Asker
from pytest_mlhpc.provision.slurm.backoff import Backoff
from pytest_mlhpc.provision.slurm.canceller import Canceller
from pytest_mlhpc.provision.slurm.cancelling import SILENT_S, cancel_jobs, confirm_gone
from pytest_mlhpc.provision.slurm.causes import damaged
from pytest_mlhpc.provision.slurm.client import (
    PartitionLimits,
    QosLimits,
    SlurmClient,
)
from pytest_mlhpc.provision.slurm.follow import Follower, present
from pytest_mlhpc.provision.slurm.followed import Followed
from pytest_mlhpc.provision.slurm.limits import beyond, longest
from pytest_mlhpc.provision.slurm.options import SlurmSettings, settings_of
from pytest_mlhpc.provision.slurm.polling import Poller
from pytest_mlhpc.provision.slurm.submitting import Submitter, lines_folder, prepare
from pytest_mlhpc.provision.slurm.words import Investigator
from pytest_mlhpc.system.model import Partition

#: Least time between two rounds, in seconds.
ROUND_S = 0.05


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
        self._followed = Followed(self._now)
        self._unsure: dict[str, Allocation] = {}  #: cancelled, but nobody knows whether they are gone
        self._awake = threading.Event()
        self._limits: tuple[PartitionLimits | None, QosLimits | None] | None = None
        self._backoff = Backoff(self._now)
        self._investigator = Investigator(client, self._backoff)
        self._canceller = Canceller(client, self._backoff, self._now)
        self._submitter = Submitter(client, self._backoff, self._now)
        asker = Asker(client, self._backoff, self._investigator, self._settings.pending_limit_s)
        self._poller = Poller(self._followed, asker, self._investigator, self._backoff, self._awake)

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
        self._followed.found += self._submitter.submit(allocation)
        self._followed.allocations[plan.allocation_id] = allocation
        return allocation.handle

    def adopt(self, plan: Plan, native_id: str) -> Handle:
        """Take over the job of an earlier session; all that its batch wrote so far is read again."""
        allocation = self._follow(plan, native_id)
        if not native_id:  # look for it by name before submitting
            allocation.submit_tries = 1
            allocation.lose(self._now())
        self._followed.allocations[plan.allocation_id] = allocation
        self._poller.soon()
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
            if self._followed.found or woken or now >= until:
                return self._followed.take()
            look = min((one.next_look for one in self._followed.allocations.values()), default=now + LOOK_S)
            pause = min(max(look - now, ROUND_S), LOOK_S)
            self._clock.wait(self._awake, max(0.0, min(pause, until - now)))

    def _talk(self) -> None:
        """Say to Slurm and ask of it what is due; each call may take its whole time limit, so no two in vain."""
        cancel = functools.partial(self._canceller.cancel, self._followed.allocations.values())
        for step in (self._submit_waiting, cancel, self._poller.poll_if_due):
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
            for owned in (self._followed.allocations, self._unsure)
            if handle.id in owned
        ]
        wanted = {handle.id for handle in handles}
        self._followed.found = [event for event in self._followed.found if event.handle.id not in wanted]
        named = [(one.name, one.handle.native_id) for one in known if one.submit_tries or one.submitted]
        # Of a Slurm that has not answered just now less is hoped.
        silent_s = SILENT_S / 2 if self._backoff.waits() else SILENT_S
        unsure = cancel_jobs(self._client, named, silent_s)
        left = {one.handle.id: one for one in known if one.name in unsure or self._followed.under_way(one)}
        self._unsure |= left
        return [one.handle for one in left.values()]

    def close(self) -> None:
        """Make sure that jobs whose batch said that it was over are gone; the others go on."""
        ended, self._followed.ended = self._followed.ended, []
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
        for allocation in list(self._followed.allocations.values()):
            if self._awake.is_set():
                return
            if allocation.submitted or allocation.up:
                continue
            try:
                self._followed.found += self._submitter.submit(allocation)
            except ProvisionError as error:
                self._followed.end(allocation, error, unsure=allocation.lost_at is not None)
                continue
            if allocation.handle.native_id:
                self._followed.found.append(
                    StateChanged(allocation.handle, JobState.QUEUED, native_id=allocation.handle.native_id)
                )

    # Looking.

    def _look(self) -> None:
        now = self._now()
        due = [one for one in self._followed.allocations.values() if now >= one.next_look]
        there = {folder: present(folder) for folder in {one.folder for one in due}}
        for allocation in due:
            found = there[allocation.folder].get(allocation.handle.id, set())
            if not (found or allocation.up):
                allocation.next_look = now + LOOK_S
                continue
            self._followed.found += allocation.look(now, over_there="over" in found)
            if allocation.conversation.mismatch:
                allocation.cancelling = True  # it would compute to the end for nothing
            if allocation.exit is not None and allocation.conversation.complete and not allocation.doubtful:
                self._followed.end(allocation, None)
            elif allocation.damage:
                self._followed.give_up(allocation, damaged(allocation.damage))
