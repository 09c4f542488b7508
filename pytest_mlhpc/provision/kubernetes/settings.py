"""What one allocation asks for: the settings of its partition with a test's overrides applied, and its kind of workload.

Open it for the defaults, to see how a test's options are merged, and how one provisioner serves Jobs, bare pods and operators'
kinds: ``kinds/*.yaml`` describe the shipped ones, in the form of ``schema.CustomKind``. ``schema.py`` checks the same fields by
pydantic, whose import is slow; this module imports without it. Objects are dicts as in JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any, Final

from pytest_mlhpc.config.model import Partition
from pytest_mlhpc.errors import UsageError, did_you_mean
from pytest_mlhpc.provision.kubernetes.causes import FailureCause, find_cause, reason_text
from pytest_mlhpc.provision.kubernetes.objects import RANK, KeyPath, Resource, value_at

#: Seconds that each cause of waiting may last, unless the partition says otherwise.
PATIENCE: Final[Mapping[str, float]] = {
    "unschedulable": 86400.0,  # full clusters: as long as a Slurm job may wait
    "admission": 86400.0,  # a queue such as Kueue's, or a scheduling gate
    "quota": 3600.0,  # other jobs of the namespace may end
    "image": 600.0,  # registries have bad minutes; a name that does not exist gives the same error
    "config": 120.0,  # a Secret or ConfigMap may come a moment later
    "volume": 600.0,
    "crash": 60.0,
    "unknown": 600.0,
}

#: The extended resource by which device plug-ins offer accelerators: NVIDIA/k8s-device-plugin,
#: ROCm/k8s-device-plugin, intel/intel-device-plugins-for-kubernetes. IPUs and wafers have none.
DEVICE_RESOURCES: Final[Mapping[str, str]] = {
    "cuda": "nvidia.com/gpu",
    "rocm": "amd.com/gpu",
    "xpu": "gpu.intel.com/i915",
}

#: Seven days, like a detached session's lease: until then its results can be read from the pods' logs.
TTL_S: Final = 604800.0
#: Kubernetes' default time between SIGTERM and SIGKILL of a pod.
GRACE_S: Final = 30.0
#: How long failed workloads are retained.
KEEP_FOR_S: Final = 86400.0

#: Options that are merged by key.
_MERGED_OPTIONS: Final = ("labels", "annotations", "node_selector", "patience", "resources")


@dataclass(frozen=True)
class Volume:
    """One volume and its mount. ``source`` is the volume's source as in the API, without the name."""

    name: str
    mount: str
    source: Mapping[str, Any]
    read_only: bool = False
    sub_path: str = ""
    here: str = ""  #: where this machine sees it: files that are too large for a Secret go there


@dataclass(frozen=True)
class KubernetesSettings:
    """How workloads of one partition are requested. Texts are empty where nothing was given; times are in seconds.

    ``device_resource`` is resolved, and empty if pods request no devices. ``manifest`` is the user's object and must not be
    changed. ``custom`` describes a kind of the site's own, in the form of the files in ``kinds/``.
    """

    context: str = ""
    kubeconfig: str = ""
    namespace: str = ""
    kind: str = "job"
    image: str = ""
    image_pull_policy: str = ""
    image_pull_secrets: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    generate_name: bool = False
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()
    priority_class: str = ""
    service_account: str = ""
    runtime_class: str = ""
    device_resource: str = ""
    requests: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)
    volumes: tuple[Volume, ...] = ()
    shared_memory: int = 0  #: bytes of /dev/shm; 0: half of the pod's memory
    run_as_user: int | None = None
    run_as_group: int | None = None
    fs_group: int | None = None
    security: str = "restricted"  #: or as_manifest
    spread: str = "required"  #: pods of one allocation on different nodes: none, preferred, required
    service: bool = False  #: create a headless Service, so that pods resolve each other's names
    manifest: Mapping[str, Any] = field(default_factory=dict, repr=False)
    custom: Mapping[str, Any] = field(default_factory=dict)
    patience: Mapping[str, float] = field(default_factory=lambda: dict(PATIENCE))
    keep: str = "never"  #: or on-failure, always
    keep_for_s: float = KEEP_FOR_S
    reprovision: int = 2  #: how often an allocation is provisioned again without unfit nodes
    probe: bool = True
    agent: bool = True  #: False: a program is the command of its container, which needs no Python
    ttl_s: float = TTL_S
    max_time_s: float | None = None  #: longest allocation; None: any
    grace_s: float = GRACE_S


