"""What threads report - objects that were seen, lines of logs - goes to the allocation that it concerns."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pytest_mlhpc.provision.base import Event
from pytest_mlhpc.provision.kubernetes import causes
from pytest_mlhpc.provision.kubernetes.allocation import Allocation, Phase, PodRecord
from pytest_mlhpc.provision.kubernetes.errors import KubernetesError, Unavailable
from pytest_mlhpc.provision.kubernetes.labels import ALLOCATION
from pytest_mlhpc.provision.kubernetes.logs import LogEnded, LogFollower, LogLine, LogTrouble
from pytest_mlhpc.provision.kubernetes.podstream import PodStream
from pytest_mlhpc.provision.kubernetes.resources import POD, ObjectRef, Resource
from pytest_mlhpc.provision.kubernetes.watch import Healed, Seen, Synced, Trouble, Vanished

#: Most reports that are taken in one go: the driver has other things to do.
MOST: Final = 5000

#: How many reports may wait before those who read logs wait too, and how long they do so at most, in seconds: then what
#: containers print waits at the kubelet, in their logs. The limit keeps a driver that hangs from holding up their end.
MOST_WAITING: Final = 20_000
ROOM_S: Final = 1.0

#: Put among the reports to wake who waits for them.
WAKE: Final = object()

Object = Mapping[str, Any]


@dataclass(frozen=True)
class Silence:
    """A watch tells nothing. ``since``: the provisioner's clock; ``heard``: it has told something before."""

    error: KubernetesError
    since: float
    heard: bool


