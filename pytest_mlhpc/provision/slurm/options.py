"""Options of a Slurm partition, and its limits: how a job is requested, and why a spec is refused. No input or output.

The pydantic model of the same fields, which checks the file, is ``SlurmOptions`` in ``schema.py``: its import is slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pytest_mlhpc.config.model import Partition
from pytest_mlhpc.jobs.spec import JobSpec
from pytest_mlhpc.provision.scheduler.client import PartitionLimits, QosLimits
from pytest_mlhpc.provision.scheduler.provisioner import beyond

#: A job that waits longer than a day for its nodes is given up, unless the partition says otherwise.
PENDING_LIMIT_S: Final = 86400.0

#: Advice where another cluster is requested.
OTHER_CLUSTER: Final = "jobs go to the cluster of slurm.conf alone; for another cluster start pytest with SLURM_CONF naming its slurm.conf"


@dataclass(frozen=True)
class SlurmSettings:
    """How jobs of one partition are requested. Texts are one line, empty where the option is not set; times are in seconds.

    ``gpus`` is how accelerators are requested: gpus-per-node, gres, gpus, gpus-per-task or none. ``memory`` is "default"
    (no option), "all", or bytes a node. ``sbatch`` and ``srun`` are whole arguments.
    """

    client: str = "cli"  #: auto, cli or pyslurm
    partition: str = ""
    qos: str = ""
    account: str = ""
    reservation: str = ""
    constraint: str = ""
    licenses: str = ""
    nodelist: str = ""
    exclude: str = ""
    comment: str = ""
    exclusive: bool | str = False  #: "multi-node": only jobs of several nodes
    gres: str = ""
    gpus: str = "none"
    gpu_type: str = ""
    tres_per_node: str = ""
    memory: str | int = "default"
    tasks: str = "sbatch"  #: srun: only srun states tasks and their cores
    sbatch: tuple[str, ...] = ()
    srun: tuple[str, ...] = ()
    mpi: str = ""
    max_time_s: float | None = None  #: longest allocation; None: what Slurm allows
    pending_limit_s: float = PENDING_LIMIT_S
    shared_directory: str = ""  #: a folder that nodes see; empty: the state directory
    batch_python: str = ""
    energy: bool = False
    spares: int = 0
    here: Mapping[str, Any] = field(
        default_factory=dict
    )  #: mlhpc_here: job, nodes, until_ns of the one around us

    def whole_nodes(self, nodes: int) -> bool:
        """Return whether a job of *nodes* nodes requests them exclusively."""
        return nodes > 1 if self.exclusive == "multi-node" else bool(self.exclusive)


def settings_of(partition: Partition, overrides: Mapping[str, Any] | None = None) -> SlurmSettings:
    """Return the settings of a partition whose scheduler is slurm, with a test's *overrides*; both were checked before."""
    options = {**partition.scheduler_options, **(overrides or {})}
    gpus = options.pop("gpus", None) or ("gpus-per-node" if partition.nodes.devices else "none")
    names = {"max_time": "max_time_s", "pending_limit": "pending_limit_s"}
    given: dict[str, Any] = {
        names.get(name, name): tuple(value) if isinstance(value, list) else value
        for name, value in options.items()
        if value is not None
    }
    return SlurmSettings(gpus=gpus, **given)


def beyond_limits(
    spec: JobSpec,
    partition: Partition,
    settings: SlurmSettings,
    limits: PartitionLimits | None,
    qos: QosLimits | None,
) -> str:
    """Return why *spec* can never run there, or an empty string."""
    most_nodes: list[tuple[int | None, str]] = []
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
    return beyond(spec, partition, most_nodes, most_time)


def longest_allocation_s(
    settings: SlurmSettings, limits: PartitionLimits | None, qos: QosLimits | None
) -> float | None:
    """Return the longest allocation that is given, in seconds; None: no limit is known."""
    known = [settings.max_time_s, limits.max_time_s if limits else None, qos.max_time_s if qos else None]
    return min((limit for limit in known if limit is not None), default=None)
