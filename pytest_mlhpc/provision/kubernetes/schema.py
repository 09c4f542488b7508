"""Schema of ``kubernetes:`` in systems.yaml and of the kinds of workload, as pydantic models.

Open it to see which options exist and what is refused. The code reads the frozen ``settings.KubernetesSettings``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
)

from pytest_mlhpc.config.quantities import parse_size
from pytest_mlhpc.config.schema import Count, CountOrZero, Duration, Memory, Text
from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.provision.kubernetes.objects import metadata_of, quantity, value_at
from pytest_mlhpc.provision.kubernetes.settings import (
    DEVICE_RESOURCES,
    GRACE_S,
    KEEP_FOR_S,
    TTL_S,
    WorkloadKind,
    builtin_kind,
    builtin_kinds,
    make_kind,
    unknown_kind,
)

if TYPE_CHECKING:
    from pytest_mlhpc.config.schema import EnvironmentModel, PartitionModel


#: RFC 1123 label and subdomain, and the syntax of labels (kubernetes.io/docs/concepts/overview/working-with-objects).
_LABEL: Final = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_SUBDOMAIN: Final = rf"{_LABEL}(\.{_LABEL})*"
_LABEL_WORD: Final = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_LABEL_KEY: Final = rf"({_SUBDOMAIN}/)?{_LABEL_WORD}"
#: Set by us on every object; other values would make objects that cannot be found again.
_RESERVED: Final = re.compile(r"pytest-mlhpc/|app\.kubernetes\.io/managed-by\Z")


def _matching(value: Any, pattern: str, what: str) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    # A value with a variable is checked after interpolation; previews may contain variables.
    if not isinstance(value, str) or not ("${" in value or re.fullmatch(pattern, value)):
        raise ValueError(f"{value!r:.80} is not {what}")
    return value


def _name(value: Any) -> str:
    return _matching(value, _LABEL, "a name: lower-case letters, digits and '-', at most 63")


def _dns_name(value: Any) -> str:
    return _matching(value, _SUBDOMAIN, "a name: lower-case letters, digits, '-' and '.'")


def _label_key(value: Any) -> str:
    if isinstance(value, str) and _RESERVED.match(value):
        raise ValueError(f"{value!r:.80} is set for each allocation")
    return _matching(value, _LABEL_KEY, "a label's or annotation's key, such as site.org/project")


def _label_value(value: Any) -> str:
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} should be text; put it in quotes")  # noqa: TRY004 - pydantic turns only ValueError into a finding
    return _matching(
        value, rf"({_LABEL_WORD})?", "a label's value: letters, digits, '.', '_' and '-', at most 63"
    )


def _quantity(value: Any) -> str:
    """Return a Kubernetes quantity; sizes may be written as elsewhere in the file."""
    if isinstance(value, str) and "${" in value:
        return value
    if quantity(value) is None:
        try:
            return str(parse_size(value))
        except ValueError:
            raise ValueError(f"{value!r:.80} is not a quantity; write it like 2, 500m, 16Gi") from None
    if (amount := quantity(value)) is not None and amount < 0:
        raise ValueError(f"{value!r:.80} is less than 0")
    return str(value)


#: Resources that are bytes (Kubernetes: "Resource Management for Pods and Containers").
_BYTES: Final = ("memory", "ephemeral-storage", "hugepages-")
#: Fewer bytes are a slip: a number without a unit is bytes, and `500m` half of one.
_FEW_BYTES: Final = 2**20


def _enough_bytes(value: str) -> str:
    amount = None if "${" in value else quantity(value)
    if amount is not None and 0 < amount < _FEW_BYTES:
        number = re.match(r"[0-9.]*", value)
        unit = "KiB" if amount >= 1024 else "B"
        shown = f"{float(amount) / (1024 if unit == 'KiB' else 1):.4g} {unit}"
        raise ValueError(f"{value!r:.80} is {shown}; did you mean {number[0] if number else ''}Mi?")
    return value


def _enough_of_each(amounts: dict[str, str]) -> dict[str, str]:
    for name, amount in amounts.items():
        try:
            _enough_bytes(amount if name.startswith(_BYTES) else "")
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return amounts


def _absolute_path(value: str) -> str:
    if not value.startswith(("/", "${")):
        raise ValueError(f"{value!r:.80} is not an absolute path")
    if ":" in value or "/../" in f"{value}/":
        raise ValueError(f"{value!r:.80} holds ':' or '..', which a mount cannot take")
    return value


def _sub_path(value: str) -> str:
    if value.startswith("/") or "/../" in f"/{value}/":
        raise ValueError(f"{value!r:.80} is not a path below the volume")
    return value


def _mount_path(value: str) -> str:
    if value == "/mlhpc" or value.startswith("/mlhpc/"):
        raise ValueError(
            f"{value!r:.80}: /mlhpc holds the plan and the work of each allocation; mount it elsewhere"
        )
    return value


def _image(value: str) -> str:
    if re.search(r"\s", value):
        raise ValueError(f"{value!r:.80} holds a blank, which no image's name does")
    return value


_TEXT: Final = WithJsonSchema({"type": "string"})
_TEXT_OR_NUMBER: Final = WithJsonSchema({"type": ["string", "number"]})

ObjectName = Annotated[str, BeforeValidator(_name), _TEXT]
DnsName = Annotated[str, BeforeValidator(_dns_name), Field(max_length=253), _TEXT]
LabelKey = Annotated[str, BeforeValidator(_label_key), Field(max_length=317), _TEXT]
LabelValue = Annotated[str, BeforeValidator(_label_value), _TEXT_OR_NUMBER]
Quantity = Annotated[str, BeforeValidator(_quantity), _TEXT_OR_NUMBER]
Bytes = Annotated[Quantity, AfterValidator(_enough_bytes)]
Amounts = Annotated[dict[LabelKey, Quantity], AfterValidator(_enough_of_each)]
ImageName = Annotated[Text, AfterValidator(_image)]
AbsolutePath = Annotated[Text, AfterValidator(_absolute_path)]
MountPath = Annotated[AbsolutePath, AfterValidator(_mount_path)]
SubPath = Annotated[Text, AfterValidator(_sub_path)]

_KEY_PATH = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\Z")


def _key_path(value: str) -> str:
    if value and not _KEY_PATH.match(value):
        raise ValueError(f"{value!r:.80} is not a path such as spec.template, or spec.groups.0.template")
    return value


FieldPath = Annotated[str, AfterValidator(_key_path), Field(max_length=500)]


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class ResourceModel(_Closed):
    """`resource:` how the API server names the kind."""

    group: str = ""
    version: Text
    kind: Text
    plural: Text


class TemplateModel(_Closed):
    """One entry of `templates:`."""

    path: FieldPath = Field("", description="of the pod template; empty: the object itself is the pod")
    pods: Count | None = Field(None, description="how many pods it makes; all that no other template does")
    count: list[FieldPath] = Field([], description="where that number is written")
    remove: FieldPath | None = Field(None, description="what to take out where it makes no pods")


class RankModel(_Closed):
    """`rank:` where a pod's number is found, counted from 0 over all pods."""

    annotation: Text | None = None
    label: Text | None = None
    variable: Text | None = Field(None, description="of the environment, set by the kind's operator")

    def model_post_init(self, _context: Any, /) -> None:
        """Require exactly one."""
        if sum(value is not None for value in (self.annotation, self.label, self.variable)) != 1:
            raise ValueError("give one of annotation, label, variable")


