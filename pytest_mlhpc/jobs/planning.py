"""From job specs to the plan of one allocation."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

from pytest_mlhpc.batch.plan import MetricPattern, Plan, RunPlan
from pytest_mlhpc.batch.vetting import START_S, limit_of
from pytest_mlhpc.jobs.identity import uuid7
from pytest_mlhpc.jobs.key import path_kind
from pytest_mlhpc.jobs.packing import time_of
from pytest_mlhpc.jobs.spec import NO_DATA, JobSpec
from pytest_mlhpc.system.interpolate import derived_values, fill
from pytest_mlhpc.vet.settings import Settings


def plan_of(
    specs: Sequence[tuple[JobSpec, int]],
    runs_dir: Path,
    payload_sha256: str,
    excluded_nodes: Sequence[str] = (),
    vetting: Settings | None = None,
) -> Plan:
    """Return the plan of one attempt of each of *specs* (spec, number of the attempt), which have the same needs.

    Its directory is a new one below *runs_dir*, not yet made. The ids of runs and allocation are chosen here, before
    anything is submitted; a run that has an allocation for itself shares its id. Spare nodes are asked for where *vetting*
    may find some unfit.
    """
    runs = tuple(run_of(spec, attempt) for spec, attempt in specs)
    first = specs[0][0]
    allocation_id = runs[0].run_id if len(runs) == 1 else uuid7()
    return Plan(
        allocation_id=allocation_id,
        payload_sha256=payload_sha256,
        directory=str(runs_dir / allocation_id),
        nodes=first.nodes,
        time_limit_s=time_of([spec for spec, _ in specs]) + (limit_of(vetting) + START_S if vetting else 0.0),
        runs=runs,
        spares=_spares(first, len(excluded_nodes)) if vetting else 0,
        excluded_nodes=() if first.node else tuple(excluded_nodes),
        nodelist=(first.node,) if first.node else (),
        vetting=vetting,
        environment=first.target.environment.name,
        scheduler_options=first.scheduler_options,
    )


def _spares(spec: JobSpec, away: int) -> int:
    """Return how many nodes are asked for beyond those that runs need, *away* of the partition's not being wanted."""
    partition = spec.target.partition
    wanted = {**partition.scheduler_options, **spec.scheduler_options}.get("spares", 0)
    return 0 if spec.node else max(0, min(int(wanted), partition.nodes.max - spec.nodes - away))


def run_of(spec: JobSpec, attempt: int) -> RunPlan:
    """Return the run of one attempt with a new id and nonce."""
    partition, environment = spec.target.partition, spec.target.environment
    source, path, kind = _data(spec)
    node = partition.nodes
    derived = derived_values(
        cores=spec.node_cores,
        memory=spec.node_memory,
        devices=node.devices,
        nodes=spec.nodes,
        ranks=spec.ranks,
    )
    return RunPlan(
        run_id=uuid7(),
        nonce=secrets.token_hex(8),
        attempt=attempt,
        workload=spec.workload,
        parameters=spec.parameters,
        nodes=spec.nodes,
        ranks=spec.ranks,
        cores_per_rank=spec.cores_per_rank,
        device_type=partition.accelerator,
        launcher=spec.launcher,
        time_limit_s=spec.time_limit_s,
        steps=spec.steps,
        warmup_steps=spec.warmup_steps,
        python=environment.python,
        variables={
            **{name: fill(text, derived) for name, text in environment.variables.items()},
            **({"MLHPC_WORKLOAD_MODULE": spec.module} if spec.module else {}),
        },
        argv=spec.argv,
        metrics={
            name: MetricPattern(rule["unit"], rule["better"], rule.get("pattern"))
            for name, rule in spec.metrics.items()
        },
        exclusive=spec.exclusive,
        device_ids=_devices(spec),
        data_source=source,
        data_path=path,
        data_kind=kind,
        cache=spec.cache,
        calibrate=partition.scheduler == "local" and spec.exclusive,
        cwd=spec.cwd,
    )


def _devices(spec: JobSpec) -> tuple[str, ...]:
    """Return the accelerators of one node that a `local` run owns; a scheduler chooses its own."""
    partition = spec.target.partition
    if partition.scheduler != "local" or partition.accelerator == "cpu":
        return ()
    return tuple(str(index) for index in range(spec.ranks // spec.nodes))


def _data(spec: JobSpec) -> tuple[str, str | None, str]:
    """Return source (memory, device, files), path, and kind (real, synthetic); three times none where no data is read."""
    if spec.data == NO_DATA:
        return NO_DATA, None, NO_DATA
    if spec.data in {"memory", "device"}:
        return spec.data, None, "synthetic"
    if spec.data == "files":
        return "files", None, "synthetic"
    if dataset := spec.target.datasets.get(spec.data):
        return "files", dataset.path, dataset.kind
    return "files", spec.data, path_kind(spec.data)
