"""From the plan of an allocation to the objects that are created for it. Pure: nothing is read, asked or changed."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Final

from pytest_mlhpc.batch.plan import Plan
from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.provision.kubernetes import labels
from pytest_mlhpc.provision.kubernetes.affinity import with_affinity
from pytest_mlhpc.provision.kubernetes.kinds import Kind, TemplateRule, kind_of
from pytest_mlhpc.provision.kubernetes.kinds.model import Path, at, item_of
from pytest_mlhpc.provision.kubernetes.labels import Identity
from pytest_mlhpc.provision.kubernetes.merge import Conflict, Must, every_must, merge
from pytest_mlhpc.provision.kubernetes.options import KubernetesSettings
from pytest_mlhpc.provision.kubernetes.template import (
    PROBE,
    WORK,
    Pods,
    Shape,
    deadlines,
    pod_template,
    shape_of,
)
from pytest_mlhpc.results.schema import to_json
from pytest_mlhpc.system.model import Environment, Partition

#: The API server refuses a ConfigMap of more (kubernetes.io/docs/concepts/configuration/configmap).
MOST_BYTES: Final = 1 << 20
#: What the init container has from the worker's: it looks at the same node through the same eyes.
_PROBES: Final = (
    "image", "imagePullPolicy", "workingDir", "env", "envFrom", "resources", "volumeMounts", "securityContext",
    "terminationMessagePolicy",
)  # fmt: skip


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


@dataclass(frozen=True)
class _Job:
    """All that is common to the templates of one allocation."""

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
    job = _Job(settings, partition, environment, plan, kind, shape, said, file, pods, name)
    conflicts: list[Conflict] = []
    ranks = range(pods) if kind.each_pod else (None,)
    workloads = tuple(_workload(job, rank, conflicts) for rank in ranks)
    if conflicts:
        lines = dict.fromkeys(f"{partition.id}: manifest of kind {kind.name!r}: {one}" for one in conflicts)
        raise UsageError("\n".join(lines))
    inside = replace(plan, directory=WORK, scheduler_options={})
    return Rendered(
        config_map=_config_map(job, inside, payload),
        service=_service(job) if _leader(job) and not kind.own_service else None,
        workloads=workloads,
        kind=kind,
        plan=inside,
    )


def _leader(job: _Job) -> str:
    """Return the host name of rank 0, empty where pods hand its address to each other."""
    if not job.settings.service or job.pods < 2:
        return ""
    if not job.kind.leader or (job.settings.generate_name and not job.kind.each_pod):
        raise UsageError(
            f"{job.partition.id}: with generate_name the host of rank 0 is not known before; leave service: true out"
            if job.kind.leader
            else f"{job.partition.id}: kind {job.kind.name!r} says no leader, so that service: true cannot be had"
        )
    return job.kind.leader.replace("{name}", job.name)


def _workload(job: _Job, rank: int | None, conflicts: list[Conflict]) -> dict[str, Any]:
    kind = job.kind
    merged: dict[str, Any] = merge(job.settings.manifest or None, _frame(job, rank), conflicts)
    first = 0
    for rule in kind.templates:
        pods = 1 if kind.each_pod else _count(rule, job.pods - first)
        if pods == 0:
            _remove(merged, rule.remove)
            continue
        known = rank if kind.each_pod else (first if pods == 1 else None)
        _put_template(job, merged, rule, known, conflicts)
        first += pods
        for path in rule.count:
            _put(merged, path, merge(at(merged, path), Must(pods), conflicts, ".".join(path)), conflicts)
    if first < job.pods and not kind.each_pod:
        raise UsageError(
            f"{job.partition.id}: kind {kind.name!r} has templates for {first} pods, not for {job.pods}"
        )
    _refuse_other_name(merged["metadata"], job.settings.generate_name, conflicts)
    # In the order in which people write them, whatever a manifest has said first.
    head = {key: merged[key] for key in ("apiVersion", "kind", "metadata")}
    return {**head, **merged}


def _refuse_other_name(metadata: dict[str, Any], generated: bool, conflicts: list[Conflict]) -> None:
    """Refuse a name where the server is to complete one, and the other way round."""
    other = "name" if generated else "generateName"
    if metadata.get(other) is not None:
        conflicts.append(
            Conflict(f"metadata.{other}", metadata[other], f"generate_name: {str(generated).lower()}")
        )


def _count(rule: TemplateRule, left: int) -> int:
    return left if rule.pods is None else min(rule.pods, left)


def _frame(job: _Job, rank: int | None) -> dict[str, Any]:
    """Return our half of the object around the templates."""
    settings, kind = job.settings, job.kind
    name = job.name + (f"-{rank}" if rank is not None else "")
    named = {"generateName": Must(f"{name}-")} if settings.generate_name else {"name": Must(name)}
    extra = {kind.limit_label: str(deadlines(job.plan, settings)[0])} if kind.limit_label else {}
    metadata: dict[str, Any] = {
        **named,
        "labels": {**extra, **settings.labels, **{key: Must(value) for key, value in job.labels.items()}},
    }
    if settings.annotations:
        metadata["annotations"] = dict(settings.annotations)
    if settings.namespace:
        metadata["namespace"] = Must(settings.namespace)
    frame: dict[str, Any] = {
        "apiVersion": Must(kind.resource.api_version),
        "kind": Must(kind.resource.kind),
        "metadata": metadata,
    }
    frame = _over(frame, kind.manifest)
    frame = _over(frame, every_must(kind.must))
    if job.pods > 1:
        frame = _over(frame, every_must(kind.several))
    for path, value in (
        (kind.deadline, deadlines(job.plan, settings)[1]),
        (kind.ttl, round(settings.ttl_s)),
        (kind.devices, Must(str(job.shape.devices)) if job.shape.devices else None),
    ):
        if path and value is not None:
            _put(frame, path, value, [])
    return frame


def _over(frame: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return *frame* with a copy of *more* in it, mapping by mapping."""
    for key, value in more.items():
        old = frame.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        frame[key] = _over(dict(old), value) if both else deepcopy(value)  # type: ignore[arg-type]  # `both` says so
    return frame


