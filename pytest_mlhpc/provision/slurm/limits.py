"""What is refused before it is submitted: more nodes or time than the partition or its QoS gives. No input or output."""

from __future__ import annotations

from pytest_mlhpc.jobs.packing import time_of
from pytest_mlhpc.jobs.spec import JobSpec
from pytest_mlhpc.provision.slurm.client import PartitionLimits, QosLimits
from pytest_mlhpc.provision.slurm.options import SlurmSettings
from pytest_mlhpc.system.model import Partition


def beyond(
    spec: JobSpec,
    partition: Partition,
    settings: SlurmSettings,
    limits: PartitionLimits | None,
    qos: QosLimits | None,
) -> str:
    """Return why *spec* can never run there, or an empty string."""
    time_s = time_of([spec])
    most_nodes: list[tuple[int | None, str]] = [
        (partition.nodes.max, f"systems.yaml: {partition.id}: nodes.max")
    ]
    most_time: list[tuple[float | None, str]] = [
        (settings.max_time_s, f"systems.yaml: {partition.id}: slurm.max_time")
    ]
    if limits is not None:
        if not limits.up:
            return f"Slurm's partition {limits.name} is down"
        most_nodes.append((limits.max_nodes, f"MaxNodes of Slurm's partition {limits.name}"))
        most_nodes.append((limits.total_nodes or None, f"nodes of Slurm's partition {limits.name}"))
        most_time.append((limits.max_time_s, f"MaxTime of Slurm's partition {limits.name}"))
    if qos is not None:
        most_nodes.append((qos.max_nodes, f"the limit of QoS {qos.name}"))
        most_time.append((qos.max_time_s, f"MaxWall of QoS {qos.name}"))
    for most, what in most_nodes:
        if most is not None and spec.nodes > most:
            return f"{spec.nodes} nodes are wanted, but {what} is {most}"
    for limit, what in most_time:
        if limit is not None and time_s > limit:
            return f"{time_s:.0f} s are needed (time_limit and margin), but {what} is {limit:.0f} s"
    return _ranks(spec, partition)


def longest(settings: SlurmSettings, limits: PartitionLimits | None, qos: QosLimits | None) -> float | None:
    """Return the longest allocation that is given, in seconds; None: no limit is known."""
    known = [settings.max_time_s, limits.max_time_s if limits else None, qos.max_time_s if qos else None]
    return min((limit for limit in known if limit is not None), default=None)


def _ranks(spec: JobSpec, partition: Partition) -> str:
    per_node = -(-spec.ranks // spec.nodes)
    units = partition.nodes.devices or partition.nodes.cores
    what = "devices" if partition.nodes.devices else "cores"
    if spec.workload != "command" and per_node > units:
        return f"{per_node} ranks on each node are wanted, which has {units} {what}"
    return ""
