"""Provisioner `kubernetes`: one workload object for each allocation, followed by watches and by the logs of its pods."""

from __future__ import annotations

import contextlib
import queue
from collections import ChainMap
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from pytest_mlhpc.batch.plan import HELD, Plan
from pytest_mlhpc.errors import MlhpcError, ProvisionError
from pytest_mlhpc.jobs.spec import JobSpec, JobState
from pytest_mlhpc.provision.base import AllocationEnded, Event, Handle, LineArrived, StateChanged
from pytest_mlhpc.provision.conversation import Conversation
from pytest_mlhpc.provision.kubernetes import verdicts
from pytest_mlhpc.provision.kubernetes.allocation import Allocation, Phase
from pytest_mlhpc.provision.kubernetes.clusters import Clusters
from pytest_mlhpc.provision.kubernetes.creating import Creator
from pytest_mlhpc.provision.kubernetes.ending import DELETE_LIMIT_S, PAUSE_S, delete, try_to_end
from pytest_mlhpc.provision.kubernetes.errors import KubernetesError
from pytest_mlhpc.provision.kubernetes.inquiry import Inquirer
from pytest_mlhpc.provision.kubernetes.intake import Intake
from pytest_mlhpc.provision.kubernetes.kinds import kind_of
from pytest_mlhpc.provision.kubernetes.leading import tell_leader
from pytest_mlhpc.provision.kubernetes.options import settings_of
from pytest_mlhpc.provision.kubernetes.patience import Patience
from pytest_mlhpc.provision.kubernetes.placing import Placed, Placer
from pytest_mlhpc.provision.slurm.provisioner import Clock
from pytest_mlhpc.system.model import Partition

#: Longest time between two looks at limits while nothing is heard, in seconds. Nothing is asked of the server then.
LOOK_S: Final = 1.0

#: How long :meth:`cancel` and :meth:`close` wait until pods are gone: a kubelet takes some ten seconds beyond the grace.
GONE_LIMIT_S: Final = 60.0

_WAKE: Final = object()


