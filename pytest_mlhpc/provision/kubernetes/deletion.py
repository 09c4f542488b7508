"""Delete or retain an allocation's objects, and wait until the cluster has none of its pods.

Open it when something is left in the cluster, or a cancellation takes long.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

from pytest_mlhpc.errors import MlhpcError
from pytest_mlhpc.jobs.provisioner import Event
from pytest_mlhpc.provision.kubernetes.allocation import Phase, PodAllocation, PodRecord
from pytest_mlhpc.provision.kubernetes.causes import Stage
from pytest_mlhpc.provision.kubernetes.errors import KubernetesError, Unavailable
from pytest_mlhpc.provision.kubernetes.event_router import WAKE, EventRouter
from pytest_mlhpc.provision.kubernetes.kinds import WorkloadKind
from pytest_mlhpc.provision.kubernetes.objects import JOB, KEEP_UNTIL, POD
from pytest_mlhpc.provision.kubernetes.reap import note_retained
from pytest_mlhpc.provision.kubernetes.watch import Clusters

#: How long to wait for deleted pods, or for a server to accept deletions, in seconds: a kubelet takes about ten seconds beyond
#: the grace.
GONE_LIMIT_S: Final = 60.0

#: How long a deletion without an answer is retried before the allocation's end is uncertain, in seconds.
DELETE_LIMIT_S: Final = 90.0
DELETE_RETRY_S: Final = 3.0


class PendingDeletions:
    """Allocations whose deletion was requested.

    Args:
        allocations: by id; shared with the event router.
        wait: returns the next report within that many seconds, or None.
    """

    def __init__(
        self,
        allocations: dict[str, PodAllocation],
        clusters: Clusters,
        router: EventRouter,
        now: Callable[[], float],
        wait: Callable[[float], object | None],
    ) -> None:
        self._allocations = allocations
        self._clusters = clusters
        self._router = router
        self._now = now
        self._wait = wait

    def add(self, allocation: PodAllocation) -> None:
        """Add an allocation that the cluster was asked to delete."""
        self._allocations[allocation.handle.id] = allocation

    def remove_finished(self) -> None:
        """Forget the allocations of which no pod is left."""
        for allocation in [one for one in self._allocations.values() if one.all_deleted]:
            self.forget(allocation)

    def forget(self, allocation: PodAllocation) -> None:
        """Forget an allocation, and stop reading its logs."""
        allocation.stop_following()
        self._allocations.pop(allocation.handle.id, None)
        self._router.forget(allocation)

    def list_objects(self, allocation: PodAllocation) -> None:
        """List the objects of *allocation*, including those of creations without an answer.

        Raises:
            KubernetesError: the list failed.
        """
        found = self._clusters.objects_of(allocation)
        allocation.add_objects(found)
        for ref in found:
            if ref.resource == allocation.kind.resource:
                allocation.workloads[ref.name] = ref
                allocation.deleted_workloads.discard(ref.name)
        self._router.claim(allocation)

    def delete_all(self, allocation: PodAllocation) -> KubernetesError | None:
        """List and delete all objects of *allocation*; return the error if the server does not accept it."""
        allocation.phase = Phase.ENDING
        try:
            self.list_objects(allocation)
            delete_objects(allocation, grace_s=round(allocation.settings.grace_s))
        except KubernetesError as error:
            return error
        return None

    def delete_and_wait(
        self, allocations: Iterable[PodAllocation], events: list[Event]
    ) -> list[PodAllocation]:
        """Delete *allocations* and wait until they are gone; return those of which that is not certain.

        Events of other allocations are appended to *events*.
        """
        todo = list(allocations)
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
                self._route_until(min(self._now() + DELETE_RETRY_S, deadline), lambda: False, events)
        # A creation without an answer may still take effect.
        in_doubt = [one for one in asked if one.failed_creations]
        left = self.await_deleted([one for one in asked if one not in in_doubt], deadline, events)
        for one in (*todo, *unsure, *in_doubt, *left):
            self.forget(one)
        return [*todo, *unsure, *in_doubt, *left]

    def await_deleted(
        self, allocations: list[PodAllocation], deadline: float, events: list[Event]
    ) -> list[PodAllocation]:
        """Wait until no pod of *allocations* is left; return those that have some at *deadline*."""
        self._route_until(deadline, lambda: all(one.all_deleted for one in allocations), events)
        self.remove_finished()
        return [one for one in allocations if not one.all_deleted]

    def close(self, events: list[Event]) -> None:
        """Wait for the rest, if its server answers; then forget it."""
        watched = [one for one in self._allocations.values() if self._router.silence(one) is None]
        self.await_deleted(watched, self._now() + GONE_LIMIT_S, events)
        for allocation in list(self._allocations.values()):
            self.forget(allocation)

    def _route_until(self, until: float, enough: Callable[[], bool], events: list[Event]) -> None:
        """Route reports until *until*, or until *enough*."""
        while not enough() and (remaining := until - self._now()) > 0:
            report = self._wait(remaining)
            if report is not None and report is not WAKE:
                events += self._router.route(report)


def is_retained(allocation: PodAllocation) -> bool:
    """Return whether the objects of *allocation* stay for inspection (``keep``)."""
    keep = allocation.settings.keep
    return keep == "always" or (keep == "on-failure" and (allocation.failed or allocation.error is not None))


def delete_objects(allocation: PodAllocation, grace_s: int | None = None) -> None:
    """Request the deletion of all objects of *allocation*. When this returns, the cluster has accepted it.

    The workload comes first, as its controller would replace deleted pods.

    Raises:
        KubernetesError: a deletion was not accepted; ``allocation.objects`` has the rest.
    """
    order = sorted(allocation.objects, key=lambda ref: ref.name not in allocation.workloads)
    pods = [pod.ref for pod in allocation.pods.values() if not pod.deleted]
    if not allocation.workloads:  # else they are deleted with their owner
        order += [pod for pod in pods if pod not in order]
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
    _delete_owned(allocation)
    _delete_waiting_pods(allocation)
    _delete_job_pods(allocation, grace_s)


def _delete_owned(allocation: PodAllocation) -> None:
    """Delete what the workloads own: the garbage collector would do so, but perhaps late."""
    for ref in allocation.owned:
        with contextlib.suppress(KubernetesError):  # then they are deleted with their owner, later
            allocation.api.delete(ref)
    allocation.owned = []


def _delete_job_pods(allocation: PodAllocation, grace_s: int | None) -> None:
    """Delete the running pods of a Job: the garbage collector would do so, but perhaps late.

    The collector pauses for a minute and more after kinds were added or removed. A Job that is being deleted replaces no
    pods (Kubernetes, job controller); other kinds might.
    """
    if allocation.kind.resource != JOB:
        return
    for pod in _running_pods(allocation):
        with contextlib.suppress(KubernetesError):  # as above
            allocation.api.delete(pod.ref, grace_s=grace_s)


def _delete_waiting_pods(allocation: PodAllocation) -> None:
    """Delete at once the pods in which nothing has started, as they need no grace.

    A kubelet that waits for a volume would retain them for minutes.
    """
    for pod in allocation.pods.values():
        stuck = pod.view.cause is not None or allocation.event_cause is not None
        waits = pod.view.stage is Stage.PREPARING and not pod.deleted
        if stuck and waits and pod.ref.name not in allocation.workloads:
            with contextlib.suppress(KubernetesError):  # as above
                allocation.api.delete(pod.ref, grace_s=0)


def retain_objects(allocation: PodAllocation, now_s: Callable[[], float] = time.time) -> None:
    """Stop the pods and retain the objects for inspection, until ``keep_for`` has passed. No device stays in use.

    Raises:
        KubernetesError: the server did not accept it.
        OSError: the note cannot be written.
    """
    until = int(now_s() + allocation.settings.keep_for_s)
    note_retained(allocation.handle.directory, until)
    running = _running_pods(allocation)
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


def _running_pods(allocation: PodAllocation) -> list[PodRecord]:
    return [pod for pod in allocation.pods.values() if pod.view.stage is not Stage.ENDED and not pod.deleted]


def _suspend_patch(kind: WorkloadKind) -> dict[str, Any] | None:
    """Return the patch that stops a workload's pods; None: its kind cannot be stopped."""
    if kind.resource == JOB:
        return {"spec": {"parallelism": 0}}
    body: Any = True
    for part in reversed(kind.suspend):
        body = {part: body}
    return body if kind.suspend else None


def delete_or_retain(allocation: PodAllocation, now: float) -> MlhpcError | None:
    """Delete or retain the objects of *allocation*; return why that is not done (yet), None if it is.

    A retained allocation whose runs have all ended gets its grace to end by itself, which leaves more to inspect.
    """
    try:
        if not is_retained(allocation):
            delete_objects(allocation)
            return None
        ends = allocation.conversation.complete and now - allocation.since < allocation.settings.grace_s
        if ends and (running := _running_pods(allocation)):
            return MlhpcError(f"{', '.join(pod.ref.name for pod in running)} will end by itself")
        retain_objects(allocation)
    except KubernetesError as error:
        return error
    except OSError:  # without a note no later session would delete it
        try:
            delete_objects(allocation)
        except KubernetesError as error:
            return error
    return None
