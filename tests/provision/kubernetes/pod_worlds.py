"""A cluster that tells what a test says, in its order, with a clock of its own: for what a real one cannot be made to do."""

from __future__ import annotations

import copy
import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

from allocation_worlds import AllocationWorld, ManualClock, worker_lines

from pytest_mlhpc.jobs.provisioner import AllocationEnded, MonotonicClock
from pytest_mlhpc.node.batch.pod_stream import RS
from pytest_mlhpc.node.protocol.plan import Plan
from pytest_mlhpc.provision.kubernetes import event_router
from pytest_mlhpc.provision.kubernetes.client import Listing
from pytest_mlhpc.provision.kubernetes.errors import ApiCall, KubernetesError, Unavailable
from pytest_mlhpc.provision.kubernetes.log_follower import LogEnded, LogLine
from pytest_mlhpc.provision.kubernetes.objects import (
    ALLOCATION,
    JOB,
    MANAGED_BY,
    MANAGER,
    POD,
    ObjectRef,
    Resource,
)
from pytest_mlhpc.provision.kubernetes.provisioner import KubernetesProvisioner
from pytest_mlhpc.provision.kubernetes.watch import (
    Clusters,
    ListSynced,
    ObjectChanged,
    ObjectDeleted,
    WatchFailing,
)

SERVER = "https://cluster.test:6443"
CALL = ApiCall("create", "jobs.batch", "x", "ns", SERVER)
ID = "01a1fe39-0000-7000-8000-00000000000a"


class FakeApi:
    """A server of two dictionaries. ``on`` maps a call to what happens first, which may raise.

    Its garbage collector takes along what a deleted object owns, unless ``collects`` is false.
    """

    server, authority, namespace, requests = SERVER, "1234", "ns", 0

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.on: dict[str, Callable[..., Any]] = {}
        self.calls: list[str] = []
        self.collects = True
        self._next = 0

    def _call(self, what: str, *words: Any) -> None:
        self.calls.append(" ".join([what, *map(str, words)]))
        self.on.get(what, lambda *_words: None)(*words)

    def version(self) -> str:
        return "v1.30"

    def create(self, resource: Resource, manifest: dict[str, Any], namespace: str = "") -> dict[str, Any]:
        self._call("create", resource.kind)
        return self.put(resource, manifest, namespace)

    def put(self, resource: Resource, manifest: dict[str, Any], namespace: str = "") -> dict[str, Any]:
        stored = copy.deepcopy(manifest)
        self._next += 1
        stored["metadata"] = {"namespace": namespace, **stored["metadata"], "uid": f"uid-{self._next}"}
        self.objects[resource.kind, stored["metadata"]["name"]] = stored
        return stored

    def list(self, resource: Resource, *, labels: str = "", fields: str = "", namespace: str = "") -> Listing:

        self._call("list", resource.kind)
        return Listing([one for (kind, _), one in self.objects.items() if kind == resource.kind], "1")

    def delete(self, ref: ObjectRef, *, grace_s: int | None = None, propagation: str = "") -> None:

        self._call("delete", ref.resource.kind)
        self.objects.pop((ref.resource.kind, ref.name), None)
        for key, one in list(self.objects.items()) if self.collects else ():
            if ref.uid and ref.uid in [owner["uid"] for owner in one["metadata"].get("ownerReferences", ())]:
                del self.objects[key]

    def patch(self, ref: ObjectRef, body: Any) -> dict[str, Any]:
        self._call("patch", ref.resource.kind)
        stored = self.objects.get((ref.resource.kind, ref.name), {"metadata": {}})
        stored["metadata"].update(body.get("metadata", {}))
        return stored

    def get(self, ref: ObjectRef) -> dict[str, Any]:
        self._call("get", ref.resource.kind)
        return self.objects.get((ref.resource.kind, ref.name), {})

    def events(self, uid: str) -> list[dict[str, Any]]:
        self._call("events", uid)
        return []

    def close(self) -> None:
        pass


class FakeClusters(Clusters):
    """One server, whose watches tell what a test says."""

    def __init__(self, api: FakeApi) -> None:
        super().__init__({})
        self.api = api

    def reach(self, settings):
        return self.api

    def watch(self, settings, kind, put):

        return frozenset({source(POD), source(kind.resource)})


class Instant(KubernetesProvisioner):
    """Does not wait: the clock goes on."""

    clock: ManualClock

    def _wait(self, seconds: float) -> object | None:
        try:
            return self._router.queue.get_nowait()
        except queue.Empty:
            self.clock.now += max(0.0, seconds)
            return None


def source(resource: Resource) -> str:
    return f"{SERVER} ns/{resource}"


