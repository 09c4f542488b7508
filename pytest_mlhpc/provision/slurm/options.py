"""What ``slurm:`` of a partition became: the settings that the rest of this package reads.

The pydantic model of the same fields, which checks the file, is ``SlurmOptions`` in ``schema.py`` (importing it is slow).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pytest_mlhpc.system.model import Partition

#: A job that waits longer than a day for its nodes is given up, unless the partition says otherwise.
PENDING_LIMIT_S: Final = 86400.0


@dataclass(frozen=True)
class SlurmSettings:
    """How jobs of one partition are asked for. Texts are one line, empty where nothing was said; times in seconds.

    ``gpus`` is the way in which accelerators are asked for, already decided: gpus-per-node, gres, gpus, gpus-per-task
    or none. ``memory`` is "default" (nothing is said), "all", or bytes a node. ``sbatch`` and ``srun`` are whole words.
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
    tasks: str = "sbatch"  #: srun: tasks and their cores are said by srun alone
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
    )  #: --here: job, nodes, until_ns of the one around us

    def whole_nodes(self, nodes: int) -> bool:
        """Say whether a job of *nodes* nodes asks for them with nobody else on them."""
        return nodes > 1 if self.exclusive == "multi-node" else bool(self.exclusive)


def settings_of(partition: Partition) -> SlurmSettings:
    """Return the settings of a partition whose scheduler is slurm; its options were checked when it was loaded."""
    options = dict(partition.scheduler_options)
    gpus = options.pop("gpus", None) or ("gpus-per-node" if partition.nodes.devices else "none")
    names = {"max_time": "max_time_s", "pending_limit": "pending_limit_s"}
    given: dict[str, Any] = {
        names.get(name, name): tuple(value) if isinstance(value, list) else value
        for name, value in options.items()
        if value is not None
    }
    return SlurmSettings(gpus=gpus, **given)