class StatusModel(_Closed):
    """`status:` where it is found, and the meaning of its conditions."""

    conditions: FieldPath = "status.conditions"
    phase: FieldPath | None = Field(None, description="a single word instead of, or besides, conditions")
    succeeded: list[Text] = []
    failed: list[Text] = []
    suspended: list[Text] = []
    running: list[Text] = []

    def model_post_init(self, _context: Any, /) -> None:
        """Require conditions for success and failure."""
        if not self.succeeded or not self.failed:
            raise ValueError("say which conditions (or phases) mean succeeded, and which failed")


class QueueModel(_Closed):
    """`queue:` a queueing system's object for the workload."""

    resource: ResourceModel
    label: Text = Field(description="that holds the workload's uid")
    admitted: list[Text] = Field(min_length=1, description="conditions that have to become true")
    evicted: list[Text] = Field([], description="conditions that are true once it has taken the nodes back")


class CustomKind(_Closed):
    """`custom:` of a partition, and the files of ``kinds/``: a kind of workload."""

    resource: ResourceModel = Field(description="group, version, kind and plural of the API")
    templates: list[TemplateModel] = Field(
        min_length=1,
        description="path of a pod template, its pods, fields that hold their number, what to remove",
    )
    status: StatusModel = Field(
        description="paths of conditions or phase, and words for succeeded, failed, suspended, running"
    )
    rank: RankModel | None = Field(
        None, description="annotation, label or variable that holds a pod's number"
    )
    each_pod: bool = Field(False, description="an object for each pod")
    most: Count | None = Field(None, description="the most pods that it can have")
    container: Text | None = Field(None, description="name of the container that runs the agent; worker")
    manifest: dict[str, Any] = Field(
        {}, description="fields of the kind's own, which another manifest may change"
    )
    must: dict[str, Any] = Field({}, description="the same, which it may not")
    several: dict[str, Any] = Field({}, description="more of these, with several pods")
    deadline: FieldPath | None = Field(None, description="where activeDeadlineSeconds is written")
    ttl: FieldPath | None = Field(None, description="where ttlSecondsAfterFinished is written")
    suspend: FieldPath | None = Field(
        None, description="where it is written whether the workload is suspended"
    )
    devices: FieldPath | None = Field(None, description="where the number of devices is written, as text")
    leader: Text | None = Field(None, description="host name of rank 0, with {name} for the object's")
    own_service: bool = Field(False, description="its operator makes that name known")
    queue_label: Text | None = Field(None, description="label that names the queue, which is then required")
    queue: QueueModel | None = Field(None, description="the object that says why it waits or was evicted")
    limit_label: Text | None = Field(None, description="label that holds the time limit in seconds")

    def model_post_init(self, _context: Any, /) -> None:
        """Require a way to distinguish pods, and templates for all of them."""
        if self.rank is None and not self.each_pod and self.most != 1:
            raise ValueError(
                "`rank` is missing: what holds the number of a pod? With `most: 1` there is but one"
            )
        if self.each_pod and len(self.templates) > 1:
            raise ValueError("with each_pod there is one template")
        if sum(template.pods is None for template in self.templates) > 1:
            raise ValueError("several templates make all other pods; give `pods` to all but one")
        if self.rank is not None and self.rank.variable is None and len(self.templates) > 1:
            raise ValueError("with several templates, `rank` must name a variable")


