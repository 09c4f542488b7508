"""What is due for one allocation, by comparing what it should be with what the cluster has: create, follow, provision again, delete.

Open it to follow an allocation from its plan to its end, or if something is left in the cluster. Results are events.
"""

from __future__ import annotations

import contextlib
import time
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from pytest_mlhpc.config.model import Partition
from pytest_mlhpc.errors import MlhpcError, ProvisionError
from pytest_mlhpc.jobs.ledger_entry import user_name
from pytest_mlhpc.jobs.provisioner import AllocationEnded, Event, LineArrived, StateChanged
from pytest_mlhpc.jobs.spec import JobState
from pytest_mlhpc.provision.kubernetes.allocation import Phase, PodAllocation
from pytest_mlhpc.provision.kubernetes.causes import Stage
from pytest_mlhpc.provision.kubernetes.creation import (
    create_objects,
    note_unfit,
    render_objects,
    unfit_messages,
)
from pytest_mlhpc.provision.kubernetes.errors import KubernetesError, NotFound, Unavailable, provision_error
from pytest_mlhpc.provision.kubernetes.event_router import WAKE, EventRouter
from pytest_mlhpc.provision.kubernetes.log_parser import SavedOutput, save_output
from pytest_mlhpc.provision.kubernetes.objects import (
    JOB,
    KEEP_UNTIL,
    LEADER,
    POD,
    SECRET,
    SERVICE,
    Identity,
    ObjectRef,
)  # fmt: skip
from pytest_mlhpc.provision.kubernetes.reap import find_objects, note_retained
from pytest_mlhpc.provision.kubernetes.settings import WorkloadKind
from pytest_mlhpc.provision.kubernetes.verdict import (
    check_nodes,
    container_messages,
    end_verdict,
    read_events,
    watch_error,
)
from pytest_mlhpc.provision.kubernetes.watch import Clusters

#: How long after a watch has recovered no cause is overdue, in seconds: missed changes are still being reported.
RECOVERY_S: Final = 5.0
#: First and longest delay before a pod without room is provisioned again, in seconds. A kubelet reports its node's state every
#: 10 s (nodeStatusUpdateFrequency).
NO_ROOM_RETRY_S: Final = 10.0
LONGEST_NO_ROOM_RETRY_S: Final = 60.0
#: Delay before the address is published again if the server does not answer, in seconds.
LEADER_RETRY_S: Final = 5.0

#: How long to wait for deleted pods, or for a server to accept deletions, in seconds: a kubelet takes about ten seconds beyond
#: the grace.
GONE_LIMIT_S: Final = 60.0
#: How long a deletion without an answer is retried before the allocation's end is uncertain, in seconds.
DELETE_LIMIT_S: Final = 90.0
DELETE_RETRY_S: Final = 3.0