class KubernetesProvisioner:
    """Runs plans in pods. They outlive this object: :meth:`cancel` ends them, :meth:`adopt` takes them over.

    Args:
        partition: what systems.yaml says of it.
        clusters: how the API servers are reached.
        payload: sha256 -> the zip.
        session_id: of this session, for labels.
    """

    def __init__(
        self,
        partition: Partition,
        clusters: Clusters,
        payload: Callable[[str], Path],
        session_id: str,
        clock: Clock | None = None,
    ) -> None:
        self._partition = partition
        self._clusters = clusters
        self._placer = Placer(partition, payload, session_id)
        self._clock = clock or Clock()
        self._allocations: dict[str, Allocation] = {}
        self._leaving: dict[str, Allocation] = {}  #: their end was told, the cluster is deleting them
        self._found: list[Event] = []
        self._intake = Intake(ChainMap(self._allocations, self._leaving), self._now)
        self._creator = Creator(self._now)
        self._inquirer = Inquirer(self._now)
        self._closed = False

    def _now(self) -> float:
        return self._clock.monotonic()

    # The protocol.

    def validate(self, spec: JobSpec) -> str:
        """Return why *spec* can never run here, or an empty string."""
        if spec.workload == HELD:
            return "the fixture `allocation` needs a folder that nodes and pytest share; pods have none, use Slurm for it"
        node = self._partition.nodes
        if spec.nodes > node.max:
            return f"{spec.nodes} nodes are wanted, {self._partition.id} gives {node.max} (nodes: max)"
        each = -(-spec.ranks // spec.nodes)
        if node.devices and each > node.devices:
            return f"{each} devices a node are wanted, a node of {self._partition.id} has {node.devices}"
        longest = self.longest()
        if longest is not None and spec.time_limit_s > longest:
            return f"{spec.time_limit_s:.0f} s are wanted, {self._partition.id} gives {longest:.0f} s (kubernetes: max_time)"
        return ""

    def longest(self) -> float | None:
        """Return the longest allocation that systems.yaml gives, in seconds; None: any."""
        return settings_of(self._partition).max_time_s

    def submit(self, plan: Plan) -> Handle:
        """Create the objects of *plan*; where the server does not answer, that is tried again later.

        Raises:
            ProvisionError: refused in the server's own words, or ``disk_full``; nothing is left of it.
        """
        allocation = self._allocation(plan, "")
        self._start(allocation, self._placer.place(allocation))
        self._allocations[plan.allocation_id] = allocation
        try:
            self._create(allocation)
        except ProvisionError as error:
            del self._allocations[plan.allocation_id]
            self._undo(allocation)
            raise error from None
        return allocation.handle

    def adopt(self, plan: Plan, native_id: str) -> Handle:
        """Take over the pods of an earlier session; their logs are read again from the beginning."""
        allocation = self._allocation(plan, native_id)
        allocation.phase = Phase.FINDING
        self._allocations[plan.allocation_id] = allocation
        self._watch(allocation)
        self._intake.claim(allocation)
        return allocation.handle

    def events(self, handles: Sequence[Handle], timeout_s: float) -> list[Event]:  # noqa: ARG002 - all are ours
        """Return what happened, waiting at most *timeout_s* if nothing did or until :meth:`wake`."""
        until = self._now() + timeout_s
        while True:
            for allocation in list(self._allocations.values()):
                self._attend(allocation)
            now = self._now()
            if self._found or now >= until:
                return self._take()
            report = self._wait(min(until - now, self._next_look(now)))
            if report is _WAKE:
                return self._take()
            if report is not None:
                self._found += self._intake.take(report)

    def wake(self) -> None:
        """Make a waiting :meth:`events` return at once; the only call for other threads."""
        self._intake.queue.put(_WAKE)

    def skip(self, handle: Handle, run_ids: Sequence[str]) -> None:
        """Nothing can be told to pods; a run that nobody wants is made for nothing, and its result is not looked at."""

    def cancel(self, handles: Sequence[Handle]) -> list[Handle]:
        """Delete everything of *handles* and wait until their pods are gone; return those of which that is not sure."""
        ours = [self._allocations.pop(handle.id) for handle in handles if handle.id in self._allocations]
        ours += [self._leaving[handle.id] for handle in handles if handle.id in self._leaving]
        wanted = {handle.id for handle in handles}
        self._found = [event for event in self._found if event.handle.id not in wanted]
        self._leaving.update({one.handle.id: one for one in ours})
        unsure = [one for one in ours if not self._undo(one)]
        left = self._await_gone([one for one in ours if one not in unsure])
        return [one.handle for one in (*unsure, *left)]

    def close(self) -> None:
        """Wait a while until what was deleted is gone, and give back threads and connections; the rest goes on."""
        if self._closed:
            return
        self._await_gone(list(self._leaving.values()))
        self._closed = True
        for allocation in (*self._allocations.values(), *self._leaving.values()):
            allocation.stop_following()
        self._clusters.close()

    # Beginning.

    def _allocation(self, plan: Plan, native_id: str) -> Allocation:
        settings = settings_of(self._partition, plan.scheduler_options)
        api = self._clusters.reach(settings)
        directory = Path(plan.directory)
        return Allocation(
            handle=Handle(plan.allocation_id, directory, native_id),
            plan=plan,
            settings=settings,
            api=api,
            kind=kind_of(settings),
            namespace=settings.namespace or api.namespace,
            conversation=Conversation(plan, directory / "pods"),
            patience=Patience(settings.patience),
            since=self._now(),
        )

    def _start(self, allocation: Allocation, placed: Placed) -> None:
        allocation.kind = placed.kind
        allocation.unborn = list(placed.manifests)
        allocation.phase = Phase.CREATING
        self._watch(allocation)

    def _watch(self, allocation: Allocation) -> None:
        self._clusters.watch(allocation.settings, allocation.kind, self._intake.queue.put)

    def _create(self, allocation: Allocation) -> None:
        if self._now() < allocation.try_at:
            return
        self._creator.create(allocation)
        if allocation.phase is Phase.FOLLOWED:
            first = next(iter(allocation.workloads.values()))
            native = f"{first.namespace}/{first.resource.plural}/{first.name}"
            allocation.handle = replace(allocation.handle, native_id=native)
            self._intake.claim(allocation)
            self._found.append(StateChanged(allocation.handle, JobState.QUEUED, native_id=native))
        elif allocation.waits_for:
            self._found.append(StateChanged(allocation.handle, JobState.QUEUED, allocation.waits_for))

    # Attending.

    def _wait(self, seconds: float) -> object | None:
        with contextlib.suppress(queue.Empty):
            report: object = self._intake.queue.get(timeout=max(0.0, seconds))
            return report
        return None

    def _next_look(self, now: float) -> float:
        looks = [LOOK_S]
        for allocation in self._allocations.values():
            if allocation.phase in (Phase.CREATING, Phase.ENDING):
                looks.append(allocation.try_at - now)
            due = allocation.patience.next_look()
            looks += [due - now] if due is not None else []
        return max(0.0, min(looks))

    def _take(self) -> list[Event]:
        found, self._found = self._found, []
        return found

    def _attend(self, allocation: Allocation) -> None:
        """Do what is due for one allocation."""
        now = self._now()
        try:
            if allocation.phase is Phase.FINDING:
                self._find(allocation)
            if allocation.phase is Phase.CREATING:
                self._create(allocation)
        except ProvisionError as error:
            self._end(allocation, error)
        if allocation.phase is Phase.FOLLOWED:
            self._found += allocation.release(now)
            tell_leader(allocation)
            self._inquirer.ask(allocation)
            self._found += allocation.state()
            allocation.patience.note(allocation.causes(), now)
            verdict = verdicts.judge(allocation, now, self._intake.trouble)
            if verdict.unfit_nodes and self._once_more(allocation, verdict.unfit_nodes):
                return
            if verdict.ended:
                self._end(allocation, verdict.error)
        if allocation.phase is Phase.ENDING:
            self._finish(allocation, now)

    def _find(self, allocation: Allocation) -> None:
        """Go on with an adopted allocation once the cluster has listed what it has."""
        if allocation.pods or allocation.workloads:
            allocation.phase = Phase.FOLLOWED
            allocation.note(list(allocation.workloads.values()))
        elif self._clusters.synced(allocation.settings, allocation.kind, self._intake.synced):
            if allocation.handle.native_id:
                where = f"{allocation.api.server} has no {allocation.handle.native_id} any more"
                raise ProvisionError(
                    "cancelled_outside", f"{where}: somebody deleted it, or its time was over"
                )
            self._start(allocation, self._placer.place(allocation))

    def _once_more(self, allocation: Allocation, unfit: Sequence[str]) -> bool:
        """Provision again without *unfit*, if that was not done too often; return whether it is under way."""
        if allocation.round >= allocation.settings.reprovision:
            return False
        try:
            delete(allocation, grace_s=0)
        except KubernetesError:
            return True  # tried again at the next look
        allocation.begin_again(unfit)
        self._start(allocation, self._placer.place(allocation))
        return True

    # Ending.

    def _end(self, allocation: Allocation, error: MlhpcError | None) -> None:
        for message in allocation.conversation.finish() if error is None else []:
            self._found.append(LineArrived(allocation.handle, message))
        allocation.error = error
        allocation.phase, allocation.since, allocation.try_at = Phase.ENDING, self._now(), 0.0

    def _finish(self, allocation: Allocation, now: float) -> None:
        """Have the objects deleted, then tell the end; the ledger forgets an allocation then."""
        if now < allocation.try_at:
            return
        trouble = try_to_end(allocation)
        unsure = trouble is not None and now - allocation.since >= DELETE_LIMIT_S
        if trouble is not None and not unsure:
            allocation.try_at = now + PAUSE_S
            return
        self._found.append(AllocationEnded(allocation.handle, allocation.error, unsure))
        self._leaving[allocation.handle.id] = self._allocations.pop(allocation.handle.id)

    def _undo(self, allocation: Allocation) -> bool:
        """Delete whatever there may be of *allocation*; return whether the server has taken that."""
        try:
            allocation.note(self._clusters.objects_of(allocation))
            delete(allocation, grace_s=round(allocation.settings.grace_s))
        except KubernetesError:
            return False
        return True

    def _await_gone(self, allocations: list[Allocation]) -> list[Allocation]:
        """Wait until no pod of *allocations* is left; return those that have some after GONE_LIMIT_S."""
        deadline = self._now() + GONE_LIMIT_S
        while left := [one for one in allocations if not one.all_gone]:
            remaining = deadline - self._now()
            report = self._wait(remaining) if remaining > 0 else None
            if report is None:
                break
            if report is not _WAKE:
                self._found += self._intake.take(report)
        for one in allocations:
            if one not in left:
                one.stop_following()
                self._leaving.pop(one.handle.id, None)
        return left