def _put_template(
    job: _Job, merged: dict[str, Any], rule: TemplateRule, rank: int | None, conflicts: list[Conflict]
) -> None:
    """Put our pod template into *merged* at its place."""
    theirs = at(merged, rule.path) if rule.path else merged
    image = job.settings.image or str((job.environment.extra.get("container") or {}).get("image") or "")
    workdir = str((job.environment.extra.get("container") or {}).get("workdir") or "")
    pods = Pods(
        settings=job.settings,
        kind=job.kind,
        plan=job.plan,
        shape=job.shape,
        labels=job.labels,
        python=job.environment.python,
        image=image,
        pods=job.pods,
        rank=rank,
        payload=job.payload,
        name=job.name,
        leader=_leader(job),
        workdir=workdir,
    )
    where = ".".join(rule.path)
    template = merge(theirs, pod_template(pods), conflicts, where)
    _finish(job, template["spec"], conflicts, where)
    if rule.path:
        _put(merged, rule.path, template, conflicts)
    else:
        merged.update(template)


def _finish(job: _Job, spec: dict[str, Any], conflicts: list[Conflict], where: str) -> None:
    """Put in what depends on both halves: the probe, the choice of nodes; take out what nothing uses."""
    worker = next(one for one in spec["containers"] if one.get("name") == job.kind.container)
    if not worker.get("args"):
        worker.pop("args", None)
    if not worker.get("image"):
        raise UsageError(
            f"{job.partition.id}: no image is named: set image under kubernetes:, or container in environment "
            f"{job.environment.name!r}"
        )
    if job.settings.probe:
        probe = {key: deepcopy(worker[key]) for key in _PROBES if key in worker}
        command = [job.environment.python, "-m", "pytest_mlhpc.batch.probe", *worker["command"][-1:]]
        if "env" in probe and job.kind.rank.variable:
            # Operators tell their variable to containers only, and the probe asks of this node alone.
            one = {"name": "MLHPC_POD_RANK", "value": "0"}
            probe["env"] = [one if found.get("name") == one["name"] else found for found in probe["env"]]
        probe = {"name": PROBE, "command": Must(command), **probe}
        spec["initContainers"] = merge(
            spec.get("initContainers") or [], [probe], conflicts, f"{where}.spec.initContainers"
        )
    mounted = json.dumps(
        [one.get("volumeMounts") for one in (*spec["containers"], *spec.get("initContainers", ()))]
    )
    spec["volumes"] = [
        one for one in spec["volumes"] if one.get("name") != "mlhpc-shm" or '"mlhpc-shm"' in mounted
    ]
    if affinity := _affinity(job, spec, conflicts, f"{where}.spec.affinity"):
        spec["affinity"] = affinity


def _affinity(job: _Job, spec: dict[str, Any], conflicts: list[Conflict], path: str) -> dict[str, Any]:
    """Return the manifest's choice of nodes together with ours."""
    theirs = merge(spec.get("affinity"), {}, conflicts, path)
    try:
        return with_affinity(
            theirs,
            nodelist=job.plan.nodelist,
            excluded=job.plan.excluded_nodes,
            allocation=job.plan.allocation_id,
            spread=job.settings.spread if job.pods > 1 else "none",
        )
    except (TypeError, AttributeError):
        conflicts.append(Conflict(path, theirs, None, "an affinity of the API"))
        return {}


def _config_map(job: _Job, inside: Plan, payload: bytes | None) -> dict[str, Any]:
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


def _service(job: _Job) -> dict[str, Any]:
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


def _metadata(job: _Job) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": job.name, "labels": {**job.settings.labels, **job.labels}}
    if job.settings.namespace:
        metadata["namespace"] = job.settings.namespace
    return metadata


def _put(found: Any, path: Path, value: Any, conflicts: list[Conflict]) -> None:
    """Set the value at *path*, making mappings, and items of lists, on the way."""
    for index, part in enumerate(path):
        last = index == len(path) - 1
        if isinstance(found, list):
            if last:
                found[found.index(item_of(found, part))] = value
                return
            inner = item_of(found, part)
            if not isinstance(inner, (dict, list)):
                found.append(inner := {"name": part})
        elif last:
            found[part] = value
            return
        else:
            inner = found.get(part)
            if not isinstance(inner, (dict, list)):
                if inner is not None:
                    conflicts.append(Conflict(".".join(path[: index + 1]), inner, None, "a mapping"))
                inner = found[part] = {}
        found = inner


def _remove(found: Any, path: Path) -> None:
    holder = at(found, path[:-1])
    if path and isinstance(holder, dict):
        holder.pop(path[-1], None)
    elif path and isinstance(holder, list) and (found := item_of(holder, path[-1])) is not None:
        holder.remove(found)
