"""The objects of an allocation: Secret, Service and workloads, rendered from a plan, and a preview of them.

Open it to see what is created in the cluster. The functions are pure. The pod's part is in ``pod_template.py``.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Final

from pytest_mlhpc.config.model import Environment, Partition
from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.node.protocol.plan import Plan, RunPlan
from pytest_mlhpc.node.protocol.schema import to_json
from pytest_mlhpc.node.run_files import packed_sets, staged_archive
from pytest_mlhpc.provision.kubernetes.causes import PROBE
from pytest_mlhpc.provision.kubernetes.objects import (
    ALLOCATION,
    SECRET,
    SERVICE,
    FixedValue,
    Identity,
    Manifest,
    ManifestConflict,
    Resource,
    mark_must,
    merge,
    object_labels,
    object_name,
    overlay,
    remove_at,
    set_at,
    value_at,
)
from pytest_mlhpc.provision.kubernetes.pod_template import (
    WORK,
    RenderContext,
    common_labels,
    deadlines,
    files_secret,
    pod_size,
    pod_template,
    with_affinity,
)
from pytest_mlhpc.provision.kubernetes.settings import (
    KubernetesSettings,
    TemplateRule,
    WorkloadKind,
    kind_of,
    settings_of,
)

#: The API server refuses a Secret of more (kubernetes.io/docs/concepts/configuration/secret, "Size limit").
MAX_SECRET_BYTES: Final = 1 << 20

#: Fields that the probe's container shares with the worker's, so that both see the same node.
_PROBE_FIELDS: Final = (
    "image", "imagePullPolicy", "workingDir", "env", "envFrom", "resources", "volumeMounts", "securityContext",
    "terminationMessagePolicy",
)  # fmt: skip

#: Placeholders for a session's ids, of their form, so that a preview could be created.
_PREVIEW_ID: Final = "00000000-0000-7000-8000-000000000000"
_PREVIEW_SHA256: Final = "0" * 64


@dataclass(frozen=True)
class RenderedObjects:
    """The objects of an allocation, in the order of creation."""

    secret: dict[str, Any]
    files: dict[str, Any] | None  #: a second Secret, with the files of the runs
    service: dict[str, Any] | None
    workloads: tuple[dict[str, Any], ...]
    kind: WorkloadKind

    def objects(self) -> list[tuple[Resource, Manifest]]:
        """Return the manifests that there are, each with its kind."""
        found = ((SECRET, self.secret), (SECRET, self.files), (SERVICE, self.service))
        others = [(resource, one) for resource, one in found if one is not None]
        return [*others, *((self.kind.resource, one) for one in self.workloads)]


def render(  # noqa: PLR0917 - from settings to content
    settings: KubernetesSettings,
    partition: Partition,
    environment: Environment,
    plan: Plan,
    payload: bytes | None,
    identity: Identity,
    round_: int = 0,
) -> RenderedObjects:
    """Return the objects that run *plan*. *payload* is the zip's content; None: the image contains this package.

    *round_* counts how often the allocation was provisioned again; each round has object names of its own.

    Raises:
        UsageError: the manifest contradicts a run's needs, the kind cannot have so many pods, no image is named, or plan
            and payload are too large. All contradictions are named at once.
    """
    kind, pods = kind_of(settings), plan.nodes + plan.spares
    if kind.most and pods > kind.most:
        raise UsageError(
            f"{partition.id}: {kind.resource.kind} has at most {kind.most} pod{'s' * (kind.most > 1)} here, not {pods}"
        )
    labels = object_labels(plan, identity)
    file = f"{plan.payload_sha256}.zip" if payload is not None else ""
    shape = pod_size(plan, partition, settings)
    name = object_name(plan.allocation_id, round_)
    job = RenderContext(
        settings,
        partition,
        environment,
        plan,
        kind,
        shape,
        labels,
        file,
        pods,
        name,
        _leader_host(settings, kind, pods, name),
    )
    conflicts: list[ManifestConflict] = []
    ranks = range(pods) if kind.each_pod else (None,)
    workloads = tuple(workload_object(job, rank, conflicts) for rank in ranks)
    if conflicts:
        lines = dict.fromkeys(f"{partition.id}: manifest of kind {kind.name!r}: {one}" for one in conflicts)
        raise UsageError("\n".join(lines))
    inside = replace(plan, directory=WORK, scheduler_options={})
    return RenderedObjects(
        secret=_plan_secret(job, inside, payload),
        files=_files_secret(job) if packed_sets(plan) and settings.agent else None,
        service=_service(job) if job.leader and not kind.own_service else None,
        workloads=workloads,
        kind=kind,
    )


def _leader_host(settings: KubernetesSettings, kind: WorkloadKind, pods: int, name: str) -> str:
    """Return rank 0's host name; empty if its address is published by an annotation."""
    if not settings.service or pods < 2:
        return ""
    if not kind.leader:
        raise UsageError(f"kind {kind.name!r} names no leader, so that service: true is not possible")
    return kind.leader.replace("{name}", name)


