"""Our own schedulers, launchers and workloads, registered by the hooks that third parties use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_mlhpc.hookspecs import hookimpl

if TYPE_CHECKING:
    from pytest_mlhpc.provision.base import Provisioner
    from pytest_mlhpc.system.model import Partition
    from pytest_mlhpc.worker.workloads.definitions import Workload


@hookimpl
def mlhpc_provisioner(partition: Partition, state_dir: Path, session_id: str) -> Provisioner | None:
    """Serve ``scheduler: local`` and ``scheduler: slurm``."""
    if partition.scheduler == "local":
        from pytest_mlhpc.provision.local import LocalProvisioner

        return LocalProvisioner(state_dir=state_dir, session_id=session_id)
    if partition.scheduler == "slurm":
        from pytest_mlhpc.provision.slurm.start import start

        return start(partition, state_dir, session_id)
    return None


@hookimpl
def mlhpc_schedulers() -> Mapping[str, type[Any] | None]:
    """``local`` has no options of its own; the file is being checked, so that pydantic is there."""
    from pytest_mlhpc.provision.slurm.schema import SlurmOptions

    return {"local": None, "slurm": SlurmOptions}


@hookimpl
def mlhpc_launchers() -> Mapping[str, str]:
    """One rank by itself, and several by torchrun, srun or mpirun."""
    return {name: f"pytest_mlhpc.launch.{name}" for name in ("plain", "torchrun", "srun", "mpirun")}


@hookimpl
def mlhpc_workloads() -> tuple[Workload, ...]:
    """The four training workloads and ``command``."""
    from pytest_mlhpc.worker.workloads.catalogue import WORKLOADS

    return WORKLOADS