def _size_as_template(value: object) -> object:
    return {"size": value} if isinstance(value, (str, int)) else value


class ClaimTemplate(_Closed):
    """`template:` of a volume: a claim that is created and deleted with each pod."""

    size: Bytes
    storage_class: DnsName | None = None
    access: list[Literal["ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany", "ReadWriteOncePod"]] = [
        "ReadWriteOnce"
    ]


class EmptyDir(_Closed):
    """`empty_dir:` of a volume: a folder on the node, or in its memory, deleted with the pod."""

    size: Bytes | None = None
    medium: Literal["disk", "memory"] = "disk"


class VolumeModel(_Closed):
    """One entry of `volumes:`."""

    name: ObjectName
    mount: MountPath
    claim: DnsName | None = Field(None, description="a PersistentVolumeClaim that is there")
    template: Annotated[ClaimTemplate, BeforeValidator(_size_as_template)] | None = None
    host_path: AbsolutePath | None = None
    empty_dir: EmptyDir | None = None
    config_map: DnsName | None = None
    secret: DnsName | None = None
    read_only: bool = False
    sub_path: SubPath | None = None
    here: AbsolutePath | None = Field(
        None, description="where this machine sees the volume; files that are too large for a Secret go there"
    )

    def model_post_init(self, _context: Any, /) -> None:
        """Require exactly one source, and one that this machine may see where it says so."""
        sources = ("claim", "template", "host_path", "empty_dir", "config_map", "secret")
        given = [name for name in sources if getattr(self, name) is not None]
        if len(given) != 1:
            found = f"both {' and '.join(given)}" if given else "no source"
            raise ValueError(f"volume {self.name!r} says {found}; give one of {', '.join(sources)}")
        if self.here is not None and given[0] not in {"claim", "host_path"}:
            raise ValueError(
                f"volume {self.name!r} says here, and {given[0]} is seen by its pod alone; only claim and host_path may"
            )


