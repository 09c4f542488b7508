"""From the plan of an allocation to the objects that are created for it. Pure: nothing is read, asked or changed."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, replace
from typing import Any, Final

from pytest_mlhpc.batch.plan import Plan
from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.provision.kubernetes import labels
from pytest_mlhpc.provision.kubernetes.kinds import Kind, kind_of
from pytest_mlhpc.provision.kubernetes.labels import Identity
from pytest_mlhpc.provision.kubernetes.merge import Conflict
from pytest_mlhpc.provision.kubernetes.options import KubernetesSettings
from pytest_mlhpc.provision.kubernetes.template import WORK, Making, labels_of_all, shape_of
from pytest_mlhpc.provision.kubernetes.workload import workload
from pytest_mlhpc.results.schema import to_json
from pytest_mlhpc.system.model import Environment, Partition

#: The API server refuses a ConfigMap of more (kubernetes.io/docs/concepts/configuration/configmap).
MOST_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class Rendered:
    """The objects of an allocation, in the order in which they are created.

    ``plan`` is the plan as the pods see it.
    """

    config_map: dict[str, Any]
    service: dict[str, Any] | None
    workloads: tuple[dict[str, Any], ...]
    kind: Kind
    plan: Plan


def render(  # noqa: PLR0917 - the order of the contract: from what is said to what is given
    settings: KubernetesSettings,
    partition: Partition,
    environment: Environment,
    plan: Plan,
    payload: bytes | None,
    identity: Identity,
    round_: int = 0,
) -> Rendered:
    """Return the objects that carry out *plan*. *payload* is the zip's content, None: the image has this package.

    *round_* counts allocations made again without unfit nodes: their objects have names of their own.

    Raises:
        UsageError: the manifest contradicts what a run needs, the kind cannot have so many pods, no image is named,
            or plan and payload are too large; all that is wrong is told at once.
    """
    kind, pods = kind_of(settings), plan.nodes + plan.spares
    if kind.most and pods > kind.most:
        raise UsageError(
            f"{partition.id}: {kind.resource.kind} has at most {kind.most} pod{'s' * (kind.most > 1)} here, not {pods}"
        )
    said = labels.labels_of(plan, identity)
    file = f"{plan.payload_sha256}.zip" if payload is not None else ""
    shape = shape_of(plan, partition, settings)
    name = labels.object_name(plan.allocation_id, round_)
    job = Making(
        settings,
        partition,
        environment,
        plan,
        kind,
        shape,
        said,
        file,
        pods,
        name,
        _leader(settings, kind, pods, name),
    )
    conflicts: list[Conflict] = []
    ranks = range(pods) if kind.each_pod else (None,)
    workloads = tuple(workload(job, rank, conflicts) for rank in ranks)
    if conflicts:
        lines = dict.fromkeys(f"{partition.id}: manifest of kind {kind.name!r}: {one}" for one in conflicts)
        raise UsageError("\n".join(lines))
    inside = replace(plan, directory=WORK, scheduler_options={})
    return Rendered(
        config_map=_config_map(job, inside, payload),
        service=_service(job) if job.leader and not kind.own_service else None,
        workloads=workloads,
        kind=kind,
        plan=inside,
    )


def _leader(settings: KubernetesSettings, kind: Kind, pods: int, name: str) -> str:
    """Return the host name of rank 0, empty where pods hand its address to each other."""
    if not settings.service or pods < 2:
        return ""
    if not kind.leader:
        raise UsageError(f"kind {kind.name!r} says no leader, so that service: true cannot be had")
    return kind.leader.replace("{name}", name)


def _config_map(job: Making, inside: Plan, payload: bytes | None) -> dict[str, Any]:
    text = json.dumps(to_json(inside))
    size = len(text.encode()) + len(payload or b"")
    if size > MOST_BYTES:
        raise UsageError(
            f"{job.partition.id}: plan and payload have {size} bytes, a ConfigMap takes {MOST_BYTES}; "
            "install pytest-mlhpc in the image, or pack fewer runs"
        )
    found: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(job),
        "immutable": True,
        "data": {"plan.json": text},
    }
    if payload is not None:
        found["binaryData"] = {job.payload: base64.b64encode(payload).decode("ascii")}
    return found


def _service(job: Making) -> dict[str, Any]:
    """Return the headless Service that gives each pod a name, from its beginning: agents look for rank 0 before it is ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {labels.ALLOCATION: job.plan.allocation_id},
        },
    }


def _metadata(job: Making) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": job.name, "labels": {**labels_of_all(job.settings), **job.labels}}
    if job.settings.namespace:
        metadata["namespace"] = job.settings.namespace
    return metadata
