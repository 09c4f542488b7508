"""A workload object: our frame and our pods' templates, put into a copy of the caller's manifest. Pure."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any, Final

from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.provision.kubernetes.affinity import with_affinity
from pytest_mlhpc.provision.kubernetes.kinds import TemplateRule
from pytest_mlhpc.provision.kubernetes.merge import Conflict, Must, every_must, merge
from pytest_mlhpc.provision.kubernetes.paths import at, over, put, remove
from pytest_mlhpc.provision.kubernetes.template import PROBE, Making, deadlines, pod_template

#: What the init container has from the worker's: it looks at the same node through the same eyes.
_PROBES: Final = (
    "image", "imagePullPolicy", "workingDir", "env", "envFrom", "resources", "volumeMounts", "securityContext",
    "terminationMessagePolicy",
)  # fmt: skip


def workload(job: Making, rank: int | None, conflicts: list[Conflict]) -> dict[str, Any]:
    """Return the workload object, or that of the pod *rank* where each is one; what a manifest may not say is noted.

    Raises:
        UsageError: no image is named, or the kind has no templates for so many pods.
    """
    kind = job.kind
    merged: dict[str, Any] = merge(job.settings.manifest or None, _frame(job, rank), conflicts)
    first = 0
    for rule in kind.templates:
        pods = 1 if kind.each_pod else _count(rule, job.pods - first)
        if pods == 0:
            remove(merged, rule.remove)
            continue
        known = rank if kind.each_pod else (first if pods == 1 else None)
        _put_template(job, merged, rule, known, conflicts)
        first += pods
        for path in rule.count:
            put(merged, path, merge(at(merged, path), Must(pods), conflicts, ".".join(path)), conflicts)
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


def _frame(job: Making, rank: int | None) -> dict[str, Any]:
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
    frame = over(frame, kind.manifest)
    frame = over(frame, every_must(kind.must))
    if job.pods > 1:
        frame = over(frame, every_must(kind.several))
    for path, value in (
        (kind.deadline, deadlines(job.plan, settings)[1]),
        (kind.ttl, round(settings.ttl_s)),
        (kind.devices, Must(str(job.shape.devices)) if job.shape.devices else None),
    ):
        if path and value is not None:
            put(frame, path, value, [])
    return frame


def _put_template(
    job: Making, merged: dict[str, Any], rule: TemplateRule, rank: int | None, conflicts: list[Conflict]
) -> None:
    """Put our pod template into *merged* at its place."""
    theirs = at(merged, rule.path) if rule.path else merged
    where = ".".join(rule.path)
    template = merge(theirs, pod_template(job, rank), conflicts, where)
    _finish(job, template["spec"], conflicts, where)
    if rule.path:
        put(merged, rule.path, template, conflicts)
    else:
        merged.update(template)


def _finish(job: Making, spec: dict[str, Any], conflicts: list[Conflict], where: str) -> None:
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


def _affinity(job: Making, spec: dict[str, Any], conflicts: list[Conflict], path: str) -> dict[str, Any]:
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