class Toleration(_Closed):
    """One entry of `tolerations:`, as in the API."""

    key: LabelKey | None = None
    operator: Literal["Equal", "Exists"] = "Equal"
    value: LabelValue | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    tolerationSeconds: CountOrZero | None = None  # noqa: N815 - the API's own word


class ResourcesModel(_Closed):
    """`resources:` instead of, or in addition to, the partition's cores and memory."""

    requests: Amounts = {}
    limits: Amounts = {}


class PatienceModel(_Closed):
    """`patience:` how long each cause of waiting may last."""

    unschedulable: Duration | None = None
    admission: Duration | None = None
    quota: Duration | None = None
    image: Duration | None = None
    config: Duration | None = None
    volume: Duration | None = None
    crash: Duration | None = None
    unknown: Duration | None = None


def _read_manifest(value: Any, info: ValidationInfo) -> Any:
    """Return a manifest; a file is read relative to the file that names it, without interpolation."""
    if not isinstance(value, str):
        return value
    from pytest_mlhpc.config.yaml import read_file

    folder = (info.context or {}).get("folder") or "."
    path = Path(folder, Path(value).expanduser())
    try:
        return read_file(path, top="").plain()
    except UsageError as error:
        raise ValueError(str(error)) from None


ManifestOption = Annotated[dict[str, Any], BeforeValidator(_read_manifest)]