def _plan_secret(job: RenderContext, inside: Plan, payload: bytes | None) -> dict[str, Any]:
    """Return the Secret with the plan (the runs' variables and nonces), and the payload; without an agent, the variables alone."""
    content = {"plan.json": json.dumps(to_json(inside)).encode()}
    if not job.settings.agent:
        content = {name: value.encode() for name, value in inside.runs[0].variables.items()}
    elif payload is not None:
        content[job.payload] = payload
    text = "plan and payload have {size} bytes, a Secret takes {most}; install pytest-mlhpc in the image, or pack fewer runs"
    return _secret(job, job.name, content, text)


def _files_secret(job: RenderContext) -> dict[str, Any]:
    """Return the Secret with an archive of each set of files that the runs have.

    Raises:
        UsageError: they cannot be read, or are too large together.
    """
    try:
        content = {f"{name}.tar": staged_archive(files) for name, files in packed_sets(job.plan).items()}
    except OSError as error:
        raise UsageError(f"files of a test: cannot read {error.filename}: {error.strerror}") from error
    text = "the files of the tests have {size} bytes together, packed; a Secret takes {most}; pack fewer runs, or name a volume "
    return _secret(job, files_secret(job.name), content, f"{text}for files (`here` of an entry of `volumes`)")


def _secret(job: RenderContext, name: str, content: Mapping[str, bytes], too_large: str) -> dict[str, Any]:
    """Return a Secret with *content*.

    Raises:
        UsageError: it has more bytes than a Secret takes, with the text *too_large*.
    """
    size = sum(map(len, content.values()))
    if size > MAX_SECRET_BYTES:
        raise UsageError(f"{job.partition.id}: {too_large.format(size=size, most=MAX_SECRET_BYTES)}")
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "Opaque",
        "metadata": {**_metadata(job), "name": name},
        "immutable": True,
        "data": {key: base64.b64encode(data).decode("ascii") for key, data in content.items()},
    }


