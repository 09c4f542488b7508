"""The pod that carries one agent: what it asks of its node, where it may run, what it may do, and how it begins. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pytest_mlhpc.batch.plan import Plan
from pytest_mlhpc.batch.vetting import START_S, limit_of
from pytest_mlhpc.provision.kubernetes import labels
from pytest_mlhpc.provision.kubernetes.kinds.model import Kind
from pytest_mlhpc.provision.kubernetes.merge import Must
from pytest_mlhpc.provision.kubernetes.options import KubernetesSettings
from pytest_mlhpc.system.model import Environment, Partition
from pytest_mlhpc.worker.workloads.fields.ipu import IPU, ipus_of_rank

#: Where things are in the pod; ``batch/pod.py`` finds them there.
CONFIG: Final = "/mlhpc/config"
WORK: Final = "/mlhpc/work"
INFO: Final = "/mlhpc/info"
SHM: Final = "/dev/shm"  # noqa: S108 - the name that POSIX shared memory has in a container
PLAN: Final = f"{CONFIG}/plan.json"
PROBE: Final = "probe"

#: Pod Security Standard "restricted" (kubernetes.io/docs/concepts/security/pod-security-standards).
_POD_SECURITY: Final = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
_CONTAINER_SECURITY: Final = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


@dataclass(frozen=True)
class Shape:
    """What one pod has: cores, bytes of memory, devices."""

    cores: int
    memory: int
    devices: int


@dataclass(frozen=True)
class Making:
    """All that is common to the objects of one allocation.

    ``payload`` is the file name of the zip in the ConfigMap, empty: the image has this package. ``pods`` are all of them,
    spares too. ``leader`` is the host name of rank 0, empty where its address is handed on.
    """

    settings: KubernetesSettings
    partition: Partition
    environment: Environment
    plan: Plan
    kind: Kind
    shape: Shape
    labels: Mapping[str, str]
    payload: str
    pods: int
    name: str
    leader: str = ""

    def container(self, key: str) -> str:
        """Return what ``container:`` of the environment says under *key*: image, workdir; or an empty string."""
        return str((self.environment.extra.get("container") or {}).get(key) or "")


def shape_of(plan: Plan, partition: Partition, settings: KubernetesSettings) -> Shape:
    """Return what each pod of *plan* asks for: the share of a node that its devices are, on CPUs the whole node."""
    node = partition.nodes
    if partition.accelerator == "cpu" or not node.devices:
        return Shape(node.cores, node.memory, node.devices if settings.device_resource else 0)
    each = (max(1, run.ranks // run.nodes) * devices_of_rank(partition, run.parameters) for run in plan.runs)
    devices = min(max(each, default=1), node.devices)
    return Shape(*partition.share(devices), devices)


def devices_of_rank(partition: Partition, parameters: Mapping[str, Any]) -> int:
    """Return how many devices of its node a rank has: one, but as many IPUs as its fields say."""
    return ipus_of_rank(parameters) if partition.accelerator == IPU else 1


def deadlines(plan: Plan, settings: KubernetesSettings) -> tuple[int, int]:
    """Return ``activeDeadlineSeconds`` of a pod and of its Job.

    A pod's begins when it has its node, so that fetching its image is part of it; a Job's begins at once, so that
    waiting for a node is too. The plan's time has the agents' vetting in it, not that of the probe.
    """
    probe = limit_of(plan.vetting) + START_S if plan.vetting and settings.probe else 0.0
    pod = math.ceil(plan.time_limit_s + probe + settings.patience["image"] + settings.grace_s)
    waits = settings.patience["unschedulable"] + settings.patience["quota"]
    return pod, pod + math.ceil(waits)


def labels_of_all(settings: KubernetesSettings) -> dict[str, str]:
    """Return the labels of the user's own that all objects get: a queue's are the workload's alone."""
    return {key: value for key, value in settings.labels.items() if "kueue.x-k8s.io/" not in key}


def pod_template(pods: Making, rank: int | None) -> dict[str, Any]:
    """Return our half of a pod template, in which :class:`Must` marks what a manifest may not change.

    *rank* is known where the template makes one pod; None: the kind's rule tells it.
    """
    settings = pods.settings
    own: dict[str, Any] = {key: Must(value) for key, value in pods.labels.items()}
    if rank is not None:
        own[labels.RANK] = Must(str(rank))
    metadata: dict[str, Any] = {"labels": {**labels_of_all(settings), **own}}
    if settings.annotations:
        metadata["annotations"] = dict(settings.annotations)
    return {"metadata": metadata, "spec": _spec(pods, rank)}


def _spec(pods: Making, rank: int | None) -> dict[str, Any]:
    settings = pods.settings
    spec: dict[str, Any] = {
        "restartPolicy": Must("Never"),
        "activeDeadlineSeconds": deadlines(pods.plan, settings)[0],
        "terminationGracePeriodSeconds": math.ceil(settings.grace_s),
        "enableServiceLinks": False,
        "securityContext": _pod_security(settings),
        "containers": [_worker(pods, rank)],
        "volumes": _volumes(pods),
    }
    if settings.security == "restricted":
        spec["automountServiceAccountToken"] = False
    said: dict[str, Any] = {
        "serviceAccountName": settings.service_account,
        "priorityClassName": settings.priority_class,
        "runtimeClassName": settings.runtime_class,
        "nodeSelector": dict(settings.node_selector),
        "tolerations": [dict(one) for one in settings.tolerations],
        "imagePullSecrets": [{"name": name} for name in settings.image_pull_secrets],
    }
    spec |= {key: value for key, value in said.items() if value}
    if pods.leader and not pods.kind.own_service:
        spec["subdomain"] = Must(pods.name)
        if pods.kind.each_pod:
            spec["hostname"] = Must(f"{pods.name}-{rank}")
    return {key: value for key, value in spec.items() if value != {}}