def settings_of(partition: Partition, overrides: Mapping[str, Any] | None = None) -> KubernetesSettings:
    """Return the settings of a partition whose scheduler is kubernetes, with a test's *overrides* applied.

    Both were checked by ``KubernetesOptions``: the partition when it was loaded, the test at collection.
    """
    options = merge_options(partition.scheduler_options, overrides or {})
    names = {"keep_for": "keep_for_s", "ttl": "ttl_s", "max_time": "max_time_s", "grace": "grace_s"}
    amounts = options.pop("resources", None) or {}
    given: dict[str, Any] = {
        names.get(name, name): tuple(value) if isinstance(value, list) else value
        for name, value in options.items()
        if value is not None
    }
    given["patience"] = {**PATIENCE, **{k: v for k, v in given.get("patience", {}).items() if v is not None}}
    given["volumes"] = tuple(map(_volume, given.get("volumes", ())))
    given["tolerations"] = tuple(
        {key: value for key, value in one.items() if value is not None}
        for one in given.get("tolerations", ())
    )
    given["device_resource"] = _device_resource(partition, given.get("device_resource", ""))
    for name in ("requests", "limits"):
        given[name] = dict(amounts.get(name) or {})
    return KubernetesSettings(**given)


def merge_options(options: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return *options* with *overrides* applied; mappings are merged by key. Neither is changed."""
    merged = {**options, **overrides}
    for name in _MERGED_OPTIONS:
        if options.get(name) and overrides.get(name):
            given = {key: value for key, value in overrides[name].items() if value is not None}
            merged[name] = {**options[name], **given}
    if (both := merged.get("resources")) and options.get("resources") and overrides.get("resources"):
        merged["resources"] = {
            part: {**(options["resources"].get(part) or {}), **(overrides["resources"].get(part) or {})}
            for part in both
        }
    return merged


def _device_resource(partition: Partition, option: str) -> str:
    if option == "none" or not partition.nodes.devices:
        return ""
    return option or DEVICE_RESOURCES.get(partition.accelerator, "")


def _volume(option: Mapping[str, Any]) -> Volume:
    """Return the volume; one of the option's keys names its source."""
    names = ("name", "mount", "read_only", "sub_path", "here")
    return Volume(source=_source(option), **{name: option[name] for name in names if option.get(name)})


#: Option -> kind of a volume's source, and the field that has the option's value.
_SOURCES: Final = {
    "claim": ("persistentVolumeClaim", "claimName"),
    "host_path": ("hostPath", "path"),
    "config_map": ("configMap", "name"),
    "secret": ("secret", "secretName"),
}


def _source(option: Mapping[str, Any]) -> Mapping[str, Any]:
    for name, (kind, key) in _SOURCES.items():
        if option.get(name):
            return {kind: {key: option[name]}}
    if template := option.get("template"):
        claim: dict[str, Any] = {
            "accessModes": list(template.get("access") or ["ReadWriteOnce"]),
            "resources": {"requests": {"storage": str(template["size"])}},
        }
        if template.get("storage_class"):
            claim["storageClassName"] = template["storage_class"]
        return {"ephemeral": {"volumeClaimTemplate": {"spec": claim}}}
    empty = option.get("empty_dir") or {}
    found: dict[str, Any] = {"medium": "Memory"} if empty.get("medium") == "memory" else {}
    if empty.get("size"):
        found["sizeLimit"] = str(empty["size"])
    return {"emptyDir": found}


#: One file for each kind, in the form of ``custom:`` (``schema.CustomKind``).
_FOLDER: Final = resources.files(__package__) / "kinds"


@dataclass(frozen=True)
class TemplateRule:
    """Pods of one template. ``pods`` is their number, None: all that no other template has; ``count``: where it is written.

    ``remove`` is taken out of the object if this template has no pods.
    """

    path: KeyPath
    pods: int | None = None
    count: tuple[KeyPath, ...] = ()
    remove: KeyPath = ()


@dataclass(frozen=True)
class RankRule:
    """Where a pod's rank is found: an annotation, a label, or a variable that the kind's operator sets."""

    annotation: str = ""
    label: str = ""
    variable: str = ""

    @property
    def field_path(self) -> str:
        """The field of the pod that has it, where no variable does."""
        kind, name = ("annotations", self.annotation) if self.annotation else ("labels", self.label)
        return f"metadata.{kind}['{name}']"


@dataclass(frozen=True)
class StatusRule:
    """The meaning of condition types, or of values at ``phase``. Names are compared exactly."""

    conditions: KeyPath = ("status", "conditions")
    phase: KeyPath = ()
    succeeded: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    suspended: tuple[str, ...] = ()
    running: tuple[str, ...] = ()


@dataclass(frozen=True)
class QueueRule:
    """The object of a queueing system that says why a workload waits.

    Its *label* holds the workload's uid. ``admitted`` conditions have to become true; ``evicted`` ones are true once the
    queue has taken the nodes back.
    """

    resource: Resource
    label: str
    admitted: tuple[str, ...]
    evicted: tuple[str, ...] = ()

    def waiting_reason(self, found: Mapping[str, Any]) -> str:
        """Return why *found* is not admitted, or was evicted; empty if neither."""
        conditions = value_at(found, ("status", "conditions")) or ()
        for condition in conditions:
            if condition.get("type") in self.evicted and condition.get("status") == "True":
                return _condition_text(condition)
        for condition in conditions:
            if condition.get("type") in self.admitted and condition.get("status") == "False":
                return _condition_text(condition)
        return ""


@dataclass(frozen=True)
class WorkloadStatus:
    """The state of a workload: waiting, suspended, running, succeeded or failed, with the cluster's text.

    ``cause`` says why it does not go on, if its pods cannot tell.
    """

    state: str
    text: str = ""
    cause: FailureCause | None = None


@dataclass(frozen=True)
class WorkloadKind:
    """One kind of workload.

    ``each_pod``: each pod is an object of its own. ``manifest`` holds the kind's own fields; a user's manifest may not change
    those in ``must``, and ``several`` are more of these for several pods. ``most`` is the largest number of pods, 0: any.
    ``container`` runs our agent. ``deadline``, ``ttl``, ``suspend`` and ``devices`` are paths, empty if the kind has no such
    field. ``leader`` is rank 0's host name with ``{name}`` for the object's; ``own_service``: the operator makes it
    resolvable. ``queue_label`` names the queue and is required. ``limit_label`` holds the time limit in seconds.
    """

    name: str
    resource: Resource
    templates: tuple[TemplateRule, ...]
    rank: RankRule = RankRule()
    status: StatusRule = StatusRule()
    each_pod: bool = False
    most: int = 0
    container: str = "worker"
    manifest: Mapping[str, Any] = field(default_factory=dict)
    must: Mapping[str, Any] = field(default_factory=dict)
    several: Mapping[str, Any] = field(default_factory=dict)
    deadline: KeyPath = ()
    ttl: KeyPath = ()
    suspend: KeyPath = ()
    devices: KeyPath = ()
    leader: str = ""
    queue_label: str = ""
    queue: QueueRule | None = None
    limit_label: str = ""
    own_service: bool = False

    def status_of(self, found: Mapping[str, Any]) -> WorkloadStatus:
        """Return the status of the workload object *found*, as this kind of workload writes it."""
        rule = self.status
        conditions = {
            state: _true_condition(found, rule, names) for state, names in _conditions_by_state(rule)
        }
        for state in ("failed", "succeeded"):
            if (condition := conditions[state]) is not None:
                text = _condition_text(condition)
                reason = str(condition.get("reason") or "")
                return WorkloadStatus(
                    state, text, find_cause("workload", reason, text) if state == "failed" else None
                )
        suspended = conditions["suspended"] or (
            {} if self.suspend and value_at(found, self.suspend) is True else None
        )
        if suspended is not None:
            text = (
                _condition_text(suspended)
                or f"{self.resource.kind} is suspended: its queue has not let it begin"
            )
            return WorkloadStatus("suspended", text, FailureCause("never_scheduled", text, "admission"))
        condition = conditions["running"]
        return WorkloadStatus(
            "running" if condition is not None else "waiting", _condition_text(condition or {})
        )

    def rank_of(self, pod: Mapping[str, Any]) -> int | None:
        """Return the rank of *pod* by our label, else by the kind's rule; None if it has none (yet)."""
        meta = pod.get("metadata") or {}
        labels, annotations = meta.get("labels") or {}, meta.get("annotations") or {}
        rank = labels.get(RANK)
        if rank is None and self.rank.annotation:
            rank = annotations.get(self.rank.annotation)
        if rank is None and self.rank.label:
            rank = labels.get(self.rank.label)
        if rank is None and self.rank.variable:
            rank = _variable_value(pod, self.rank.variable)
        return int(rank) if rank is not None and str(rank).isascii() and str(rank).isdigit() else None


def _conditions_by_state(rule: StatusRule) -> Iterable[tuple[str, tuple[str, ...]]]:
    return (
        ("failed", rule.failed), ("succeeded", rule.succeeded), ("suspended", rule.suspended), ("running", rule.running),
    )  # fmt: skip


def _true_condition(
    found: Mapping[str, Any], rule: StatusRule, names: tuple[str, ...]
) -> Mapping[str, Any] | None:
    """Return the true condition with one of *names*, or one made from the phase."""
    conditions = value_at(found, rule.conditions)
    for condition in conditions if isinstance(conditions, list) else ():
        if (
            isinstance(condition, Mapping)
            and condition.get("type") in names
            and condition.get("status") == "True"
        ):
            return condition
    phase = value_at(found, rule.phase) if rule.phase else None
    if isinstance(phase, str) and phase in names:
        status = found.get("status") or {}
        return {"reason": status.get("reason") or phase, "message": status.get("message")}
    return None


def _condition_text(condition: Mapping[str, Any]) -> str:
    return reason_text(condition.get("reason") or condition.get("type"), condition.get("message"))


def _variable_value(pod: Mapping[str, Any], name: str) -> str | None:
    for container in (pod.get("spec") or {}).get("containers") or ():
        for one in container.get("env") or ():
            if one.get("name") == name and "value" in one:
                return str(one["value"])
    return None


def builtin_kinds() -> tuple[str, ...]:
    """Return the names of the shipped kinds."""
    found = (file.name for file in _FOLDER.iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in found if name.endswith(".yaml")))