class KubernetesOptions(BaseModel):
    """`kubernetes:` of a partition, and of a test. Every field is described in docs/kubernetes.md."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    context: Text | None = Field(None, description="of the kubeconfig; its current one without it")
    kubeconfig: Text | None = None
    namespace: ObjectName | None = None
    kind: ObjectName = Field(
        "job", description="job, pods, another kind that is shipped, or the name of `custom`"
    )
    image: ImageName | None = None
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    image_pull_secrets: list[DnsName] = []
    labels: dict[LabelKey, LabelValue] = {}
    annotations: dict[LabelKey, Text] = {}
    generate_name: bool = Field(
        False, description="let the server complete the name, where a site demands it"
    )
    node_selector: dict[LabelKey, LabelValue] = {}
    tolerations: list[Toleration] = []
    priority_class: DnsName | None = None
    service_account: DnsName | None = None
    runtime_class: DnsName | None = None
    device_resource: LabelKey | None = Field(None, description="nvidia.com/gpu and the like, or none")
    resources: ResourcesModel = ResourcesModel()
    volumes: list[VolumeModel] = []
    shared_memory: Memory | None = Field(None, description="of /dev/shm; half of the pod's memory without it")
    run_as_user: CountOrZero | None = None
    run_as_group: CountOrZero | None = None
    fs_group: CountOrZero | None = None
    security: Literal["restricted", "as_manifest"] = "restricted"
    spread: Literal["none", "preferred", "required"] = "required"
    service: bool = Field(False, description="a headless Service, so that pods find each other by name")
    manifest: ManifestOption | None = Field(None, description="an object, or a file that holds one")
    custom: CustomKind | None = Field(None, description="describes a kind of the site's own")
    patience: PatienceModel = PatienceModel()
    keep: Literal["never", "on-failure", "always"] = "never"
    keep_for: Duration = KEEP_FOR_S
    reprovision: Annotated[CountOrZero, Field(le=100)] = 2
    probe: bool = True
    agent: bool = Field(
        True,
        description="false: a program is its container's own command, so that any image runs, without Python",
    )
    ttl: Duration = TTL_S
    max_time: Duration | None = Field(None, description="longest allocation")
    grace: Duration = GRACE_S

    def model_post_init(self, _context: Any, /) -> None:
        """Refuse options that contradict each other."""
        if self.custom is not None and self.kind in builtin_kinds():
            raise ValueError(
                f"`custom` describes a kind of your own, but kind is {self.kind!r}; give it another name"
            )
        if self.custom is None and self.kind not in builtin_kinds():
            raise ValueError(unknown_kind(self.kind))
        if self.run_as_user == 0 and self.security == "restricted":
            raise ValueError(
                "run_as_user: 0 is root, which `security: restricted` forbids; set security: as_manifest"
            )
        kind = self.workload_kind()
        for key, expected in (("apiVersion", kind.resource.api_version), ("kind", kind.resource.kind)):
            if (found := (self.manifest or {}).get(key, expected)) != expected:
                raise ValueError(
                    f"the manifest's {key} is {found!r:.80}, but kind {self.kind!r} is {expected!r}"
                )
        if (namespace := metadata_of(self.manifest or {}).get("namespace")) not in {None, self.namespace}:
            raise ValueError(
                f"the manifest's namespace is {namespace!r:.80}; say `namespace` beside it, as all objects go there"
            )
        if self.service and self.generate_name and not kind.each_pod:
            raise ValueError(
                "with generate_name the host of rank 0 is not known before, so that service: true is not possible"
            )
        if kind.queue_label and not self.labels.get(kind.queue_label):
            raise ValueError(f"kind {self.kind!r} needs a queue: add the label {kind.queue_label}")

    def workload_kind(self) -> WorkloadKind:
        """Return the kind, which exists after validation."""
        return make_kind(self.kind, self.custom.model_dump()) if self.custom else builtin_kind(self.kind)

    def contradictions(self, partition: PartitionModel) -> Iterator[tuple[str, str]]:
        """Yield (key, text) for each option of the rest of the partition that pods cannot have."""
        yield from check_partition(self, partition)


def check_partition(options: KubernetesOptions, partition: PartitionModel) -> Iterator[tuple[str, str]]:
    """Yield (key, text) for each option of *partition* that pods cannot have; keys are relative to the partition."""
    if partition.launcher in {"srun", "mpirun"}:
        yield (
            "launcher",
            f"{partition.launcher} needs Slurm; in pods ranks are started by plain, torchrun or podrun",
        )
    kind, nodes = options.workload_kind(), partition.nodes
    if partition.launcher == "poprun" and nodes is not None and nodes.max > 1:
        yield "launcher", "poprun reaches other nodes by ssh, which pods have not: nodes.max must be 1"
    if nodes is not None and kind.most and nodes.max > kind.most:
        yield "nodes.max", f"{kind.resource.kind} has at most {_count_pods(kind.most)} here"
    resource = options.device_resource or DEVICE_RESOURCES.get(partition.accelerator) or kind.devices
    if nodes is not None and nodes.devices and partition.accelerator != "cpu" and not resource:
        text = f"is missing: by which resource are {partition.accelerator} devices asked for?"
        yield "kubernetes.device_resource", text
    has_image = bool(options.image) or _names_image(options.manifest, kind)
    for name, environment in (partition.environments or {}).items():
        for key, text in _check_environment(environment, has_image=has_image, image=options.image):
            yield f"environments.{name}{key}", text


def _check_environment(
    environment: EnvironmentModel, *, has_image: bool, image: str | None
) -> Iterator[tuple[str, str]]:
    for key in ("setup", "modules", "venv", "conda", "uenv"):
        if getattr(environment, key):
            yield f".{key}", "a pod has what is in its image; name its interpreter by `python`"
    container = environment.container
    if container is None:
        if not has_image:
            yield "", "has no image: set `container` here, or `image` under `kubernetes`"
        return
    if image:
        yield ".container", "there is an image under `kubernetes` too; leave one out"
    if container.runtime:
        yield ".container.runtime", "the cluster's own runtime runs pods; leave it out"
    if container.mounts:
        yield ".container.mounts", "pods mount volumes: use `volumes` under `kubernetes`"


def _count_pods(count: int) -> str:
    return f"{count} pod{'s' * (count > 1)}"


def _names_image(manifest: dict[str, Any] | None, kind: WorkloadKind) -> bool:
    containers = value_at(manifest, (*kind.templates[0].path, "spec", "containers"))
    return isinstance(containers, list) and any(
        isinstance(one, dict) and one.get("image") for one in containers
    )