def _pod_security(settings: KubernetesSettings) -> dict[str, Any]:
    given = {
        "runAsUser": settings.run_as_user,
        "runAsGroup": settings.run_as_group,
        "fsGroup": settings.fs_group,
    }
    restricted = _POD_SECURITY if settings.security == "restricted" else {}
    return {**restricted, **{key: value for key, value in given.items() if value is not None}}


def _worker(pods: Making, rank: int | None) -> dict[str, Any]:
    settings = pods.settings
    container: dict[str, Any] = {
        "name": pods.kind.container,
        "command": Must([pods.environment.python, "-m", "pytest_mlhpc.batch.pod", PLAN]),
        "args": Must([]),
        "workingDir": pods.container("workdir") or WORK,
        "env": _variables(pods, rank),
        "resources": resources(pods.shape, settings),
        "volumeMounts": _mounts(settings),
        # What a container that could not begin has said is the best text there is for its end.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if image := settings.image or pods.container("image"):
        container["image"] = Must(image)
    if settings.image_pull_policy:
        container["imagePullPolicy"] = settings.image_pull_policy
    if settings.security == "restricted":
        container["securityContext"] = _CONTAINER_SECURITY
    return container


def resources(shape: Shape, settings: KubernetesSettings) -> dict[str, Any]:
    """Return requests and limits: cores and memory alike in both, devices as limits; the partition's own words win."""
    own = {"cpu": str(shape.cores), "memory": f"{max(1, shape.memory >> 20)}Mi"}
    lowered = {key: value for key, value in settings.limits.items() if key in own}
    limits: dict[str, Any] = {**own, **settings.limits}
    if shape.devices and settings.device_resource:
        limits[settings.device_resource] = Must(str(shape.devices))
    return {"requests": {**own, **lowered, **settings.requests}, "limits": limits}


def _variables(pods: Making, rank: int | None) -> list[Any]:
    """Return the variables of the agent. Each is whole: the manifest may not say another source of it."""
    found: dict[str, Any] = {"MLHPC_PODS": str(pods.pods)}
    if pods.payload:
        found["PYTHONPATH"] = f"{CONFIG}/{pods.payload}"
    if pods.leader:
        found["MLHPC_LEADER"] = pods.leader
    fields = {
        "MLHPC_POD_NAME": "metadata.name",
        "MLHPC_POD_IP": "status.podIP",
        "MLHPC_NODE_NAME": "spec.nodeName",
    }
    rule = pods.kind.rank
    if rank is not None:
        found["MLHPC_POD_RANK"] = str(rank)
    elif rule.variable:
        # Where the operator adds its variable behind ours this stays as it is, and the agent looks itself.
        found["MLHPC_POD_RANK"] = f"$({rule.variable})"
    else:
        where, name = ("annotations", rule.annotation) if rule.annotation else ("labels", rule.label)
        fields["MLHPC_POD_RANK"] = f"metadata.{where}['{name}']"
    plain = [Must({"name": name, "value": value}) for name, value in found.items()]
    paths = [
        Must({"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}})
        for name, path in fields.items()
    ]
    return [{"name": "HOME", "value": WORK}, *plain, *paths]


def _mounts(settings: KubernetesSettings) -> list[Any]:
    ours: list[Any] = [
        Must({"name": "mlhpc-config", "mountPath": CONFIG, "readOnly": True}),
        Must({"name": "mlhpc-work", "mountPath": WORK}),
        Must({"name": "mlhpc-info", "mountPath": INFO, "readOnly": True}),
        {"name": "mlhpc-shm", "mountPath": SHM},
    ]
    for volume in settings.volumes:
        mount: dict[str, Any] = {"name": volume.name, "mountPath": volume.mount}
        if volume.read_only:
            mount["readOnly"] = True
        if volume.sub_path:
            mount["subPath"] = volume.sub_path
        ours.append(mount)
    return ours


def _volumes(pods: Making) -> list[Any]:
    settings = pods.settings
    info = {"path": "annotations", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.annotations"}}
    shared = settings.shared_memory or max(1 << 20, pods.shape.memory // 2)
    ours: list[Any] = [
        Must({"name": "mlhpc-config", "configMap": {"name": pods.name}}),
        Must({"name": "mlhpc-work", "emptyDir": {}}),
        Must({"name": "mlhpc-info", "downwardAPI": {"items": [info]}}),
        {"name": "mlhpc-shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{shared >> 20}Mi"}},
    ]
    # One volume may be mounted in several places.
    sources = {volume.name: volume.source for volume in settings.volumes}
    return [*ours, *({"name": name, **source} for name, source in sources.items())]