def unknown_kind(name: str) -> str:
    """Return the text for a kind that is not shipped."""
    did = did_you_mean(name, builtin_kinds()) or "; describe it under `custom`"
    return f"kind {name!r} is not one of {', '.join(builtin_kinds())}{did}"


def kind_of(settings: KubernetesSettings) -> WorkloadKind:
    """Return the kind that *settings* name: the site's own, else a shipped one.

    Raises:
        UsageError: there is no such kind.
    """
    if settings.custom:
        return _with_container(make_kind(settings.kind, settings.custom), settings.manifest)
    if settings.kind not in builtin_kinds():
        raise UsageError(unknown_kind(settings.kind))
    return _with_container(builtin_kind(settings.kind), settings.manifest)


def _with_container(kind: WorkloadKind, manifest: Mapping[str, Any]) -> WorkloadKind:
    """Return *kind* with the container of *manifest* that runs our agent: the kind's, ``worker``, or the first."""
    containers = value_at(manifest, (*kind.templates[0].path, "spec", "containers"))
    found = (
        [one.get("name") for one in containers if isinstance(one, Mapping)]
        if isinstance(containers, list)
        else []
    )
    names = [name for name in found if isinstance(name, str) and name]
    if not names or kind.container in names:
        return kind
    return replace(kind, container="worker" if "worker" in names else names[0])


