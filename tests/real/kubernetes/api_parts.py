"""What tests of the API calls share: connections, pods, and what watchers and followers report."""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kubernetes_service import Kubernetes
from kubernetes_wire import Wire, through, wire_to
from running_suites import LIMIT_S, wait_for

from pytest_mlhpc.provision.kubernetes.client import KubernetesClient
from pytest_mlhpc.provision.kubernetes.connect import connect
from pytest_mlhpc.provision.kubernetes.log_follower import LogEnded, LogFailing, LogFollower, LogLine
from pytest_mlhpc.provision.kubernetes.objects import POD, ObjectRef, Resource, object_ref
from pytest_mlhpc.provision.kubernetes.watch import ObjectChanged, ObjectDeleted, ObjectWatcher

#: Something small that the server keeps.
CONFIG_MAP = Resource("", "v1", "ConfigMap", "configmaps")


def config_map(name: str = "c", labels: dict[str, str] | None = None) -> dict[str, Any]:
    """Return a ConfigMap, by default with the label that watches of these tests ask for."""
    return {"metadata": {"name": name, "labels": labels or {"of": "test"}}, "data": {"k": "v"}}


class Parts:
    """Connections, wires and threads of one test; all are closed at its end."""

    def __init__(self, cluster: Kubernetes, namespace: str, folder: Path) -> None:
        self.cluster, self.namespace, self.folder = cluster, namespace, folder
        self.api = self.reach(cluster.kubeconfig)
        self._closing: list[Any] = []

    def reach(self, kubeconfig: Path) -> KubernetesClient:
        return connect(kubeconfig=str(kubeconfig), namespace=self.namespace, environ={})

    def wired(self, kubeconfig: Path | None = None) -> tuple[Wire, KubernetesClient]:
        """Return the server behind a wire."""
        real = kubeconfig or self.cluster.kubeconfig
        wire = wire_to(real)
        api = self.reach(through(wire, real, self.folder / f"wire-{wire.port}"))
        self._closing += [wire, api]
        return wire, api

    def watch(self, api: KubernetesClient, resource: Resource, labels: str = "") -> Reports:
        reports = Reports()
        watcher = ObjectWatcher(api, resource, labels, reports.put)
        self._closing.append(watcher)
        watcher.start()
        return reports

    def follow(
        self, api: KubernetesClient, ref: ObjectRef, hook: Callable[[Any], object] | None = None
    ) -> tuple[LogFollower, Reports]:
        """Follow a pod's log; *hook* sees each report in the follower's own thread."""
        reports = Reports(hook)
        follower = LogFollower(api, ref, "main", reports.put, path=self.folder / "pod.log")
        self._closing.append(follower)
        follower.start()
        return follower, reports

    def pod(self, script: str, name: str = "p", **spec: Any) -> ObjectRef:
        """Run a script of busybox in a pod and return once its container has started."""
        container = {
            "name": "main", "image": "mlhpc.test/busybox:1", "imagePullPolicy": "IfNotPresent",
            "command": ["sh", "-c", script],
        }  # fmt: skip
        pod = {
            "metadata": {"name": name, "labels": {"of": "api-tests"}},
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": 1,
                "containers": [container],
                **spec,
            },
        }
        ref = object_ref(POD, self.api.create(POD, pod))
        wait_for(lambda: self.state(ref).keys() & {"running", "terminated"})
        return ref

    def go(self, ref: ObjectRef, file: str = "/tmp/go") -> None:
        """Let the script of a pod go on that waits for *file*."""
        done = self.cluster.run("kubectl", "-n", self.namespace, "exec", ref.name, "--", "touch", file)
        assert done.returncode == 0, done.stderr

    def state(self, ref: ObjectRef) -> dict[str, Any]:
        statuses = self.api.get(ref)["status"].get("containerStatuses") or [{}]
        return statuses[0].get("state") or {}

    def close(self) -> None:
        for one in reversed(self._closing):
            one.close()
        self.api.close()


class Reports:
    """What was reported so far, in order."""

    def __init__(self, hook: Callable[[Any], object] | None = None) -> None:
        self.all: list[Any] = []
        self._hook = hook
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def put(self, report: Any) -> None:
        if self._hook is not None:
            self._hook(report)
        self._queue.put(report)

    def until(self, wanted: Callable[[Any], bool]) -> Any:
        """Return the first new report that is wanted."""
        while True:
            report = self._queue.get(timeout=LIMIT_S)
            self.all.append(report)
            if wanted(report):
                return report

    def changed(self, name: str) -> ObjectChanged:
        found: ObjectChanged = self.until(
            lambda report: isinstance(report, ObjectChanged) and report.object["metadata"]["name"] == name
        )
        return found

    def deleted(self, name: str) -> ObjectDeleted:
        return self.until(lambda report: isinstance(report, ObjectDeleted) and report.ref.name == name)

    def ended(self) -> LogEnded:
        return self.until(lambda report: isinstance(report, LogEnded))

    @property
    def lines(self) -> list[bytes]:
        return [report.line for report in self.all if isinstance(report, LogLine)]

    @property
    def failing(self) -> list[LogFailing]:
        return [report for report in self.all if isinstance(report, LogFailing)]
