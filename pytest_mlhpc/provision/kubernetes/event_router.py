"""Route the reports of watches and log followers to the allocation that they concern.

Open it when an object or log line reaches no allocation, or the wrong one.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from pytest_mlhpc.jobs.provisioner import Event
from pytest_mlhpc.provision.kubernetes.allocation import Phase, PodAllocation, PodRecord, WatchSilence
from pytest_mlhpc.provision.kubernetes.causes import PodView, Stage, pod_view
from pytest_mlhpc.provision.kubernetes.errors import Unavailable
from pytest_mlhpc.provision.kubernetes.log_follower import LogEnded, LogFailing, LogFollower, LogLine
from pytest_mlhpc.provision.kubernetes.log_parser import AgentOutput, ContainerOutput
from pytest_mlhpc.provision.kubernetes.objects import (
    ALLOCATION,
    POD,
    JsonObject,
    ObjectRef,
    Resource,
    metadata_of,
    object_ref,
)
from pytest_mlhpc.provision.kubernetes.watch import (
    ListSynced,
    ObjectChanged,
    ObjectDeleted,
    WatchFailing,
    WatchRecovered,
)

#: Most reports routed in one call, as the provisioner has other work.
MAX_REPORTS: Final = 5000

#: Length of the queue at which log followers block, so that lines wait at the kubelet, and for how long at most, in seconds.
#: The limit lets followers end even if the provisioner hangs.
MAX_QUEUED: Final = 20_000
QUEUE_WAIT_S: Final = 1.0

#: Queued to wake a waiting provisioner.
WAKE: Final = object()


class EventRouter:
    """Routes reports. ``failing`` holds the failing watches; ``recovered_at`` is when one last worked again.

    Args:
        allocations: by id, including those that the cluster is deleting.
        now: the provisioner's clock, in seconds.
    """

    def __init__(self, allocations: Mapping[str, PodAllocation], now: Callable[[], float]) -> None:
        self.queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.failing: dict[str, WatchSilence] = {}
        self.recovered_at = -1e9
        self.woken = False  #: WAKE was queued
        self.synced: set[str] = set()  #: watches that have listed objects
        #: uid -> object of an allocation that is not known (yet)
        self.unclaimed: dict[str, tuple[Resource, JsonObject]] = {}
        self._allocations = allocations
        self._owners: dict[str, PodAllocation] = {}  #: uid of a pod or workload -> its allocation
        self._now = now
        self._has_room = threading.Event()

    def put_log_report(self, report: object) -> None:
        """Queue a log follower's report; from any thread. Blocks while the queue is full."""
        if self.queue.qsize() >= MAX_QUEUED:
            self._has_room.clear()
            if self.queue.qsize() >= MAX_QUEUED:
                self._has_room.wait(QUEUE_WAIT_S)
        self.queue.put(report)

    def route(self, first: object) -> list[Event]:
        """Route *first* and all queued reports; return the resulting events."""
        events: list[Event] = []
        report = first
        for _ in range(MAX_REPORTS):
            if report is WAKE:
                self.woken = True
                break
            events += self._route_one(report)
            try:
                report = self.queue.get_nowait()
            except queue.Empty:
                break
        if self.queue.qsize() < MAX_QUEUED:
            self._has_room.set()
        return events

    def silence(self, allocation: PodAllocation) -> WatchSilence | None:
        """Return the failing watch of *allocation*, if any; refusals first, as they do not pass by themselves."""
        found = [self.failing[source] for source in allocation.sources if source in self.failing]
        return min(found, key=lambda one: isinstance(one.error, Unavailable), default=None)

    def _route_one(self, report: object) -> Iterable[Event]:
        if isinstance(report, LogLine | LogFailing | LogEnded):
            allocation = self._owners.get(report.ref.uid)
            pod = allocation.pods.get(report.ref.uid) if allocation is not None else None
            if allocation is None or pod is None or pod.log_ended:
                return ()
            return self._log_report(allocation, pod, report)
        if isinstance(report, ObjectChanged):
            return self._object_changed(report)
        if isinstance(report, ObjectDeleted):
            self._object_deleted(report)
        elif isinstance(report, WatchFailing):
            before = self.failing.get(report.source)
            since = before.since if before is not None else self._now()
            self.failing[report.source] = WatchSilence(report.error, since, report.source in self.synced)
        elif isinstance(report, WatchRecovered):
            self.failing.pop(report.source, None)
            self.recovered_at = self._now()
        elif isinstance(report, ListSynced):
            self.synced.add(report.source)
        return ()

    def claim(self, allocation: PodAllocation) -> None:
        """Give an allocation the objects that were reported before it was known."""
        self._owners.update({ref.uid: allocation for ref in allocation.workloads.values()})
        for uid, (resource, content) in list(self.unclaimed.items()):
            if _allocation_of(content) == allocation.handle.id:
                del self.unclaimed[uid]
                self._take_object(allocation, resource, content)

    def forget(self, allocation: PodAllocation) -> None:
        """Forget an allocation of which no more reports come."""
        self._owners = {uid: owner for uid, owner in self._owners.items() if owner is not allocation}

    def _object_changed(self, report: ObjectChanged) -> Iterable[Event]:
        content = report.object
        allocation = self._allocations.get(_allocation_of(content))
        if allocation is None:
            self.unclaimed[content["metadata"]["uid"]] = (report.resource, content)
            return ()
        self._take_object(allocation, report.resource, content)
        if allocation.phase is not Phase.FOLLOWED:
            return ()
        return (*allocation.release_deferred(self._now()), *allocation.state())

    def _take_object(self, allocation: PodAllocation, resource: Resource, content: JsonObject) -> None:
        ref = object_ref(resource, content)
        round_ = allocation.round_of(ref.name)
        if round_ > allocation.round and allocation.phase is Phase.FINDING:
            allocation.round = round_  # an earlier session had reached this round
            allocation.stop_following()
            allocation.pods.clear()
            allocation.workloads.clear()
        if round_ != allocation.round:
            return  # of an earlier round: the cluster is deleting it
        if resource == POD:
            self._take_pod(allocation, ref, content)
        if resource == allocation.kind.resource:
            self._owners[ref.uid] = allocation
            allocation.workloads.setdefault(ref.name, ref)
            if allocation.phase is not Phase.ENDING:
                allocation.add_objects([ref])
            allocation.status = allocation.kind.status_of(content)

    def _take_pod(self, allocation: PodAllocation, ref: ObjectRef, content: JsonObject) -> None:
        view = pod_view(content, allocation.kind.container)
        record = allocation.pods.get(ref.uid)
        if record is None:
            record = self._add_pod(allocation, ref, content, view)
        record.update(view)
        if view.started and record.follower is None and not record.log_ended:
            self._follow(allocation, record)
        if record.follower is not None and view.stage is Stage.ENDED:
            record.follower.ended()

    def _add_pod(
        self, allocation: PodAllocation, ref: ObjectRef, content: JsonObject, view: PodView
    ) -> PodRecord:
        """Add a pod. If a controller has replaced one, only the first one counts, so that no run is done twice."""
        rank = allocation.kind.rank_of(content)
        born = str(content["metadata"].get("creationTimestamp") or "")
        plan, agent = allocation.plan, allocation.settings.agent
        output = AgentOutput(plan, ref.name) if agent else ContainerOutput(plan, rank or 0)
        record = PodRecord(ref, rank, view, output, born)
        self._owners[ref.uid] = allocation
        single = allocation.plan.nodes + allocation.plan.spares == 1
        known = (rank is not None or single) and not allocation.kind.each_pod  # bare pods have no controller
        twin = next((pod for pod in allocation.pods.values() if known and pod.rank == rank), None)
        allocation.pods[ref.uid] = record
        if twin is not None:
            allocation.replaced = True
            later = max((twin, record), key=lambda pod: pod.created_at)
            later.log_ended = True  # its lines are ignored
            if later.follower is not None:
                later.follower.close()
                later.follower = None
            if later is twin:  # keep the order of creation
                allocation.pods[twin.ref.uid] = allocation.pods.pop(twin.ref.uid)
        return record

    def _object_deleted(self, report: ObjectDeleted) -> None:
        self.unclaimed.pop(report.ref.uid, None)
        allocation = self._owners.get(report.ref.uid)
        if allocation is None:
            return
        if pod := allocation.pods.get(report.ref.uid):  # its last state may explain its end
            pod.update(pod_view(report.object, allocation.kind.container))
            if pod.follower is not None:
                pod.follower.ended()
        if report.resource == allocation.kind.resource and report.ref.name in allocation.workloads:
            allocation.status = allocation.kind.status_of(report.object)
        allocation.mark_deleted(report.ref, self._now())

    def _log_report(
        self, allocation: PodAllocation, pod: PodRecord, report: LogLine | LogFailing | LogEnded
    ) -> Iterable[Event]:
        """Take a line of a pod's log. If lines are missing at its end, it is read once more; else it has ended."""
        if isinstance(report, LogFailing):
            pod.log_error = report.error
            return ()
        if isinstance(report, LogLine):
            pod.log_error, pod.line_at = None, self._now()
            data = pod.stream.feed(report.line)
            return allocation.take_lines(data, self._now()) if data else ()
        if pod.follower is not None:
            pod.follower.close()
        if pod.stream.missing and not pod.reread and not pod.deleted:
            pod.reread = True
            self._follow(allocation, pod)
            return ()
        pod.log_ended, pod.log_complete = True, report.complete and not pod.stream.missing
        pod.log_error = report.error
        data = pod.stream.finish()
        return allocation.take_lines(data, self._now()) if data else ()

    def _follow(self, allocation: PodAllocation, pod: PodRecord) -> None:
        """Follow the log of a pod's agent, into a local file."""
        if allocation.phase is Phase.ENDING:
            return
        container = allocation.kind.container
        pod.follower = LogFollower(
            allocation.api, pod.ref, container, self.put_log_report, path=allocation.log_path(pod)
        )
        pod.follower.start()
        if pod.view.stage is Stage.ENDED or pod.deleted:
            pod.follower.ended()


def _allocation_of(content: JsonObject) -> str:
    labels = metadata_of(content).get("labels") or {}
    return str(labels.get(ALLOCATION, ""))
