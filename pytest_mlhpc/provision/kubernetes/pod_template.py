"""The pod template of an agent: containers, resources, volumes, security, and on which nodes it may run.

Open it to see what a pod requests. ``manifest.py`` merges the template into the user's manifest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final

from pytest_mlhpc.config.model import Environment, Partition
from pytest_mlhpc.node.batch.vetting import START_S, limit_of
from pytest_mlhpc.node.protocol.plan import Plan
from pytest_mlhpc.node.run_files import packed_sets
from pytest_mlhpc.node.worker.workloads.fields.compiled_devices import IPU, ipus_of_rank
from pytest_mlhpc.provision.kubernetes.objects import ALLOCATION, RANK, FixedValue
from pytest_mlhpc.provision.kubernetes.settings import KubernetesSettings, WorkloadKind

#: Paths in the pod; ``node/batch/pod.py`` uses them.
CONFIG: Final = "/mlhpc/config"
WORK: Final = "/mlhpc/work"
INFO: Final = "/mlhpc/info"
SHM: Final = "/dev/shm"  # noqa: S108 - the name that POSIX shared memory has in a container
PLAN: Final = f"{CONFIG}/plan.json"

#: Pod Security Standard "restricted" (kubernetes.io/docs/concepts/security/pod-security-standards).
_POD_SECURITY: Final = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
_CONTAINER_SECURITY: Final = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}

#: Node label set by kubelets (kubernetes.io/docs/reference/labels-annotations-taints).
HOSTNAME: Final = "kubernetes.io/hostname"
_REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED: Final = "preferredDuringSchedulingIgnoredDuringExecution"


@dataclass(frozen=True)
class PodSize:
    """Cores, bytes of memory, and devices of one pod."""

    cores: int
    memory: int
    devices: int


@dataclass(frozen=True)
class RenderContext:
    """All that the objects of one allocation have in common.

    ``payload`` is the zip's file name in the Secret; empty: the image contains this package. ``pods`` counts spares too.
    ``leader`` is rank 0's host name; empty: its address is published by an annotation.
    """

    settings: KubernetesSettings
    partition: Partition
    environment: Environment
    plan: Plan
    kind: WorkloadKind
    shape: PodSize
    labels: Mapping[str, str]
    payload: str
    pods: int
    name: str
    leader: str = ""

    def container(self, key: str) -> str:
        """Return the environment's ``container:`` entry *key* (image, workdir), or an empty string."""
        return str((self.environment.extra.get("container") or {}).get(key) or "")


