"""What ``kubernetes:`` of a partition or test may hold, as pydantic models. What is read later is ``options.KubernetesSettings``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo

from pytest_mlhpc.errors import UsageError, nearest
from pytest_mlhpc.provision.kubernetes.kinds.custom import CustomKind
from pytest_mlhpc.provision.kubernetes.kinds.files import builtin_kinds, make_kind
from pytest_mlhpc.provision.kubernetes.options import GRACE_S, KEEP_FOR_S, TTL_S
from pytest_mlhpc.provision.kubernetes.sense import sense
from pytest_mlhpc.provision.kubernetes.words import (
    AbsolutePath,
    Dotted,
    Image,
    Key,
    LabelValue,
    MountPath,
    Name,
    Quantity,
    SubPath,
)
from pytest_mlhpc.system.schema import CountOrZero, Duration, Memory
from pytest_mlhpc.system.texts import Text

if TYPE_CHECKING:
    from pytest_mlhpc.provision.kubernetes.kinds import Kind
    from pytest_mlhpc.system.schema import PartitionModel


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


def _claims_size(value: object) -> object:
    return {"size": value} if isinstance(value, (str, int)) else value


class ClaimTemplate(_Closed):
    """`template:` of a volume: a claim that is made for each pod and goes with it."""

    size: Quantity
    storage_class: Dotted | None = None
    access: list[Literal["ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany", "ReadWriteOncePod"]] = [
        "ReadWriteOnce"
    ]


class EmptyDir(_Closed):
    """`empty_dir:` of a volume: a folder on the node, or in its memory, that goes with the pod."""

    size: Quantity | None = None
    medium: Literal["disk", "memory"] = "disk"


class VolumeModel(_Closed):
    """One entry of `volumes:`."""

    name: Name
    mount: MountPath
    claim: Dotted | None = Field(None, description="a PersistentVolumeClaim that is there")
    template: Annotated[ClaimTemplate, BeforeValidator(_claims_size)] | None = None
    host_path: AbsolutePath | None = None
    empty_dir: EmptyDir | None = None
    config_map: Dotted | None = None
    secret: Dotted | None = None
    read_only: bool = False
    sub_path: SubPath | None = None

    def model_post_init(self, context: Any, /) -> None:
        """Require one source."""
        del context
        sources = ("claim", "template", "host_path", "empty_dir", "config_map", "secret")
        said = [name for name in sources if getattr(self, name) is not None]
        if len(said) != 1:
            found = f"both {' and '.join(said)}" if said else "no source"
            raise ValueError(f"volume {self.name!r} says {found}; give one of {', '.join(sources)}")


class Toleration(_Closed):
    """One entry of `tolerations:`, as the API has it."""

    key: Key | None = None
    operator: Literal["Equal", "Exists"] = "Equal"
    value: LabelValue | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    tolerationSeconds: CountOrZero | None = None  # noqa: N815 - the API's own word


class ResourcesModel(_Closed):
    """`resources:` in place of, or besides, the partition's cores and memory."""

    requests: dict[Key, Quantity] = {}
    limits: dict[Key, Quantity] = {}


class PatienceModel(_Closed):
    """`patience:` how long each cause of waiting may last before the allocation is given up."""

    unschedulable: Duration | None = None
    admission: Duration | None = None
    quota: Duration | None = None
    image: Duration | None = None
    config: Duration | None = None
    volume: Duration | None = None
    crash: Duration | None = None
    unknown: Duration | None = None


def _manifest(value: Any, info: ValidationInfo) -> Any:
    """Read a manifest that is named by its file, relative to the file that names it; nothing is put into it."""
    if not isinstance(value, str):
        return value
    from pytest_mlhpc.system.yaml_reader import read_file

    folder = (info.context or {}).get("folder") or "."
    path = Path(folder, Path(value).expanduser())
    try:
        return read_file(path, top="").plain()
    except UsageError as error:
        raise ValueError(str(error)) from None


Manifest = Annotated[dict[str, Any], BeforeValidator(_manifest)]