class Reconciler:
    """Reconciles the allocations of one provisioner, in its thread.

    ``allocations`` and ``deleting`` are by id: those that run or end, and those that the cluster is deleting. ``events``
    receives the events.

    Args:
        partition: of systems.yaml.
        clusters: clients and watches of the API servers.
        payload: sha256 -> the zip.
        session_id: of this session, for labels.
        now: the provisioner's clock, in seconds.
        wait: returns the next report within that many seconds, or None.
    """

    def __init__(  # noqa: PLR0917 - from what is wanted to how it is had
        self,
        partition: Partition,
        clusters: Clusters,
        payload: Callable[[str], Path],
        session_id: str,
        now: Callable[[], float],
        wait: Callable[[float], object | None],
    ) -> None:
        self.allocations: dict[str, PodAllocation] = {}
        self.deleting: dict[str, PodAllocation] = {}
        self.events: list[Event] = []
        self.router = EventRouter(ChainMap(self.allocations, self.deleting), now)
        self._partition = partition
        self._clusters = clusters
        self._payload = payload
        self._identity = Identity(session=session_id, owner=user_name())
        self._now = now
        self._wait = wait

    def reconcile(self, allocation: PodAllocation) -> None:
        """Do what is due for one allocation."""
        try:
            if allocation.phase is Phase.FINDING:
                self._find_adopted(allocation)
            if allocation.phase is Phase.CREATING:
                self.create(allocation)
            if allocation.phase is Phase.FOLLOWED:
                self._follow(allocation)
        except ProvisionError as error:
            self.end(allocation, error)
        except KubernetesError as error:
            self.end(allocation, provision_error(error))
        if allocation.phase is Phase.ENDING:
            self._delete_and_report(allocation, self._now())

    def start(self, allocation: PodAllocation) -> None:
        """Render the manifests, and watch the cluster.

        Raises:
            ProvisionError: they cannot be rendered.
        """
        render_objects(allocation, self._partition, self._payload, self._identity)
        self.watch(allocation)

    def watch(self, allocation: PodAllocation) -> None:
        """Watch the allocation's kinds."""
        allocation.sources = self._clusters.watch(allocation.settings, allocation.kind, self.router.queue.put)

    def create(self, allocation: PodAllocation) -> None:
        """Create the missing objects, unless it is too early for a retry.

        Raises:
            ProvisionError: refused.
        """
        now = self._now()
        if now < allocation.retry_at:
            return
        create_objects(allocation, now)
        if allocation.phase is Phase.FOLLOWED:
            first = next(iter(allocation.workloads.values()))
            native = f"{first.namespace}/{first.resource.plural}/{first.name}"
            allocation.handle = replace(allocation.handle, native_id=native)
            self.router.claim(allocation)
            self.events.append(StateChanged(allocation.handle, JobState.QUEUED, native_id=native))
        elif allocation.waiting_text:
            self.events.append(StateChanged(allocation.handle, JobState.QUEUED, allocation.waiting_text))

    def _find_adopted(self, allocation: PodAllocation) -> None:
        """Continue an adopted allocation once the cluster has listed its objects.

        Raises:
            ProvisionError: it is gone.
            KubernetesError: the list was refused.
        """
        now = self._now()
        silence = self.router.silence(allocation)
        if silence is not None and (error := watch_error(allocation, now, silence)) is not None:
            raise error
        if now < allocation.retry_at or not allocation.sources <= self.router.synced:
            return
        try:
            self._list_objects(allocation)
        except Unavailable:
            allocation.retry_at = now + DELETE_RETRY_S
            return
        expected = allocation.plan.nodes + allocation.plan.spares if allocation.kind.each_pod else 1
        if len(allocation.workloads) >= expected:
            allocation.phase = Phase.CREATING  # all were created, but their owners may not be set
        elif allocation.handle.native_id:
            where = f"{allocation.api.server} has no {allocation.handle.native_id} any more"
            raise ProvisionError("cancelled_outside", f"{where}: it was deleted, or its time was over")
        elif allocation.workloads:  # some of its pods, which do nothing without the others
            self._provision_again(allocation, ())
        else:
            self.start(allocation)

    def _follow(self, allocation: PodAllocation) -> None:
        """Report the state of a created allocation, and end it on a verdict.

        Raises:
            ProvisionError: it cannot be provisioned again.
            KubernetesError: its pods' annotations are refused.
        """
        now = self._now()
        silence = self.router.silence(allocation)
        self.events += allocation.release_deferred(now)
        if not allocation.settings.agent:
            for message in container_messages(allocation, now):
                self.events += allocation.take_message(message, now)
        if silence is None:
            publish_leader_address(allocation, now)
            read_events(allocation, now)
            check_nodes(allocation)
        self.events += allocation.state()
        allocation.patience.update(allocation.causes(), now)
        recovering = silence is None and now - self.router.recovered_at < RECOVERY_S
        if recovering and not allocation.conversation.complete:
            return
        verdict = end_verdict(allocation, now, silence)
        if verdict.unfit_nodes:
            if self._provision_again(allocation, verdict.unfit_nodes):
                return
            note_unfit(allocation)
            self.report_unfit(allocation)
        if verdict.crowded and self._provision_when_room(allocation, now):
            return
        if verdict.ended:
            self.end(allocation, verdict.error)

    def _provision_again(self, allocation: PodAllocation, unfit: Sequence[str]) -> bool:
        """Provision again without *unfit*, unless that was done too often; return whether it is under way.

        Raises:
            ProvisionError: it is refused.
        """
        if unfit and allocation.round >= allocation.settings.reprovision:
            return False
        if self._now() < allocation.retry_at:
            return True
        try:
            delete_objects(allocation, grace_s=0)
        except KubernetesError:
            allocation.retry_at = self._now() + DELETE_RETRY_S
            return True
        note_unfit(allocation)
        self.report_unfit(allocation)
        self.router.forget(allocation)
        allocation.start_round(unfit, self._now())
        self.start(allocation)
        return True

    def _provision_when_room(self, allocation: PodAllocation, now: float) -> bool:
        """Provision again after a kubelet had no room, unless that was done too often; return whether it is under way.

        Raises:
            ProvisionError: it is refused.
        """
        if allocation.round >= allocation.settings.reprovision:
            return False
        if allocation.crowded_at is None:
            allocation.crowded_at = now
        pause = min(LONGEST_NO_ROOM_RETRY_S, NO_ROOM_RETRY_S * 3**allocation.round)
        return now - allocation.crowded_at < pause or self._provision_again(allocation, ())

    def report_unfit(self, allocation: PodAllocation) -> None:
        """Report to each run the nodes that probes found unfit; their records name them."""
        self.events += [LineArrived(allocation.handle, one) for one in unfit_messages(allocation.plan)]

    def replay_output(self, allocation: PodAllocation, saved: SavedOutput) -> None:
        """Report the saved output of an ended allocation, and delete the rest of its objects."""
        self.events.append(StateChanged(allocation.handle, JobState.RUNNING, nodes=saved.nodes))
        self.events += allocation.take_lines(saved.lines, self._now())
        self.events += allocation.release_deferred(float("inf"))
        allocation.unlisted = True
        self.end(allocation, None)

    def end(self, allocation: PodAllocation, error: MlhpcError | None) -> None:
        """Start the end with *error*; None: all runs are reported."""
        if error is None:
            self.events += [LineArrived(allocation.handle, one) for one in allocation.conversation.finish()]
            if not allocation.unlisted:
                save_output(allocation.handle.directory, allocation.nodes, b"".join(allocation.lines))
        allocation.error = error
        allocation.phase, allocation.since, allocation.retry_at = Phase.ENDING, self._now(), 0.0
        allocation.stop_following()

    def _delete_and_report(self, allocation: PodAllocation, now: float) -> None:
        """Delete or retain the objects, then report the end; after that the ledger forgets the allocation."""
        if now < allocation.retry_at:
            return
        failure: MlhpcError | None = None
        try:
            if allocation.to_create or allocation.unlisted:  # an answer may have been lost
                self._list_objects(allocation)
        except KubernetesError as error:
            failure = error
        retained = is_retained(allocation)
        failure = failure or delete_or_retain(allocation, now)
        if failure is not None and now - allocation.since < DELETE_LIMIT_S:
            allocation.retry_at = now + DELETE_RETRY_S
            return
        self.events.append(AllocationEnded(allocation.handle, allocation.error, failure is not None))
        self.deleting[allocation.handle.id] = self.allocations.pop(allocation.handle.id)
        if retained or failure is not None:
            self._forget(allocation)

    def _forget(self, allocation: PodAllocation) -> None:
        """Forget an allocation, and stop reading its logs."""
        allocation.stop_following()
        self.deleting.pop(allocation.handle.id, None)
        self.router.forget(allocation)

    def remove_finished(self) -> None:
        """Forget the deleted allocations of which no pod is left."""
        for allocation in [one for one in self.deleting.values() if one.all_deleted]:
            self._forget(allocation)

    def _list_objects(self, allocation: PodAllocation) -> None:
        """List the objects of *allocation*, including those of creations without an answer.

        Raises:
            KubernetesError: the list failed.
        """
        # An allocation without a Service needs no right on Services.
        others = (SECRET, SERVICE) if allocation.settings.service else (SECRET,)
        kinds = (allocation.kind.resource, *others)
        listed = find_objects(allocation.api, kinds, allocation.handle.id, allocation.namespace)
        found = [ref for ref, _ in listed]
        allocation.add_objects(found)
        for ref in found:
            if ref.resource == allocation.kind.resource:
                allocation.workloads[ref.name] = ref
                allocation.deleted_workloads.discard(ref.name)
        self.router.claim(allocation)

    def delete_all(self, allocation: PodAllocation) -> KubernetesError | None:
        """List and delete all objects of *allocation*; return the error if the server does not accept it."""
        allocation.phase = Phase.ENDING
        try:
            self._list_objects(allocation)
            delete_objects(allocation, grace_s=round(allocation.settings.grace_s))
        except KubernetesError as error:
            return error
        return None

    def delete_and_wait(self, allocations: Iterable[PodAllocation]) -> list[PodAllocation]:
        """Delete *allocations* and wait until they are gone; return those of which that is not certain."""
        todo = list(allocations)
        self.deleting |= {one.handle.id: one for one in todo}
        asked: list[PodAllocation] = []
        unsure: list[PodAllocation] = []
        deadline = self._now() + GONE_LIMIT_S
        while todo:
            silent: set[str] = set()
            later = []
            for one in todo:
                # A server that does not answer is called once in a round.
                error = None if one.api.server in silent else self.delete_all(one)
                if one.api.server in silent or isinstance(error, Unavailable):
                    silent.add(one.api.server)
                    later.append(one)
                else:
                    (asked if error is None else unsure).append(one)
            todo = later
            if todo and self._now() >= deadline:
                break
            if todo:
                self._route_until(min(self._now() + DELETE_RETRY_S, deadline), lambda: False)
        # A creation without an answer may still take effect.
        in_doubt = [one for one in asked if one.failed_creations]
        left = self._await_deleted([one for one in asked if one not in in_doubt], deadline)
        uncertain = [*todo, *unsure, *in_doubt, *left]
        for one in uncertain:
            self._forget(one)
        return uncertain

    def _await_deleted(self, allocations: list[PodAllocation], deadline: float) -> list[PodAllocation]:
        """Wait until no pod of *allocations* is left; return those that have some at *deadline*."""
        self._route_until(deadline, lambda: all(one.all_deleted for one in allocations))
        self.remove_finished()
        return [one for one in allocations if not one.all_deleted]

    def close(self) -> None:
        """Wait for pending deletions whose server answers; then stop the threads that read logs."""
        try:
            watched = [one for one in self.deleting.values() if self.router.silence(one) is None]
            self._await_deleted(watched, self._now() + GONE_LIMIT_S)
        finally:
            for allocation in [*self.deleting.values(), *self.allocations.values()]:
                allocation.stop_following()

    def _route_until(self, until: float, enough: Callable[[], bool]) -> None:
        """Route reports until *until*, or until *enough*."""
        while not enough() and (remaining := until - self._now()) > 0:
            report = self._wait(remaining)
            if report is not None and report is not WAKE:
                self.events += self.router.route(report)


