"""What threads report - objects that were seen, lines of logs - goes to the allocation that it concerns."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from pytest_mlhpc.provision.base import Event
from pytest_mlhpc.provision.kubernetes import causes
from pytest_mlhpc.provision.kubernetes.allocation import Allocation, PodRecord
from pytest_mlhpc.provision.kubernetes.api import KubernetesApi
from pytest_mlhpc.provision.kubernetes.labels import ALLOCATION
from pytest_mlhpc.provision.kubernetes.logs import LogEnded, LogFollower, LogLine
from pytest_mlhpc.provision.kubernetes.podstream import PodStream
from pytest_mlhpc.provision.kubernetes.resources import POD, ObjectRef
from pytest_mlhpc.provision.kubernetes.watch import Healed, Seen, Synced, Trouble, Vanished

#: Most reports that are taken in one go: the driver has other things to do.
MOST: Final = 5000


class Intake:
    """Takes reports in. ``trouble`` is what the server's last failing answer was, empty while it answers.

    Args:
        allocations: by id, those that the cluster is still deleting included.
        now: the provisioner's clock, in seconds.
    """

    def __init__(self, allocations: Mapping[str, Allocation], now: Callable[[], float]) -> None:
        self.queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.trouble = ""
        self.synced: set[str] = set()  #: where a first list of objects has come
        self.objects: dict[
            str, Mapping[str, Any]
        ] = {}  #: uid -> object, of allocations that nobody claims yet
        self._allocations = allocations
        self._now = now

    def take(self, first: object) -> list[Event]:
        """Take in *first* and all that lies ready; return what became of it."""
        events: list[Event] = []
        report = first
        for _ in range(MOST):
            events += self._one(report)
            try:
                report = self.queue.get_nowait()
            except queue.Empty:
                break
        return events

    def _one(self, report: object) -> Iterable[Event]:
        if isinstance(report, Seen):
            return self._seen(report)
        if isinstance(report, Vanished):
            return self._vanished(report)
        if isinstance(report, LogLine):
            return self._line(report)
        if isinstance(report, LogEnded):
            return self._log_ended(report)
        if isinstance(report, Trouble):
            self.trouble = str(report.error)
        elif isinstance(report, Healed):
            self.trouble = ""
        elif isinstance(report, Synced):
            self.synced.add(report.source)
        return ()

    def claim(self, allocation: Allocation) -> None:
        """Give an adopted allocation what was seen of it before it was known."""
        for uid, content in list(self.objects.items()):
            if _allocation_of(content) == allocation.handle.id:
                del self.objects[uid]
                self._object(allocation, content)

    def _seen(self, report: Seen) -> Iterable[Event]:
        content = report.object
        allocation = self._allocations.get(_allocation_of(content))
        if allocation is None:
            self.objects[content["metadata"]["uid"]] = content
            return ()
        self._object(allocation, content)
        return (*allocation.release(self._now()), *allocation.state())

    def _object(self, allocation: Allocation, content: Mapping[str, Any]) -> None:
        meta = content["metadata"]
        kind = POD if content.get("kind", "") == "Pod" else allocation.kind.resource
        ref = ObjectRef(kind, meta.get("namespace") or allocation.namespace, meta["name"], meta["uid"])
        if kind == POD:
            self._pod(allocation, ref, content)
        if kind == allocation.kind.resource:
            allocation.workloads.setdefault(ref.name, ref)
            allocation.status = allocation.kind.progress(content)

    def _pod(self, allocation: Allocation, ref: ObjectRef, content: Mapping[str, Any]) -> None:
        view = causes.view(content, allocation.kind.container)
        record = allocation.pods.get(ref.uid)
        if record is None:
            rank = allocation.kind.rank_of(content)
            record = PodRecord(ref, rank, view, PodStream(allocation.plan, ref.name))
            allocation.pods[ref.uid] = record
        record.view = view
        if view.started and record.follower is None and not record.log_ended:
            record.follower = follower(allocation.api, record, allocation, self.queue.put)
        if record.follower is not None and view.stage is causes.Stage.ENDED:
            record.follower.ended()

    def _vanished(self, report: Vanished) -> Iterable[Event]:
        self.objects.pop(report.ref.uid, None)
        for allocation in self._allocations.values():
            if pod := allocation.pods.get(report.ref.uid):  # its last state may say why
                pod.view = causes.view(report.object, allocation.kind.container)
            if allocation.lose(report.ref):
                return (*allocation.release(self._now()), *allocation.state())
        return ()

    def _line(self, report: LogLine) -> Iterable[Event]:
        for allocation in self._allocations.values():
            pod = allocation.pods.get(report.ref.uid)
            if pod is not None:
                data = pod.stream.feed(report.line)
                return allocation.hear(data, self._now()) if data else ()
        return ()

    def _log_ended(self, report: LogEnded) -> Iterable[Event]:
        """Read a log once more that has lost something on its way; else nothing more will come from it."""
        for allocation in self._allocations.values():
            pod = allocation.pods.get(report.ref.uid)
            if pod is None:
                continue
            if pod.stream.missing and not pod.read_again:
                pod.read_again = True
                pod.follower = follower(allocation.api, pod, allocation, self.queue.put)
                return ()
            pod.log_ended, pod.whole = True, report.complete and not pod.stream.missing
            data = pod.stream.finish()
            return allocation.hear(data, self._now()) if data else ()
        return ()


def follower(
    api: KubernetesApi, record: PodRecord, allocation: Allocation, put: Callable[[object], None]
) -> LogFollower:
    """Start following the log of a pod's agent; its text is kept beside the plan."""
    path = allocation.log_of(record)
    found = LogFollower(api, record.ref, allocation.kind.container, put, keep=path)
    found.start()
    return found


def _allocation_of(content: Mapping[str, Any]) -> str:
    labels = (content.get("metadata") or {}).get("labels") or {}
    return str(labels.get(ALLOCATION, ""))