class World(AllocationWorld):
    """A provisioner on such a cluster."""

    def __init__(self, folder: Path, monkeypatch, **options: Any) -> None:
        options = {"namespace": "ns", "image": "mlhpc.test/x:1", **options}
        super().__init__(folder, "kubernetes", "torchrun", options)
        self.api = FakeApi()
        self.followers: list[Mock] = []  #: who read nothing; a test says what came
        monkeypatch.setattr(event_router, "LogFollower", self._follower)
        (folder / "payload.zip").write_bytes(b"zip")
        self.session()

    def session(self) -> None:
        """Begin a new session, with a provisioner and a clock of its own."""
        self.clock = ManualClock()
        self.provisioner = Instant(
            self.partition, FakeClusters(self.api), lambda _sha: self.folder / "payload.zip", "session",
            MonotonicClock(self.clock.monotonic, lambda _event, _seconds: False),
        )  # fmt: skip
        self.provisioner.clock = self.clock

    def _follower(self, *words: Any, **more: Any) -> Mock:
        self.followers.append(Mock(ref=words[1]))
        return self.followers[-1]

    def plan(self) -> Plan:
        return super().plan(ID, payload_sha256="0" * 64)

    def submit(self) -> Plan:
        plan = self.plan()
        self.provisioner.submit(plan)
        return plan

    def submitted(self) -> World:
        """Submit an allocation, and let all lists have come."""
        self.submit()
        self.sync()
        return self

    def adopt(self, plan: Plan, suffix: str = "", native_id: str | None = None) -> None:
        """Adopt the allocation in a new session: its first Job, or that of a later round."""
        self.session()
        native_id = f"ns/jobs/mlhpc-{ID}{suffix}" if native_id is None else native_id
        self.provisioner.adopt(plan, native_id)

    def running_handles(self) -> list[Any]:
        return [one.handle for one in self.provisioner._allocations.values()]

    def jobs(self) -> list[str]:
        """Return the suffixes of the names of the Jobs that there are: none in the first round, then -r1."""
        return [name.removeprefix(f"mlhpc-{ID}") for kind, name in self.api.objects if kind == "Job"]

    def end(self, seconds: float = 3.0) -> AllocationEnded:
        """Let time pass; return the end of the only allocation."""
        (end,) = self.follow(seconds)
        return end

    def put(self, *reports: object) -> None:
        for report in reports:
            self.provisioner._router.queue.put(report)

    def sync(self) -> None:
        self.put(ListSynced(source(POD)), ListSynced(source(JOB)))

    def job(self, uid: str = "uid-2", suffix: str = "") -> None:
        self.put(
            ObjectChanged(JOB, {"metadata": _meta(f"mlhpc-{ID}{suffix}", uid), "status": {}}, source(JOB))
        )

    def pod(self, uid: str = "pod-1", suffix: str = "-x", **changes: Any) -> dict[str, Any]:
        """Tell a pod: ``running``, ``exit`` code, ``deleting``, ``node``, ``born``, ``unready``, ``unfit``, ``crowded``."""
        found = pod_of(uid, f"mlhpc-{ID}{suffix}", **changes)
        self.put(ObjectChanged(POD, found, source(POD)))
        return found

    def vanish(self, *names: str, **changes: Any) -> None:
        """Tell a pod, and that it is gone."""
        self.gone(self.pod(*names, **changes))

    def trouble(self, error: KubernetesError | None = None) -> None:
        """Tell that nothing is heard of pods."""
        self.put(WatchFailing(error or silent(), 0.0, source(POD)))

    def gone(self, content: dict[str, Any]) -> None:
        meta = content["metadata"]
        self.put(ObjectDeleted(POD, ObjectRef(POD, "ns", meta["name"], meta["uid"]), content, source(POD)))

    def print(self, *kinds: str, uid: str = "pod-1", start: int = 0) -> None:
        """Tell worker lines as a pod prints them."""
        for line in worker_lines(self.plan(), *kinds, start=start):
            self.put(LogLine(self._ref(uid), "worker", RS + line.rstrip(b"\n")))

    def log_over(self, uid: str = "pod-1", *, complete: bool = True, error=None) -> None:
        self.put(LogEnded(self._ref(uid), "worker", complete, error))

    @staticmethod
    def _ref(uid: str) -> ObjectRef:
        return ObjectRef(POD, "ns", f"name-of-{uid}", uid)


def pod_of(uid: str, name: str, **changes: Any) -> dict[str, Any]:
    status: dict[str, Any] = {"phase": "Pending", "podIP": "10.0.0.1"}
    worker: dict[str, Any] = {"name": "worker", "state": {}}
    if changes.get("running") or changes.get("unready"):
        status["phase"], worker["state"] = "Running", {"running": {}}
    if changes.get("unready"):
        status["conditions"] = [
            {"type": "ContainersReady", "status": "True"},
            {"type": "Ready", "status": "False"},
        ]
    if changes.get("blocked"):
        status["conditions"] = [
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
        ]
    if (code := changes.get("exit")) is not None:
        status["phase"] = "Failed" if code else "Succeeded"
        worker["state"] = {"terminated": {"exitCode": code, "reason": changes.get("why", "Error")}}
    status["containerStatuses"] = [worker]
    if changes.get("unfit"):
        status["phase"] = "Failed"
        ended = {"terminated": {"exitCode": 10, "message": changes["unfit"]}}
        status["initContainerStatuses"] = [{"name": "probe", "state": ended}]
    if changes.get("crowded"):
        reason, message = "OutOfcpu", "Node didn't have enough resource: cpu"
        status = {"phase": "Failed", "reason": reason, "message": message}
    meta = _meta(name, uid)
    meta["creationTimestamp"] = changes.get("born", "2026-01-01T00:00:00Z")
    if changes.get("deleting"):
        meta["deletionTimestamp"] = "2026-01-01T00:01:00Z"
    node = {} if changes.get("blocked") else {"nodeName": changes.get("node", "n1")}
    return {"metadata": meta, "spec": node, "status": status}


def _meta(name: str, uid: str) -> dict[str, Any]:
    return {"name": name, "namespace": "ns", "uid": uid, "labels": {MANAGED_BY: MANAGER, ALLOCATION: ID}}


def silent(words: str = "no answer") -> Unavailable:
    return Unavailable(CALL, words)


def raises(error: Exception, kind: str = "") -> Callable[..., None]:
    """Return what makes a call raise *error*; of one kind of object, if that is given."""

    def act(*words: Any) -> None:
        if not kind or words[0] == kind:
            raise error

    return act
