"""Our own schedulers, launchers, workloads and channels, by the hooks that third parties use; the one plug-in manager."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

from pytest_mlhpc import hookspecs
from pytest_mlhpc.hookspecs import Preview, hookimpl

if TYPE_CHECKING:
    from pytest_mlhpc.config.model import Environment, Partition
    from pytest_mlhpc.jobs.provisioner import Provisioner
    from pytest_mlhpc.node.worker.workloads.definitions import Workload


def make_manager(*, entry_points: bool = True) -> pluggy.PluginManager:
    """Return a manager with our own parts registered, and those of installed packages unless disabled."""
    manager = pluggy.PluginManager("pytest_mlhpc")
    manager.add_hookspecs(hookspecs)
    manager.register(sys.modules[__name__], "builtin")
    if entry_points:
        manager.load_setuptools_entrypoints("pytest_mlhpc")
    return manager


def channel_types() -> dict[str, str]:
    """Return the types of channels for alerts, ours and those of installed packages, each with its module."""
    found: dict[str, str] = {}
    for types in make_manager().hook.mlhpc_alert_channels():
        found |= types
    return found


@hookimpl
def mlhpc_provisioner(partition: Partition, state_dir: Path, session_id: str) -> Provisioner | None:
    """Serve ``scheduler: local``, ``slurm``, ``commands`` and ``kubernetes``."""
    if partition.scheduler == "local":
        from pytest_mlhpc.provision.local import LocalProvisioner

        return LocalProvisioner(state_dir=state_dir, session_id=session_id)
    if partition.scheduler == "slurm":
        from pytest_mlhpc.provision.slurm import make_provisioner

        return make_provisioner(partition, state_dir, session_id)
    if partition.scheduler == "commands":
        from pytest_mlhpc.provision.payload import payload_of
        from pytest_mlhpc.provision.scheduler.commands import make_provisioner as make_defined_provisioner

        return make_defined_provisioner(partition, payload_of(state_dir), os.environ)
    if partition.scheduler == "kubernetes":
        from pytest_mlhpc.provision.kubernetes.provisioner import (
            make_provisioner as make_kubernetes_provisioner,
        )

        return make_kubernetes_provisioner(partition, state_dir, session_id)
    return None


@hookimpl
def mlhpc_schedulers() -> Mapping[str, type[Any] | None]:
    """``local`` has no options of its own; the file is being checked, so that pydantic is there."""
    from pytest_mlhpc.provision.kubernetes.schema import KubernetesOptions
    from pytest_mlhpc.provision.scheduler.definition import CommandsOptions
    from pytest_mlhpc.provision.slurm.schema import SlurmOptions

    return {
        "local": None,
        "slurm": SlurmOptions,
        "kubernetes": KubernetesOptions,
        "commands": CommandsOptions,
    }


@hookimpl
def mlhpc_preview(partition: Partition, environment: Environment) -> Preview | None:
    """Show job scripts and manifests of Kubernetes; nothing is written down for `local`."""
    if partition.scheduler == "slurm":
        from pytest_mlhpc.provision.scheduler.script import preview_script
        from pytest_mlhpc.provision.slurm.script import SLURM

        return Preview("sh", preview_script(partition, environment, SLURM))
    if partition.scheduler == "commands":
        from pytest_mlhpc.provision.scheduler.commands import script_rules
        from pytest_mlhpc.provision.scheduler.script import preview_script

        return Preview("sh", preview_script(partition, environment, script_rules(partition)))
    if partition.scheduler == "kubernetes":
        from pytest_mlhpc.provision.kubernetes.manifest import preview as preview_manifests

        return Preview("yaml", preview_manifests(partition, environment))
    return None


@hookimpl
def mlhpc_launchers() -> Mapping[str, str]:
    """One rank by itself, and several by torchrun, srun, mpirun, poprun, or the agents of pods."""
    names = ("plain", "spawn", "torchrun", "srun", "mpirun", "poprun", "podrun")
    return dict.fromkeys(names, "pytest_mlhpc.node.launch")


@hookimpl
def mlhpc_workloads() -> tuple[Workload, ...]:
    """The four training workloads and ``command``."""
    from pytest_mlhpc.node.worker.workloads.catalogue import WORKLOADS

    return WORKLOADS


@hookimpl
def mlhpc_alert_channels() -> Mapping[str, str]:
    """Mail, a webhook, Alertmanager, issues of GitLab, and apprise for the rest."""
    names = ("smtp", "webhook", "alertmanager", "gitlab_issue", "apprise")
    return {name: f"pytest_mlhpc.alert.channels.{name}" for name in names}