@cache
def builtin_kind(name: str) -> WorkloadKind:
    """Return the kind of the file *name*.yaml."""
    import yaml

    text = _FOLDER.joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    return make_kind(name, yaml.safe_load(text))


#: Keys of :class:`schema.CustomKind` that are paths, and those that are parts of a kind.
_PATHS: Final = frozenset({"path", "remove", "conditions", "phase", "deadline", "ttl", "suspend", "devices"})
_PARTS: Final = {"resource": Resource, "rank": RankRule, "status": StatusRule, "queue": QueueRule}


def make_kind(name: str, given: Mapping[str, Any]) -> WorkloadKind:
    """Return the kind that a mapping describes, which ``schema.CustomKind`` has checked."""
    return WorkloadKind(name=name, **_fields(given))


def _fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a part of a kind; what is not given has its default."""
    found: dict[str, Any] = {}
    for key, value in given.items():
        if value is None:
            continue
        if key in _PARTS:
            found[key] = _PARTS[key](**_fields(value))
        elif key == "templates":
            found[key] = tuple(TemplateRule(**_fields(one)) for one in value)
        elif key == "count":
            found[key] = tuple(map(parse_path, value))
        elif key in _PATHS:
            found[key] = parse_path(value)
        else:
            found[key] = tuple(value) if isinstance(value, list) else value
    return found


def parse_path(text: str) -> KeyPath:
    """Return the segments of ``spec.template``; none of an empty text."""
    return tuple(text.split(".")) if text else ()
