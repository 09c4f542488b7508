"""Small controllers for kinds of workload that the test cluster does not have: they make pods from templates as the real ones do.

Only what an allocation meets is there: pods with the operator's own variables, annotations and restart policy, suspension,
and conditions or phases of the status.
"""

from __future__ import annotations

import contextlib
import copy
import http
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kubernetes_service import ApiError, Kubernetes
from services import wait_until

Object = dict[str, Any]


@dataclass(frozen=True)
class PodOf:
    """A pod that a workload wants: its name, its template, and what the operator adds to it."""

    name: str
    template: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    restart: str = ""


@dataclass(frozen=True)
class Rules:
    """How one kind works. ``words``: what it calls suspended, running, succeeded and failed; ``phase``: in one word each."""

    group: str
    version: str
    kind: str
    plural: str
    pods: Callable[[Object], list[PodOf]]
    suspended: Callable[[Object], bool] = lambda _: False
    words: tuple[str, str, str, str] = ("Suspended", "Running", "Succeeded", "Failed")
    phase: bool = False


def pytorch_pods(found: Object) -> list[PodOf]:
    """Return the pods of a PyTorchJob: as Kubeflow's training operator v1 names and numbers them."""
    name, specs = found["metadata"]["name"], found["spec"]["pytorchReplicaSpecs"]
    ranks = [
        (kind, index)
        for kind in ("Master", "Worker")
        for index in range(specs.get(kind, {}).get("replicas", 0))
    ]
    return [
        PodOf(
            f"{name}-{kind.lower()}-{index}",
            specs[kind]["template"],
            {"RANK": str(rank), "WORLD_SIZE": str(len(ranks)), "MASTER_PORT": "23456", "MASTER_ADDR": f"{name}-master-0"},
            restart=specs[kind].get("restartPolicy", "Never"),
        )
        for rank, (kind, index) in enumerate(ranks)
    ]  # fmt: skip


def jobset_pods(found: Object) -> list[PodOf]:
    """Return the pods of a JobSet's replicated jobs: those of Indexed Jobs."""
    name = found["metadata"]["name"]
    return [
        PodOf(
            f"{name}-{job['name']}-0-{index}-abcde",
            job["template"]["spec"]["template"],
            annotations={"batch.kubernetes.io/job-completion-index": str(index)},
        )
        for job in found["spec"]["replicatedJobs"]
        for index in range(job["template"]["spec"].get("completions", 1))
    ]


def ipu_pods(found: Object) -> list[PodOf]:
    """Return the one pod of an IPUJob."""
    return [PodOf(f"{found['metadata']['name']}-worker-0", found["spec"]["workers"]["template"])]


PYTORCH = Rules(
    "kubeflow.org", "v1", "PyTorchJob", "pytorchjobs", pytorch_pods,
    lambda found: bool(found["spec"]["runPolicy"].get("suspend")),
)  # fmt: skip
JOBSET = Rules(
    "jobset.x-k8s.io", "v1alpha2", "JobSet", "jobsets", jobset_pods,
    lambda found: bool(found["spec"].get("suspend")), ("Suspended", "Running", "Completed", "Failed"),
)  # fmt: skip
IPU = Rules(
    "graphcore.ai", "v1alpha1", "IPUJob", "ipujobs", ipu_pods,
    words=("", "Running", "Completed", "Failed"), phase=True,
)  # fmt: skip


