"""What the rest of a partition says that its pods cannot be or have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pytest_mlhpc.provision.kubernetes.options import DEVICE_RESOURCES
from pytest_mlhpc.provision.kubernetes.paths import at

if TYPE_CHECKING:
    from pytest_mlhpc.provision.kubernetes.kinds import Kind
    from pytest_mlhpc.provision.kubernetes.schema import KubernetesOptions
    from pytest_mlhpc.system.schema import EnvironmentModel, PartitionModel


def sense(options: KubernetesOptions, partition: PartitionModel) -> Iterator[tuple[str, str]]:
    """Yield (key, text) for each; keys are relative to the partition."""
    if partition.launcher in {"srun", "mpirun"}:
        yield (
            "launcher",
            f"{partition.launcher} needs Slurm; in pods ranks are started by plain, torchrun or podrun",
        )
    kind, nodes = options.kind_(), partition.nodes
    if partition.launcher == "poprun" and nodes is not None and nodes.max > 1:
        yield "launcher", "poprun reaches other nodes by ssh, which pods have not: nodes.max must be 1"
    if nodes is not None and kind.most and nodes.max > kind.most:
        yield "nodes.max", f"{kind.resource.kind} has at most {_pods(kind.most)} here"
    told = options.device_resource or DEVICE_RESOURCES.get(partition.accelerator) or kind.devices
    if nodes is not None and nodes.devices and partition.accelerator != "cpu" and not told:
        text = f"is missing: by which resource are {partition.accelerator} devices asked for?"
        yield "kubernetes.device_resource", text
    has_image = bool(options.image) or _names_image(options.manifest, kind)
    for name, environment in (partition.environments or {}).items():
        for key, text in _sense_environment(environment, has_image=has_image, image=options.image):
            yield f"environments.{name}{key}", text


def _sense_environment(
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


def _pods(count: int) -> str:
    return f"{count} pod{'s' * (count > 1)}"


def _names_image(manifest: dict[str, Any] | None, kind: Kind) -> bool:
    containers = at(manifest, (*kind.templates[0].path, "spec", "containers"))
    return isinstance(containers, list) and any(
        isinstance(one, dict) and one.get("image") for one in containers
    )
