"""The settings of one allocation: ``kubernetes:`` of a partition with a test's overrides applied.

Open it for the defaults, and to see how a test's options are merged. ``schema.py`` checks the same fields by pydantic,
whose import is slow; this module imports without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pytest_mlhpc.config.model import Partition

#: Seconds that each cause of waiting may last, unless the partition says otherwise.
PATIENCE: Final[Mapping[str, float]] = {
    "unschedulable": 86400.0,  # full clusters: as long as a Slurm job may wait
    "admission": 86400.0,  # a queue such as Kueue's, or a scheduling gate
    "quota": 3600.0,  # other jobs of the namespace may end
    "image": 600.0,  # registries have bad minutes; a name that does not exist looks the same
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
    resources = options.pop("resources", None) or {}
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
        given[name] = dict(resources.get(name) or {})
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