class KubernetesOptions(BaseModel):
    """`kubernetes:` of a partition, and of a test. Every field is described in docs/kubernetes.md."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    context: Text | None = Field(None, description="of the kubeconfig; its current one without it")
    kubeconfig: Text | None = None
    namespace: Name | None = None
    kind: Name = Field("job", description="job, pods, another kind that is shipped, or the name of `custom`")
    image: Image | None = None
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    image_pull_secrets: list[Dotted] = []
    labels: dict[Key, LabelValue] = {}
    annotations: dict[Key, Text] = {}
    generate_name: bool = Field(
        False, description="let the server complete the name, where a site demands it"
    )
    node_selector: dict[Key, LabelValue] = {}
    tolerations: list[Toleration] = []
    priority_class: Dotted | None = None
    service_account: Dotted | None = None
    runtime_class: Dotted | None = None
    device_resource: Key | None = Field(None, description="nvidia.com/gpu and the like, or none")
    resources: ResourcesModel = ResourcesModel()
    volumes: list[VolumeModel] = []
    shared_memory: Memory | None = Field(None, description="of /dev/shm; half of the pod's memory without it")
    run_as_user: CountOrZero | None = None
    run_as_group: CountOrZero | None = None
    fs_group: CountOrZero | None = None
    security: Literal["restricted", "as_manifest"] = "restricted"
    spread: Literal["none", "preferred", "required"] = "required"
    service: bool = Field(False, description="a headless Service, so that pods find each other by name")
    manifest: Manifest | None = Field(None, description="an object, or a file that holds one")
    custom: CustomKind | None = Field(None, description="describes a kind of the site's own")
    patience: PatienceModel = PatienceModel()
    keep: Literal["never", "on-failure", "always"] = "never"
    keep_for: Duration = KEEP_FOR_S
    reprovision: Annotated[CountOrZero, Field(le=100)] = 2
    probe: bool = True
    ttl: Duration = TTL_S
    max_time: Duration | None = Field(None, description="longest allocation")
    grace: Duration = GRACE_S

    def model_post_init(self, context: Any, /) -> None:
        """Refuse what cannot be together."""
        del context
        if self.custom is not None and self.kind in builtin_kinds():
            raise ValueError(
                f"`custom` describes a kind of your own, but kind is {self.kind!r}; give it another name"
            )
        if self.custom is None and self.kind not in builtin_kinds():
            hint = nearest(self.kind, builtin_kinds())
            did = f" (did you mean {hint!r}?)" if hint else "; describe it under `custom`"
            raise ValueError(f"kind {self.kind!r} is not one of {', '.join(builtin_kinds())}{did}")
        if self.run_as_user == 0 and self.security == "restricted":
            raise ValueError(
                "run_as_user: 0 is root, which `security: restricted` forbids; set security: as_manifest"
            )
        kind = self.kind_()
        for key, wanted in (("apiVersion", kind.resource.api_version), ("kind", kind.resource.kind)):
            if (found := (self.manifest or {}).get(key, wanted)) != wanted:
                raise ValueError(
                    f"the manifest's {key} is {found!r:.80}, but kind {self.kind!r} is {wanted!r}"
                )
        if (said := _namespace(self.manifest)) not in {None, self.namespace}:
            raise ValueError(
                f"the manifest's namespace is {said!r:.80}; say `namespace` beside it, as all objects go there"
            )
        if self.service and self.generate_name and not kind.each_pod:
            raise ValueError(
                "with generate_name the host of rank 0 is not known before, so that service: true cannot be had"
            )
        if kind.queue_label and not self.labels.get(kind.queue_label):
            raise ValueError(f"kind {self.kind!r} needs a queue: add the label {kind.queue_label}")

    def kind_(self) -> Kind:
        """Return the kind that is named; it is there."""
        from pytest_mlhpc.provision.kubernetes.kinds.files import shipped

        return make_kind(self.kind, self.custom.model_dump()) if self.custom else shipped(self.kind)

    def sense(self, partition: PartitionModel) -> Iterator[tuple[str, str]]:
        """Yield (key, text) for what the rest of the partition says and pods cannot be or have."""
        yield from sense(self, partition)


def _namespace(manifest: dict[str, Any] | None) -> object:
    metadata = (manifest or {}).get("metadata")
    return metadata.get("namespace") if isinstance(metadata, dict) else None
