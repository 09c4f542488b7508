"""What is due for one allocation: found, created, followed, provisioned again, ended. Told in events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from pytest_mlhpc.errors import MlhpcError, ProvisionError
from pytest_mlhpc.jobs.spec import JobState
from pytest_mlhpc.provision.base import AllocationEnded, Event, LineArrived, StateChanged
from pytest_mlhpc.provision.kubernetes import told, verdicts
from pytest_mlhpc.provision.kubernetes.allocation import Allocation, Phase
from pytest_mlhpc.provision.kubernetes.clusters import Clusters
from pytest_mlhpc.provision.kubernetes.creating import Creator
from pytest_mlhpc.provision.kubernetes.ending import DELETE_LIMIT_S, PAUSE_S, delete, keeps, try_to_end
from pytest_mlhpc.provision.kubernetes.errors import KubernetesError, Unavailable
from pytest_mlhpc.provision.kubernetes.inquiry import Inquirer
from pytest_mlhpc.provision.kubernetes.intake import Intake
from pytest_mlhpc.provision.kubernetes.leading import tell_leader
from pytest_mlhpc.provision.kubernetes.leaving import Leaving
from pytest_mlhpc.provision.kubernetes.lost_nodes import look_for_nodes
from pytest_mlhpc.provision.kubernetes.placing import Placer, note_unfit, unfit_messages
from pytest_mlhpc.provision.kubernetes.refusals import refused

#: How long after a watch went on nothing is overdue yet, in seconds: what was missed is being told.
HEALING_S: Final = 5.0
#: How long the cluster gets to learn what is free before a pod without room is made again, and at most after further tries, in
#: seconds. A kubelet tells its node's state every 10 s (nodeStatusUpdateFrequency).
CROWDED_S: Final = 10.0
MOST_CROWDED_S: Final = 60.0


@dataclass(frozen=True)
class Attendant:
    """Works on the allocations of one provisioner, in its thread.

    Args:
        allocations: by id; those that have ended are taken out.
        found: gets the events.
        now: the provisioner's clock, in seconds.
    """

    allocations: dict[str, Allocation]
    leaving: Leaving
    clusters: Clusters
    intake: Intake
    placer: Placer
    creator: Creator
    inquirer: Inquirer
    found: list[Event]
    now: Callable[[], float]

    def attend(self, allocation: Allocation) -> None:
        """Do what is due for one allocation."""
        try:
            if allocation.phase is Phase.FINDING:
                self._find(allocation)
            if allocation.phase is Phase.CREATING:
                self.create(allocation)
            if allocation.phase is Phase.FOLLOWED:
                self._follow(allocation)
        except ProvisionError as error:
            self.end(allocation, error)
        except KubernetesError as error:
            self.end(allocation, refused(error))
        if allocation.phase is Phase.ENDING:
            self._finish(allocation, self.now())

    def _follow(self, allocation: Allocation) -> None:
        """Do what is due for one that the cluster has: tell of it, and see whether it has ended.

        Raises:
            ProvisionError: it cannot be provisioned again, or its pods cannot be told of each other.
        """
        now = self.now()
        silence = self.intake.silence(allocation)
        self.found.extend(allocation.release(now))
        if silence is None:
            tell_leader(allocation, now)
            self.inquirer.ask(allocation)
            look_for_nodes(allocation)
        self.found.extend(allocation.state())
        allocation.patience.note(allocation.causes(), now)
        healing = silence is None and now - self.intake.healed_at < HEALING_S
        if healing and not allocation.conversation.complete:
            return
        verdict = verdicts.judge(allocation, now, silence)
        if verdict.unfit_nodes:
            if self._once_more(allocation, verdict.unfit_nodes):
                return
            note_unfit(allocation)
            self.tell_unfit(allocation)
        if verdict.crowded and self._when_there_is_room(allocation):
            return
        if verdict.ended:
            self.end(allocation, verdict.error)

    def _find(self, allocation: Allocation) -> None:
        """Go on with an adopted allocation once the cluster has listed what it has.

        Raises:
            ProvisionError: it is gone.
            KubernetesError: the server refuses to tell.
        """
        now = self.now()
        silence = self.intake.silence(allocation)
        if silence is not None and (error := verdicts.refusal(allocation, now, silence)) is not None:
            raise error
        if now < allocation.try_at or not allocation.sources <= self.intake.synced:
            return
        try:
            self.leaving.find_all(allocation)
        except Unavailable:
            allocation.try_at = now + PAUSE_S
            return
        wanted = allocation.plan.nodes + allocation.plan.spares if allocation.kind.each_pod else 1
        if len(allocation.workloads) >= wanted:
            allocation.phase = Phase.CREATING  # all was, but perhaps for what belongs to what
        elif allocation.handle.native_id:
            where = f"{allocation.api.server} has no {allocation.handle.native_id} any more"
            raise ProvisionError("cancelled_outside", f"{where}: somebody deleted it, or its time was over")
        elif allocation.workloads:  # half of its pods: they have done nothing without the others
            self._once_more(allocation, ())
        else:
            self.start(allocation)

    def _once_more(self, allocation: Allocation, unfit: Sequence[str]) -> bool:
        """Provision again without *unfit*, if that was not done too often; return whether it is under way.

        Raises:
            ProvisionError: it cannot be.
        """
        if unfit and allocation.round >= allocation.settings.reprovision:
            return False
        if self.now() < allocation.try_at:
            return True
        try:
            delete(allocation, grace_s=0)
        except KubernetesError:
            allocation.try_at = self.now() + PAUSE_S
            return True
        note_unfit(allocation)
        self.tell_unfit(allocation)
        self.intake.forget(allocation)
        allocation.begin_again(unfit, self.now())
        self.start(allocation)
        return True

    def _when_there_is_room(self, allocation: Allocation) -> bool:
        """Provision again what a kubelet had no room for, if that was not done too often; return whether it is under way.

        Raises:
            ProvisionError: it cannot be.
        """
        if allocation.round >= allocation.settings.reprovision:
            return False
        if allocation.crowded_at is None:
            allocation.crowded_at = self.now()
        if self.now() - allocation.crowded_at < min(MOST_CROWDED_S, CROWDED_S * 3**allocation.round):
            return True
        return self._once_more(allocation, ())

    def tell_unfit(self, allocation: Allocation) -> None:
        """Tell the runs which nodes were found unfit before, if there were any: their records name them."""
        for message in unfit_messages(allocation.plan):
            self.found.append(LineArrived(allocation.handle, message))

    def replay(self, allocation: Allocation, known: told.Told) -> None:
        """Tell what an earlier session has heard of it to its end, and delete what is left of it."""
        running = StateChanged(allocation.handle, JobState.RUNNING, nodes=known.nodes)
        self.found.append(running)
        self.found.extend(allocation.hear(known.lines, self.now()))
        self.found.extend(allocation.release(float("inf")))
        allocation.unlisted = True
        self.end(allocation, None)

    # Ending.

    def end(self, allocation: Allocation, error: MlhpcError | None) -> None:
        """Let it end by *error*; None: by itself."""
        for message in allocation.conversation.finish() if error is None else []:
            self.found.append(LineArrived(allocation.handle, message))
        if error is None and not allocation.unlisted:
            told.write(allocation.handle.directory, allocation.nodes, b"".join(allocation.lines))
        allocation.error = error
        allocation.phase, allocation.since, allocation.try_at = Phase.ENDING, self.now(), 0.0
        allocation.stop_following()

    def _finish(self, allocation: Allocation, now: float) -> None:
        """Have the objects deleted, then tell the end; the ledger forgets an allocation then."""
        if now < allocation.try_at:
            return
        trouble: MlhpcError | None = None
        try:
            if allocation.unborn or allocation.unlisted:  # an answer may have been lost
                self.leaving.find_all(allocation)
        except KubernetesError as error:
            trouble = error
        kept = keeps(allocation)
        trouble = trouble or try_to_end(allocation, now)
        if trouble is not None and now - allocation.since < DELETE_LIMIT_S:
            allocation.try_at = now + PAUSE_S
            return
        self.found.append(AllocationEnded(allocation.handle, allocation.error, trouble is not None))
        del self.allocations[allocation.handle.id]
        self.leaving.add(allocation)
        if kept or trouble is not None:
            self.leaving.forget(allocation)

    # Beginning.

    def start(self, allocation: Allocation) -> None:
        """Have its manifests created from now on, and watch what comes of it.

        Raises:
            ProvisionError: there are none.
        """
        placed = self.placer.place(allocation)
        allocation.kind = placed.kind
        allocation.unborn = list(placed.manifests)
        allocation.phase = Phase.CREATING
        self.watch(allocation)

    def watch(self, allocation: Allocation) -> None:
        """Have the cluster tell of it."""
        allocation.sources = self.clusters.watch(allocation.settings, allocation.kind, self.intake.queue.put)

    def create(self, allocation: Allocation) -> None:
        """Create what is missing of it, unless that is to be tried later.

        Raises:
            ProvisionError: refused.
        """
        if self.now() < allocation.try_at:
            return
        try:
            self.creator.create(allocation)
        except KubernetesError as error:
            raise refused(error) from error
        if allocation.phase is Phase.FOLLOWED:
            first = next(iter(allocation.workloads.values()))
            native = f"{first.namespace}/{first.resource.plural}/{first.name}"
            allocation.handle = replace(allocation.handle, native_id=native)
            self.intake.claim(allocation)
            self.found.append(StateChanged(allocation.handle, JobState.QUEUED, native_id=native))
        elif allocation.waits_for:
            self.found.append(StateChanged(allocation.handle, JobState.QUEUED, allocation.waits_for))