def _service(job: RenderContext) -> dict[str, Any]:
    """Return the headless Service that names each pod, also before it is ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {ALLOCATION: job.plan.allocation_id},
        },
    }


def _metadata(job: RenderContext) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": job.name, "labels": {**common_labels(job.settings), **job.labels}}
    if job.settings.namespace:
        metadata["namespace"] = job.settings.namespace
    return metadata


def workload_object(
    job: RenderContext, rank: int | None, conflicts: list[ManifestConflict]
) -> dict[str, Any]:
    """Return the workload object, or the pod *rank* if each pod is an object. Contradictions go to *conflicts*.

    Raises:
        UsageError: no image is named, or the kind has no templates for so many pods.
    """
    kind = job.kind
    merged: dict[str, Any] = merge(job.settings.manifest or None, _workload_frame(job, rank), conflicts)
    first = 0
    for rule in kind.templates:
        pods = 1 if kind.each_pod else _template_pods(rule, job.pods - first)
        if pods == 0:
            remove_at(merged, rule.remove)
            continue
        known = rank if kind.each_pod else (first if pods == 1 else None)
        _put_template(job, merged, rule, known, conflicts)
        first += pods
        for path in rule.count:
            set_at(
                merged,
                path,
                merge(value_at(merged, path), FixedValue(pods), conflicts, ".".join(path)),
                conflicts,
            )
    if first < job.pods and not kind.each_pod:
        raise UsageError(
            f"{job.partition.id}: kind {kind.name!r} has templates for {first} pods, not for {job.pods}"
        )
    _refuse_other_name(merged["metadata"], job.settings.generate_name, conflicts)
    # In the customary order, whatever the manifest's order is.
    head = {key: merged[key] for key in ("apiVersion", "kind", "metadata")}
    return {**head, **merged}


def _refuse_other_name(metadata: dict[str, Any], generated: bool, conflicts: list[ManifestConflict]) -> None:
    """Refuse a name if the server generates it, and a generated one otherwise."""
    other = "name" if generated else "generateName"
    if metadata.get(other) is not None:
        conflicts.append(
            ManifestConflict(f"metadata.{other}", metadata[other], f"generate_name: {str(generated).lower()}")
        )


def _template_pods(rule: TemplateRule, left: int) -> int:
    return left if rule.pods is None else min(rule.pods, left)


def _workload_frame(job: RenderContext, rank: int | None) -> dict[str, Any]:
    """Return our part of the object around the pod templates."""
    settings, kind = job.settings, job.kind
    name = job.name + (f"-{rank}" if rank is not None else "")
    named = {"generateName": FixedValue(f"{name}-")} if settings.generate_name else {"name": FixedValue(name)}
    extra = {kind.limit_label: str(deadlines(job.plan, settings)[0])} if kind.limit_label else {}
    metadata: dict[str, Any] = {
        **named,
        "labels": {
            **extra,
            **settings.labels,
            **{key: FixedValue(value) for key, value in job.labels.items()},
        },
    }
    if settings.annotations:
        metadata["annotations"] = dict(settings.annotations)
    if settings.namespace:
        metadata["namespace"] = FixedValue(settings.namespace)
    frame: dict[str, Any] = {
        "apiVersion": FixedValue(kind.resource.api_version),
        "kind": FixedValue(kind.resource.kind),
        "metadata": metadata,
    }
    frame = overlay(frame, kind.manifest)
    frame = overlay(frame, mark_must(kind.must))
    if job.pods > 1:
        frame = overlay(frame, mark_must(kind.several))
    for path, value in (
        (kind.deadline, deadlines(job.plan, settings)[1]),
        (kind.ttl, round(settings.ttl_s)),
        (kind.devices, FixedValue(str(job.shape.devices)) if job.shape.devices else None),
    ):
        if path and value is not None:
            set_at(frame, path, value, [])
    return frame


def _put_template(
    job: RenderContext,
    merged: dict[str, Any],
    rule: TemplateRule,
    rank: int | None,
    conflicts: list[ManifestConflict],
) -> None:
    """Merge our pod template into *merged* at its place."""
    theirs = value_at(merged, rule.path) if rule.path else merged
    where = ".".join(rule.path)
    template = merge(theirs, pod_template(job, rank), conflicts, where)
    _complete_spec(job, template["spec"], conflicts, where)
    if rule.path:
        set_at(merged, rule.path, template, conflicts)
    else:
        merged.update(template)


def _complete_spec(
    job: RenderContext, spec: dict[str, Any], conflicts: list[ManifestConflict], where: str
) -> None:
    """Add the probe and the affinity, which depend on both manifests; remove an unused shared-memory volume."""
    worker = next(one for one in spec["containers"] if one.get("name") == job.kind.container)
    if not worker.get("args"):
        worker.pop("args", None)
    if not worker.get("image"):
        raise UsageError(
            f"{job.partition.id}: no image is named: set image under kubernetes:, or container in environment "
            f"{job.environment.name!r}"
        )
    if job.settings.probe and job.settings.agent:
        probe = {key: deepcopy(worker[key]) for key in _PROBE_FIELDS if key in worker}
        command = [job.environment.python, "-m", "pytest_mlhpc.node.batch.probe", *worker["command"][-1:]]
        if "env" in probe and job.kind.rank.variable:
            # Operators set their variable in containers only, and the probe checks this node alone.
            one = {"name": "MLHPC_POD_RANK", "value": "0"}
            probe["env"] = [one if found.get("name") == one["name"] else found for found in probe["env"]]
        probe = {"name": PROBE, "command": FixedValue(command), **probe}
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


def _affinity(
    job: RenderContext, spec: dict[str, Any], conflicts: list[ManifestConflict], path: str
) -> dict[str, Any]:
    """Return the manifest's affinity with ours added."""
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
        conflicts.append(ManifestConflict(path, theirs, None, "an affinity of the API"))
        return {}