def publish_leader_address(allocation: PodAllocation, now: float) -> None:
    """Write rank 0's address on the other pods as an annotation, which needs neither DNS nor a Service.

    Without an answer it is retried later.

    Raises:
        KubernetesError: the server refuses.
    """
    first, settings = allocation.rank0, allocation.settings
    if now < allocation.leader_retry_at or not settings.agent:
        return
    if allocation.plan.nodes < 2 or settings.service or first is None or not first.view.address:
        return
    for pod in allocation.running_pods:
        if pod is first or pod.has_leader:
            continue
        try:
            allocation.api.patch(pod.ref, {"metadata": {"annotations": {LEADER: first.view.address}}})
        except NotFound:
            continue  # the watch reports its end
        except Unavailable:
            allocation.leader_retry_at = now + LEADER_RETRY_S
            return
        pod.has_leader = True


def is_retained(allocation: PodAllocation) -> bool:
    """Return whether the objects of *allocation* stay for inspection (``keep``)."""
    keep = allocation.settings.keep
    return keep == "always" or (keep == "on-failure" and (allocation.failed or allocation.error is not None))


def delete_or_retain(allocation: PodAllocation, now: float) -> MlhpcError | None:
    """Delete or retain the objects of *allocation*; return why that is not done (yet), None if it is.

    A retained allocation whose runs have all ended gets its grace to end by itself, which leaves more to inspect.
    """
    try:
        if is_retained(allocation):
            ends = allocation.conversation.complete and now - allocation.since < allocation.settings.grace_s
            if ends and (running := allocation.running_pods):
                return MlhpcError(f"{', '.join(pod.ref.name for pod in running)} will end by itself")
            # Without a note no later session would delete it.
            with contextlib.suppress(OSError):
                retain_objects(allocation)
                return None
        delete_objects(allocation)
    except KubernetesError as error:
        return error
    return None