def pod_size(plan: Plan, partition: Partition, settings: KubernetesSettings) -> PodSize:
    """Return what each pod of *plan* requests: its devices' share of a node; on CPUs the whole node."""
    node = partition.nodes
    if partition.accelerator == "cpu" or not node.devices:
        return PodSize(node.cores, node.memory, node.devices if settings.device_resource else 0)
    each = (max(1, run.ranks // run.nodes) * devices_per_rank(partition, run.parameters) for run in plan.runs)
    devices = min(max(each, default=1), node.devices)
    return PodSize(*partition.share(devices), devices)


def devices_per_rank(partition: Partition, parameters: Mapping[str, Any]) -> int:
    """Return how many devices a rank uses: one, or as many IPUs as its fields say."""
    return ipus_of_rank(parameters) if partition.accelerator == IPU else 1


def deadlines(plan: Plan, settings: KubernetesSettings) -> tuple[int, int]:
    """Return ``activeDeadlineSeconds`` of a pod and of its Job.

    A pod's deadline starts when it is scheduled, so it includes pulling the image. A Job's starts at once, so it includes
    the wait for a node. The plan's time limit contains the agents' vetting, but not the probe's.
    """
    probe = limit_of(plan.vetting) + START_S if plan.vetting and settings.probe else 0.0
    pod = math.ceil(plan.time_limit_s + probe + settings.patience["image"] + settings.grace_s)
    waits = settings.patience["unschedulable"] + settings.patience["quota"]
    return pod, pod + math.ceil(waits)


def common_labels(settings: KubernetesSettings) -> dict[str, str]:
    """Return the user's labels for all objects; a queue's labels are only for the workload."""
    return {key: value for key, value in settings.labels.items() if "kueue.x-k8s.io/" not in key}


def pod_template(pods: RenderContext, rank: int | None) -> dict[str, Any]:
    """Return our part of a pod template, in which :class:`FixedValue` marks what a manifest may not change.

    *rank* is given if the template makes one pod; None: the kind's rule determines it.
    """
    settings = pods.settings
    own: dict[str, Any] = {key: FixedValue(value) for key, value in pods.labels.items()}
    if rank is not None:
        own[RANK] = FixedValue(str(rank))
    metadata: dict[str, Any] = {"labels": {**common_labels(settings), **own}}
    if settings.annotations:
        metadata["annotations"] = dict(settings.annotations)
    return {"metadata": metadata, "spec": _pod_spec(pods, rank)}


def _pod_spec(pods: RenderContext, rank: int | None) -> dict[str, Any]:
    settings = pods.settings
    spec: dict[str, Any] = {
        "restartPolicy": FixedValue("Never"),
        "activeDeadlineSeconds": deadlines(pods.plan, settings)[0],
        "terminationGracePeriodSeconds": math.ceil(settings.grace_s),
        "enableServiceLinks": False,
        "securityContext": _pod_security(settings),
        "containers": [_worker_container(pods, rank)],
        "volumes": _volumes(pods),
    }
    if settings.security == "restricted":
        spec["automountServiceAccountToken"] = False
    optional: dict[str, Any] = {
        "serviceAccountName": settings.service_account,
        "priorityClassName": settings.priority_class,
        "runtimeClassName": settings.runtime_class,
        "nodeSelector": dict(settings.node_selector),
        "tolerations": [dict(one) for one in settings.tolerations],
        "imagePullSecrets": [{"name": name} for name in settings.image_pull_secrets],
    }
    spec |= {key: value for key, value in optional.items() if value}
    if pods.leader and not pods.kind.own_service:
        spec["subdomain"] = FixedValue(pods.name)
        if pods.kind.each_pod:
            spec["hostname"] = FixedValue(f"{pods.name}-{rank}")
    return {key: value for key, value in spec.items() if value != {}}


def _pod_security(settings: KubernetesSettings) -> dict[str, Any]:
    given = {
        "runAsUser": settings.run_as_user,
        "runAsGroup": settings.run_as_group,
        "fsGroup": settings.fs_group,
    }
    restricted = _POD_SECURITY if settings.security == "restricted" else {}
    return {**restricted, **{key: value for key, value in given.items() if value is not None}}


def _worker_container(pods: RenderContext, rank: int | None) -> dict[str, Any]:
    settings, run = pods.settings, pods.plan.runs[0]
    agent = [pods.environment.python, "-m", "pytest_mlhpc.node.batch.pod", PLAN]
    folder = pods.container("workdir") or WORK
    container: dict[str, Any] = {
        "name": pods.kind.container,
        "command": FixedValue(agent if settings.agent else own_command(run.argv)),
        "args": FixedValue([]),
        "workingDir": folder if settings.agent else run.cwd or folder,
        "env": _variables(pods, rank) if settings.agent else _rank_variables(pods, rank),
        "resources": resources(pods.shape, settings),
        "volumeMounts": _mounts(settings),
        # The log of a container that could not start explains its end best.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if image := settings.image or pods.container("image"):
        container["image"] = FixedValue(image)
    if not settings.agent:  # the run's variables may hold secrets
        container["envFrom"] = [FixedValue({"secretRef": {"name": pods.name}})]
    if settings.image_pull_policy:
        container["imagePullPolicy"] = settings.image_pull_policy
    if settings.security == "restricted":
        container["securityContext"] = _CONTAINER_SECURITY
    return container


def resources(shape: PodSize, settings: KubernetesSettings) -> dict[str, Any]:
    """Return requests and limits: cores and memory in both, devices as limits. The partition's own values win."""
    own = {"cpu": str(shape.cores), "memory": f"{max(1, shape.memory >> 20)}Mi"}
    lowered = {key: value for key, value in settings.limits.items() if key in own}
    limits: dict[str, Any] = {**own, **settings.limits}
    if shape.devices and settings.device_resource:
        limits[settings.device_resource] = FixedValue(str(shape.devices))
    return {"requests": {**own, **lowered, **settings.requests}, "limits": limits}


def _variables(pods: RenderContext, rank: int | None) -> list[Any]:
    """Return the agent's environment. Each variable is a :class:`FixedValue` as a whole, with its source."""
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
        # If the operator adds its variable after ours, this stays unexpanded, and the agent reads the variable itself.
        found["MLHPC_POD_RANK"] = f"$({rule.variable})"
    else:
        fields["MLHPC_POD_RANK"] = rule.field_path
    return [{"name": "HOME", "value": WORK}, *_fixed(found, fields)]


def _fixed(values: Mapping[str, str], fields: Mapping[str, str]) -> list[Any]:
    """Return variables with these values, and with those of fields of the pod."""
    plain = [FixedValue({"name": name, "value": value}) for name, value in values.items()]
    paths = [
        FixedValue({"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}})
        for name, path in fields.items()
    ]
    return [*plain, *paths]


def _rank_variables(pods: RenderContext, rank: int | None) -> list[Any]:
    """Return what tells a program without an agent which of several pods it is in: as torchrun says it."""
    if pods.pods == 1:
        return []
    place = {"LOCAL_RANK": "0", "WORLD_SIZE": str(pods.pods)}
    rule = pods.kind.rank
    if rank is not None:
        return _fixed({"RANK": str(rank), **place}, {})
    if rule.variable:
        return _fixed(place if rule.variable == "RANK" else {"RANK": f"$({rule.variable})", **place}, {})
    return _fixed(place, {"RANK": rule.field_path})


def own_command(argv: Sequence[str]) -> list[str]:
    """Return *argv* as a container's command: the kubelet expands ``$(NAME)`` in it, and ``$$`` is a dollar.

    Without arguments, as in a preview, it is a word that stands for the program.
    """
    return [word.replace("$", "$$") for word in argv] or ["PROGRAM"]


def files_secret(name: str) -> str:
    """Return the name of the Secret with the files of the runs, beside the one with the plan."""
    return f"{name}-files"


def _mounts(settings: KubernetesSettings) -> list[Any]:
    config = FixedValue({"name": "mlhpc-config", "mountPath": CONFIG, "readOnly": True})
    info = FixedValue({"name": "mlhpc-info", "mountPath": INFO, "readOnly": True})
    work = FixedValue({"name": "mlhpc-work", "mountPath": WORK})
    ours: list[Any] = [config, work, info] if settings.agent else [work]
    ours.append({"name": "mlhpc-shm", "mountPath": SHM})
    for volume in settings.volumes:
        mount: dict[str, Any] = {"name": volume.name, "mountPath": volume.mount}
        if volume.read_only:
            mount["readOnly"] = True
        if volume.sub_path:
            mount["subPath"] = volume.sub_path
        ours.append(mount)
    return ours


def _volumes(pods: RenderContext) -> list[Any]:
    settings = pods.settings
    info = {"path": "annotations", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.annotations"}}
    shared = settings.shared_memory or max(1 << 20, pods.shape.memory // 2)
    secrets = [pods.name, *([files_secret(pods.name)] if packed_sets(pods.plan) else [])]
    config: dict[str, Any] = {"projected": {"sources": [{"secret": {"name": name}} for name in secrets]}}
    if len(secrets) == 1:
        config = {"secret": {"secretName": pods.name}}
    plan = FixedValue({"name": "mlhpc-config", **config})
    info_volume = FixedValue({"name": "mlhpc-info", "downwardAPI": {"items": [info]}})
    work = FixedValue({"name": "mlhpc-work", "emptyDir": {}})
    ours: list[Any] = [plan, work, info_volume] if settings.agent else [work]
    ours.append({"name": "mlhpc-shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{shared >> 20}Mi"}})
    # A volume may be mounted several times.
    sources = {volume.name: volume.source for volume in settings.volumes}
    return [*ours, *({"name": name, **source} for name, source in sources.items())]


def with_affinity(
    affinity: Mapping[str, Any] | None,
    *,
    nodelist: Sequence[str],
    excluded: Sequence[str],
    allocation: str,
    spread: str,
) -> dict[str, Any]:
    """Return a copy of *affinity* with our constraints added.

    Pods run on *nodelist* (if any), never on *excluded*, and on different nodes as *spread* says.
    """
    found = deepcopy(dict(affinity or {}))
    if nodelist or excluded:
        required = _mapping_at(_mapping_at(found, "nodeAffinity"), _REQUIRED)
        required["nodeSelectorTerms"] = _node_terms(
            required.get("nodeSelectorTerms") or [{}], nodelist, excluded
        )
    if spread != "none":
        apart = _mapping_at(found, "podAntiAffinity")
        term = {"labelSelector": {"matchLabels": {ALLOCATION: allocation}}, "topologyKey": HOSTNAME}
        if spread == "required":
            apart[_REQUIRED] = [*(apart.get(_REQUIRED) or []), term]
        else:
            weighted = {"weight": 100, "podAffinityTerm": term}
            apart[_PREFERRED] = [*(apart.get(_PREFERRED) or []), weighted]
    return found


def _mapping_at(found: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the mapping at *key*, created if missing."""
    inner: dict[str, Any] | None = found.get(key)
    if inner is None:
        inner = found[key] = {}
    return inner


def _node_terms(
    theirs: Sequence[Mapping[str, Any]], nodelist: Sequence[str], excluded: Sequence[str]
) -> list[dict[str, Any]]:
    """Return selector terms, one of which must match. ``metadata.name`` takes a single value (validation of core/v1)."""
    off = [_node_name("NotIn", name) for name in dict.fromkeys(excluded)]
    on: list[list[dict[str, Any]]] = [[_node_name("In", name)] for name in dict.fromkeys(nodelist)] or [[]]
    return [
        {**term, "matchFields": [*(term.get("matchFields") or []), *one, *off]}
        for term in theirs
        for one in on
    ]


def _node_name(operator: str, name: str) -> dict[str, Any]:
    return {"key": "metadata.name", "operator": operator, "values": [name]}