class Intake:
    """Takes reports in. ``troubles`` are the watches that tell nothing at the moment, ``healed_at`` when one went on last.

    Args:
        allocations: by id, those that the cluster is still deleting included.
        now: the provisioner's clock, in seconds.
    """

    def __init__(self, allocations: Mapping[str, Allocation], now: Callable[[], float]) -> None:
        self.queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.troubles: dict[str, Silence] = {}
        self.healed_at = -1e9
        self.woken = False  #: somebody wants the driver's attention
        self.synced: set[str] = set()  #: where a first list of objects has come
        self.unclaimed: dict[
            str, tuple[Resource, Object]
        ] = {}  #: by uid, of allocations that nobody knows (yet)
        self._allocations = allocations
        self._owners: dict[str, Allocation] = {}  #: uid of a pod or workload -> whose it is
        self._now = now
        self._room = threading.Event()

    def put_line(self, report: object) -> None:
        """Take a report of one who reads a log; from any thread. Waits while there are too many."""
        if self.queue.qsize() >= MOST_WAITING:
            self._room.clear()
            if self.queue.qsize() >= MOST_WAITING:
                self._room.wait(ROOM_S)
        self.queue.put(report)

    def take(self, first: object) -> list[Event]:
        """Take in *first* and all that lies ready; return what became of it."""
        events: list[Event] = []
        report = first
        for _ in range(MOST):
            if report is WAKE:
                self.woken = True
                break
            events += self._one(report)
            try:
                report = self.queue.get_nowait()
            except queue.Empty:
                break
        if self.queue.qsize() < MOST_WAITING:
            self._room.set()
        return events

    def silence(self, allocation: Allocation) -> Silence | None:
        """Return which watch tells nothing of *allocation*; a refusal, which does not pass by itself, goes first."""
        found = [self.troubles[source] for source in allocation.sources if source in self.troubles]
        return min(found, key=lambda one: isinstance(one.error, Unavailable), default=None)

    def _one(self, report: object) -> Iterable[Event]:
        if isinstance(report, LogLine):
            return self._line(report)
        if isinstance(report, Seen):
            return self._seen(report)
        if isinstance(report, Vanished):
            return self._vanished(report)
        if isinstance(report, LogEnded):
            return self._log_ended(report)
        if isinstance(report, LogTrouble):
            self._log_trouble(report)
        elif isinstance(report, Trouble):
            before = self.troubles.get(report.source)
            since = before.since if before is not None else self._now()
            self.troubles[report.source] = Silence(report.error, since, report.source in self.synced)
        elif isinstance(report, Healed):
            self.troubles.pop(report.source, None)
            self.healed_at = self._now()
        elif isinstance(report, Synced):
            self.synced.add(report.source)
        return ()

    def claim(self, allocation: Allocation) -> None:
        """Give an allocation what was seen of it before it was known."""
        self._owners.update({ref.uid: allocation for ref in allocation.workloads.values()})
        for uid, (resource, content) in list(self.unclaimed.items()):
            if _allocation_of(content) == allocation.handle.id:
                del self.unclaimed[uid]
                self._object(allocation, resource, content)

    def forget(self, allocation: Allocation) -> None:
        """Forget an allocation of which nothing will come any more."""
        self._owners = {uid: owner for uid, owner in self._owners.items() if owner is not allocation}

    def _seen(self, report: Seen) -> Iterable[Event]:
        content = report.object
        allocation = self._allocations.get(_allocation_of(content))
        if allocation is None:
            self.unclaimed[content["metadata"]["uid"]] = (report.resource, content)
            return ()
        self._object(allocation, report.resource, content)
        if allocation.phase is not Phase.FOLLOWED:
            return ()
        return (*allocation.release(self._now()), *allocation.state())

    def _object(self, allocation: Allocation, resource: Resource, content: Object) -> None:
        meta = content["metadata"]
        ref = ObjectRef(resource, meta.get("namespace") or allocation.namespace, meta["name"], meta["uid"])
        round_ = allocation.round_of(ref.name)
        if round_ > allocation.round and allocation.phase is Phase.FINDING:
            allocation.round = round_  # its first session had come so far
            allocation.stop_following()
            allocation.pods.clear()
            allocation.workloads.clear()
        if round_ != allocation.round:
            return  # of a round that was given up: the cluster is deleting it
        if resource == POD:
            self._pod(allocation, ref, content)
        if resource == allocation.kind.resource:
            self._owners[ref.uid] = allocation
            allocation.workloads.setdefault(ref.name, ref)
            if allocation.phase is not Phase.ENDING:
                allocation.note([ref])
            allocation.status = allocation.kind.progress(content)

    def _pod(self, allocation: Allocation, ref: ObjectRef, content: Object) -> None:
        view = causes.view(content, allocation.kind.container)
        record = allocation.pods.get(ref.uid)
        if record is None:
            record = self._new_pod(allocation, ref, content, view)
        record.see(view)
        if view.started and record.follower is None and not record.log_ended:
            self._follow(allocation, record)
        if record.follower is not None and view.stage is causes.Stage.ENDED:
            record.follower.ended()

    def _new_pod(
        self, allocation: Allocation, ref: ObjectRef, content: Object, view: causes.PodView
    ) -> PodRecord:
        """Note a pod. Where a controller has made one anew, only the first one counts: no run is made twice unnoticed."""
        rank = allocation.kind.rank_of(content)
        born = str(content["metadata"].get("creationTimestamp") or "")
        record = PodRecord(ref, rank, view, PodStream(allocation.plan, ref.name), born)
        self._owners[ref.uid] = allocation
        single = allocation.plan.nodes + allocation.plan.spares == 1
        known = (rank is not None or single) and not allocation.kind.each_pod  # these have no controller
        twin = next((pod for pod in allocation.pods.values() if known and pod.rank == rank), None)
        allocation.pods[ref.uid] = record
        if twin is not None:
            allocation.replaced = True
            later = max((twin, record), key=lambda pod: pod.born)
            later.log_ended = True  # nothing that it says counts
            if later.follower is not None:
                later.follower.close()
                later.follower = None
            if later is twin:  # the order in which they are looked at
                allocation.pods[twin.ref.uid] = allocation.pods.pop(twin.ref.uid)
        return record

    def _vanished(self, report: Vanished) -> Iterable[Event]:
        self.unclaimed.pop(report.ref.uid, None)
        allocation = self._owners.get(report.ref.uid)
        if allocation is None:
            return ()
        if pod := allocation.pods.get(report.ref.uid):  # its last state may say why
            pod.see(causes.view(report.object, allocation.kind.container))
            if pod.follower is not None:
                pod.follower.ended()
        if report.resource == allocation.kind.resource and report.ref.name in allocation.workloads:
            allocation.status = allocation.kind.progress(report.object)
        allocation.lose(report.ref, self._now())
        return ()

    def _line(self, report: LogLine) -> Iterable[Event]:
        allocation = self._owners.get(report.ref.uid)
        pod = allocation.pods.get(report.ref.uid) if allocation is not None else None
        if allocation is None or pod is None or pod.log_ended:
            return ()
        pod.log_error = None
        data = pod.stream.feed(report.line)
        return allocation.hear(data, self._now()) if data else ()

    def _log_trouble(self, report: LogTrouble) -> None:
        allocation = self._owners.get(report.ref.uid)
        pod = allocation.pods.get(report.ref.uid) if allocation is not None else None
        if pod is not None:
            pod.log_error = report.error

    def _log_ended(self, report: LogEnded) -> Iterable[Event]:
        """Read a log once more that has lost something on its way; else nothing more will come from it."""
        allocation = self._owners.get(report.ref.uid)
        pod = allocation.pods.get(report.ref.uid) if allocation is not None else None
        if allocation is None or pod is None or pod.log_ended:
            return ()
        if pod.follower is not None:
            pod.follower.close()
        if pod.stream.missing and not pod.read_again and not pod.gone:
            pod.read_again = True
            self._follow(allocation, pod)
            return ()
        pod.log_ended, pod.whole = True, report.complete and not pod.stream.missing
        pod.log_error = report.error
        data = pod.stream.finish()
        return allocation.hear(data, self._now()) if data else ()

    def _follow(self, allocation: Allocation, pod: PodRecord) -> None:
        """Start following the log of a pod's agent; its text is kept beside the plan."""
        if allocation.phase is Phase.ENDING:
            return
        container = allocation.kind.container
        pod.follower = LogFollower(
            allocation.api, pod.ref, container, self.put_line, keep=allocation.log_of(pod)
        )
        pod.follower.start()
        if pod.view.stage is causes.Stage.ENDED or pod.gone:
            pod.follower.ended()


def _allocation_of(content: Object) -> str:
    labels = (content.get("metadata") or {}).get("labels") or {}
    return str(labels.get(ALLOCATION, ""))