def preview(partition: Partition, environment: Environment) -> str:
    """Return the manifests of a run on up to two nodes, with a rank on each device (on CPUs: on each node).

    The Secret is a comment only, as it holds the plan and the payload.

    Raises:
        UsageError: they cannot be rendered.
    """
    import yaml

    try:
        rendered = render_preview(partition, environment)
    except UsageError as error:
        raise UsageError(f"environment {environment.name}: {error}") from error
    objects: list[Any] = [*([rendered.service] if rendered.service else []), *rendered.workloads]
    name = rendered.secret["metadata"]["name"]
    agent = settings_of(partition).agent
    content = "plan.json and the payload's zip" if agent else "the variables of the program"
    head = f"# Created before these: Secret {name}, with {content}.\n"
    return head + yaml.safe_dump_all(objects, sort_keys=False, width=110, allow_unicode=True)


def render_preview(partition: Partition, environment: Environment, **overrides: Any) -> RenderedObjects:
    """Return the objects that :func:`preview` shows; *overrides* are a test's.

    Raises:
        UsageError: they cannot be rendered.
    """
    nodes = min(2, partition.nodes.max)
    each = 1 if partition.accelerator == "cpu" else max(1, partition.nodes.devices)
    settings = settings_of(partition, overrides)
    plan = preview_plan(partition, nodes, nodes * each)
    return render(settings, partition, environment, plan, b"", Identity(_PREVIEW_ID, "user"))


def preview_plan(partition: Partition, nodes: int, ranks: int) -> Plan:
    """Return an example plan of one run of *ranks* processes on *nodes* pods."""
    run = RunPlan(
        run_id=_PREVIEW_ID,
        nonce="",
        attempt=0,
        workload="command",
        parameters={},
        nodes=nodes,
        ranks=ranks,
        cores_per_rank=max(1, partition.nodes.cores * nodes // ranks),
        device_type=partition.accelerator,
        launcher="plain" if ranks == 1 else "torchrun",
        time_limit_s=partition.time_limit_s,
        steps=0,
        warmup_steps=0,
    )
    return Plan(_PREVIEW_ID, _PREVIEW_SHA256, "/", nodes, partition.time_limit_s, (run,))


def render_refusal(
    partition: Partition, environment: Environment, nodes: int, ranks: int, overrides: Mapping[str, Any]
) -> str:
    """Return why a run of this shape can never be rendered, or an empty string; *overrides* are its test's."""
    try:
        settings = settings_of(partition, overrides)
        render(
            settings,
            partition,
            environment,
            preview_plan(partition, nodes, ranks),
            b"",
            Identity(_PREVIEW_ID, "user"),
        )
    except UsageError as error:
        return str(error)
    return ""