def delete_objects(allocation: PodAllocation, grace_s: int | None = None) -> None:
    """Request the deletion of all objects of *allocation*. When this returns, the cluster has accepted it.

    The workload comes first, as its controller would replace deleted pods.

    Raises:
        KubernetesError: a deletion was not accepted; ``allocation.objects`` has the rest.
    """
    order = sorted(allocation.objects, key=lambda ref: ref.name not in allocation.workloads)
    if not allocation.workloads:  # else they are deleted with their owner
        order += [pod.ref for pod in allocation.pods.values() if not pod.deleted and pod.ref not in order]
    first_error: KubernetesError | None = None
    for ref in order:
        # A workload that is deleted in the foreground exists until its pods are gone.
        is_workload = ref.name in allocation.workloads
        try:
            allocation.api.delete(
                ref, grace_s=grace_s, propagation="Foreground" if is_workload else "Background"
            )
        except KubernetesError as error:  # the other objects may still be deleted
            first_error = first_error or error
        else:
            allocation.objects = [one for one in allocation.objects if one != ref]
    if first_error is not None:
        raise first_error
    for ref, grace in _dependants(allocation, grace_s):
        with contextlib.suppress(KubernetesError):  # then it is deleted with its owner, later
            allocation.api.delete(ref, grace_s=grace)
    allocation.owned = []


