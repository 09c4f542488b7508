"""Our own schedulers, launchers and workloads, registered by the hooks that third parties use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_mlhpc.hookspecs import Preview, hookimpl

if TYPE_CHECKING:
    from pytest_mlhpc.provision.base import Provisioner
    from pytest_mlhpc.system.model import Environment, Partition
    from pytest_mlhpc.worker.workloads.definitions import Workload


@hookimpl
def mlhpc_provisioner(partition: Partition, state_dir: Path, session_id: str) -> Provisioner | None:
    """Serve ``scheduler: local``, ``scheduler: slurm`` and ``scheduler: kubernetes``."""
    if partition.scheduler == "local":
        from pytest_mlhpc.provision.local import LocalProvisioner

        return LocalProvisioner(state_dir=state_dir, session_id=session_id)
    if partition.scheduler == "slurm":
        from pytest_mlhpc.provision.slurm.start import start

        return start(partition, state_dir, session_id)
    if partition.scheduler == "kubernetes":
        from pytest_mlhpc.provision.kubernetes.start import start as start_kubernetes

        return start_kubernetes(partition, state_dir, session_id)
    return None


@hookimpl
def mlhpc_schedulers() -> Mapping[str, type[Any] | None]:
    """``local`` has no options of its own; the file is being checked, so that pydantic is there."""
    from pytest_mlhpc.provision.kubernetes.schema import KubernetesOptions
    from pytest_mlhpc.provision.slurm.schema import SlurmOptions

    return {"local": None, "slurm": SlurmOptions, "kubernetes": KubernetesOptions}


@hookimpl
def mlhpc_preview(partition: Partition, environment: Environment) -> Preview | None:
    """Show job scripts of Slurm and manifests of Kubernetes; nothing is written down for `local`."""
    if partition.scheduler == "slurm":
        from pytest_mlhpc.provision.slurm.preview import preview

        return Preview("sh", preview(partition, environment))
    if partition.scheduler == "kubernetes":
        from pytest_mlhpc.provision.kubernetes.preview import preview as preview_manifests

        return Preview("yaml", preview_manifests(partition, environment))
    return None


@hookimpl
def mlhpc_launchers() -> Mapping[str, str]:
    """One rank by itself, and several by torchrun, srun, mpirun, poprun, or the agents of pods."""
    names = ("plain", "torchrun", "srun", "mpirun", "poprun", "podrun")
    return {name: f"pytest_mlhpc.launch.{name}" for name in names}


@hookimpl
def mlhpc_workloads() -> tuple[Workload, ...]:
    """The four training workloads and ``command``."""
    from pytest_mlhpc.worker.workloads.catalogue import WORKLOADS

    return WORKLOADS


@hookimpl
def mlhpc_alert_channels() -> Mapping[str, str]:
    """Mail, a webhook, Alertmanager, issues of GitLab, and apprise for the rest."""
    names = ("smtp", "webhook", "alertmanager", "gitlab_issue", "apprise")
    return {name: f"pytest_mlhpc.alert.channels.{name}" for name in names}
