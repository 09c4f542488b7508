"""The manifests that a partition leads to, with made-up names where a session has its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pytest_mlhpc.batch.plan import Plan, RunPlan
from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.provision.kubernetes.labels import Identity
from pytest_mlhpc.provision.kubernetes.options import settings_of
from pytest_mlhpc.provision.kubernetes.render import Rendered, render
from pytest_mlhpc.system.model import Environment, Partition

#: Stand for the ids that a session chooses; of their form, so that what is shown could be created.
_ID: Final = "00000000-0000-7000-8000-000000000000"
_SHA256: Final = "0" * 64


def preview(partition: Partition, environment: Environment) -> str:
    """Return the manifests for a run with a rank on each device (CPUs: one) of two nodes, if so many are given.

    The ConfigMap stands in a comment: it holds the plan, and the payload's zip.

    Raises:
        UsageError: they cannot be made.
    """
    import yaml

    try:
        rendered = rendered_of(partition, environment)
    except UsageError as error:
        raise UsageError(f"{partition.id}, environment {environment.name}: {error}") from error
    objects: list[Any] = [*([rendered.service] if rendered.service else []), *rendered.workloads]
    name = rendered.config_map["metadata"]["name"]
    head = f"# Created before these: ConfigMap {name}, with plan.json and the payload's zip.\n"
    return head + yaml.safe_dump_all(objects, sort_keys=False, width=110, allow_unicode=True)


def rendered_of(partition: Partition, environment: Environment, **overrides: Any) -> Rendered:
    """Return what :func:`preview` shows; *overrides* as a test may give them.

    Raises:
        UsageError: it cannot be made.
    """
    nodes = min(2, partition.nodes.max)
    each = 1 if partition.accelerator == "cpu" else max(1, partition.nodes.devices)
    settings = settings_of(partition, overrides)
    plan = plan_of(partition, nodes, nodes * each)
    return render(settings, partition, environment, plan, b"", Identity(_ID, "user"))


def plan_of(partition: Partition, nodes: int, ranks: int) -> Plan:
    """Return a made-up plan of one run of *ranks* processes on *nodes* pods."""
    run = RunPlan(
        run_id=_ID,
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
    return Plan(_ID, _SHA256, "/", nodes, partition.time_limit_s, (run,))


def refusal(
    partition: Partition, environment: Environment, nodes: int, ranks: int, overrides: Mapping[str, Any]
) -> str:
    """Return why a run of this shape can never be rendered here, or an empty string; *overrides* are its test's."""
    try:
        settings = settings_of(partition, overrides)
        render(settings, partition, environment, plan_of(partition, nodes, ranks), b"", Identity(_ID, "user"))
    except UsageError as error:
        return str(error)
    return ""