def _dependants(allocation: PodAllocation, grace_s: int | None) -> Iterator[tuple[ObjectRef, int | None]]:
    """Yield what the garbage collector would delete, but perhaps late, and the grace that it gets.

    The collector pauses for a minute and more after kinds were added or removed. Pods in which nothing has started need no
    grace, and a kubelet that waits for a volume would retain them for minutes. A Job that is being deleted replaces no
    pods (Kubernetes, job controller); other kinds might.
    """
    yield from ((ref, None) for ref in allocation.owned)
    for pod in allocation.running_pods:
        stuck = pod.view.cause is not None or allocation.event_cause is not None
        if stuck and pod.view.stage is Stage.PREPARING and pod.ref.name not in allocation.workloads:
            yield pod.ref, 0
        elif allocation.kind.resource == JOB:
            yield pod.ref, grace_s


def retain_objects(allocation: PodAllocation, now_s: Callable[[], float] = time.time) -> None:
    """Stop the pods and retain the objects for inspection, until ``keep_for`` has passed. No device stays in use.

    Raises:
        KubernetesError: the server did not accept it.
        OSError: the note cannot be written.
    """
    until = int(now_s() + allocation.settings.keep_for_s)
    note_retained(allocation.handle.directory, until)
    running = allocation.running_pods
    over = bool(allocation.pods) and not running
    for ref in list(allocation.objects):
        body: dict[str, Any] = {"metadata": {"annotations": {KEEP_UNTIL: str(until)}}}
        if not over and ref.name in allocation.workloads and ref.resource != POD:
            quiet = _suspend_patch(allocation.kind)
            if quiet is None:  # it would replace each deleted pod
                allocation.api.delete(ref)
                continue
            body.update(quiet)
        allocation.api.patch(ref, body)
    for pod in running:
        allocation.api.delete(pod.ref)
    allocation.objects = []


def _suspend_patch(kind: WorkloadKind) -> dict[str, Any] | None:
    """Return the patch that stops a workload's pods; None: its kind cannot be stopped."""
    if kind.resource == JOB:
        return {"spec": {"parallelism": 0}}
    body: Any = True
    for part in reversed(kind.suspend):
        body = {part: body}
    return body if kind.suspend else None
