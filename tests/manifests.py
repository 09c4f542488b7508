"""Partitions, plans and rendered objects of Kubernetes for tests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from pytest_mlhpc.config.model import Environment, NodeType, Partition
from pytest_mlhpc.node.protocol.plan import Plan
from pytest_mlhpc.provision.kubernetes.manifest import RenderedObjects, preview_plan, render
from pytest_mlhpc.provision.kubernetes.objects import Identity
from pytest_mlhpc.provision.kubernetes.schema import KubernetesOptions
from pytest_mlhpc.provision.kubernetes.settings import settings_of

ENVIRONMENT = Environment("default", "/opt/python")
IDENTITY = Identity("session-1", "Ada Lovelace")


def partition(accelerator: str = "cpu", devices: int = 0, **options: Any) -> Partition:
    """Return a partition of nodes with 16 cores and 64 GiB; *options* as they stand under ``kubernetes:``."""
    checked = KubernetesOptions.model_validate({"image": "site/torch:1", **options}).model_dump()
    nodes = NodeType(cores=16, memory=64 * 2**30, max=8, devices=devices)
    environments = (ENVIRONMENT,)
    return Partition(
        "site", "part", "kubernetes", "auto", accelerator, nodes, environments, scheduler_options=checked
    )


def rendered(
    where: Partition, nodes: int = 1, ranks: int | None = None, payload: bytes | None = b"zip", **plan: Any
) -> RenderedObjects:
    """Return what *where* makes of a plan of this shape; *plan* are more of its fields."""
    made: Plan = replace(
        preview_plan(where, nodes, ranks or nodes), allocation_id="0-a", payload_sha256="abc", **plan
    )
    return render(settings_of(where), where, ENVIRONMENT, made, payload, IDENTITY)


def workload(where: Partition, nodes: int = 1, ranks: int | None = None, **plan: Any) -> dict[str, Any]:
    """Return the first workload object."""
    return rendered(where, nodes, ranks, **plan).workloads[0]


def pod(where: Partition, nodes: int = 1, ranks: int | None = None, **plan: Any) -> dict[str, Any]:
    """Return the pod template of a Job."""
    return workload(where, nodes, ranks, **plan)["spec"]["template"]


def worker(where: Partition, nodes: int = 1, ranks: int | None = None, **plan: Any) -> dict[str, Any]:
    """Return the first container of a Job's pod template."""
    return pod(where, nodes, ranks, **plan)["spec"]["containers"][0]


def variables(container: dict[str, Any]) -> dict[str, str]:
    """Return name -> value, or path of the field that it comes from."""
    return {
        one["name"]: one["value"] if "value" in one else one["valueFrom"]["fieldRef"]["fieldPath"]
        for one in container["env"]
    }


def part(found: Any, path: str) -> Any:
    """Return the part of *found* to which the words of *path* lead, one after the other; None if there is none."""
    for word in path.split():
        found = found[int(word)] if isinstance(found, list) else (found or {}).get(word)
    return found


def parts(found: Any, paths: Iterable[str]) -> dict[str, Any]:
    """Return path -> part."""
    return {path: part(found, path) for path in paths}