@contextlib.contextmanager
def operator(cluster: Kubernetes, namespace: str, rules: Rules) -> Iterator[None]:
    """Install the kind (it stays: other tests may use it at the same time) and work in one namespace."""
    _install(cluster, rules)
    stop = threading.Event()
    worker = _Operator(cluster, namespace, rules)
    thread = threading.Thread(target=worker.run, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert worker.trouble == []


def _install(cluster: Kubernetes, rules: Rules) -> None:
    version = {
        "name": rules.version, "served": True, "storage": True, "subresources": {"status": {}},
        "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
    }  # fmt: skip
    names = {"kind": rules.kind, "plural": rules.plural, "singular": rules.kind.lower()}
    spec = {"group": rules.group, "scope": "Namespaced", "names": names, "versions": [version]}
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    with contextlib.suppress(ApiError):  # it is there
        cluster.ask("POST", path, {"metadata": {"name": f"{rules.plural}.{rules.group}"}, "spec": spec})
    kinds = f"/apis/{rules.group}/{rules.version}/{rules.plural}"
    assert wait_until(lambda: _served(cluster, kinds)), f"{rules.plural} are not served"


def _served(cluster: Kubernetes, path: str) -> bool:
    try:
        cluster.items(path)
    except ApiError:
        return False
    return True


class _Operator:
    def __init__(self, cluster: Kubernetes, namespace: str, rules: Rules) -> None:
        self._cluster, self._rules = cluster, rules
        self._path = f"/apis/{rules.group}/{rules.version}/namespaces/{namespace}/{rules.plural}"
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self.trouble: list[str] = []

    def run(self, stop: threading.Event) -> None:
        """Look at all objects again and again."""
        while not stop.wait(0.2):
            try:
                pods = {pod["metadata"]["name"]: pod for pod in self._cluster.items(self._pods)}
                for found in self._cluster.items(self._path):
                    if "deletionTimestamp" not in found["metadata"]:
                        self._reconcile(found, pods)
            except ApiError as error:
                # Of a busy server all else is asked for again, as real ones do.
                if error.status in {http.HTTPStatus.BAD_REQUEST, http.HTTPStatus.UNPROCESSABLE_ENTITY}:
                    self.trouble.append(str(error))

    def _reconcile(self, found: Object, pods: Mapping[str, Object]) -> None:
        if self._rules.suspended(found):
            self._tell(found, self._rules.words[0], "it waits in its queue")
            return
        wanted = self._rules.pods(found)
        for one in wanted:
            if one.name not in pods:
                self._cluster.ask("POST", self._pods, self._pod(found, one))
        phases = {pods[one.name]["status"].get("phase") for one in wanted if one.name in pods}
        if "Failed" in phases:
            self._tell(found, self._rules.words[3], "a pod has failed")
        elif phases == {"Succeeded"}:
            self._tell(found, self._rules.words[2], "all pods have succeeded")
        elif "Running" in phases:
            self._tell(found, self._rules.words[1], "pods run")

    def _pod(self, found: Object, one: PodOf) -> Object:
        meta = found["metadata"]
        pod = copy.deepcopy(dict(one.template))
        pod["metadata"] = {**pod.get("metadata", {}), "name": one.name}
        pod["metadata"].setdefault("annotations", {}).update(one.annotations)
        pod["metadata"]["ownerReferences"] = [
            {
                "apiVersion": found["apiVersion"], "kind": found["kind"], "name": meta["name"], "uid": meta["uid"],
                "controller": True, "blockOwnerDeletion": True,
            }
        ]  # fmt: skip
        for container in pod["spec"]["containers"]:
            container.setdefault("env", []).extend(
                {"name": name, "value": value} for name, value in one.environment.items()
            )
        if one.restart:
            pod["spec"]["restartPolicy"] = one.restart
        return pod

    def _tell(self, found: Object, word: str, message: str) -> None:
        if self._rules.phase:
            status: Object = {"phase": word}
        else:
            said = [word] if word != self._rules.words[2] else [self._rules.words[1], word]
            status = {
                "conditions": [{"type": one, "status": "True", "reason": f"{self._rules.kind}{one}", "message": message} for one in said]
            }  # fmt: skip
        if found.get("status") != status:
            path = f"{self._path}/{found['metadata']['name']}/status"
            self._cluster.ask("PATCH", path, {"status": status}, kind="application/merge-patch+json")
