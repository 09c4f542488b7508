"""The control plane: etcd, kube-apiserver, kube-controller-manager, kube-scheduler."""

from __future__ import annotations

from pathlib import Path

from testcluster import ports
from testcluster.daemons import Daemons

from testkubernetes import configuration
from testkubernetes.api import Api
from testkubernetes.settings import START_LIMIT_S, Settings

_LINES = {
    "etcd": configuration.etcd,
    "kube-apiserver": configuration.apiserver,
    "kube-controller-manager": configuration.controller_manager,
    "kube-scheduler": configuration.scheduler,
}


def spawn(daemons: Daemons, settings: Settings, programs: dict[str, Path], name: str) -> None:
    """Start one of them, if it does not run, and do not wait."""
    daemons.start(name, _LINES[name](daemons.directory, settings, programs[name]))


def start(daemons: Daemons, settings: Settings, programs: dict[str, Path], name: str) -> None:
    """Start one of them, if it does not run, and wait until it serves.

    Raises:
        ClusterError: It ended, or did not serve in time.
    """
    spawn(daemons, settings, programs, name)
    api = Api(daemons.directory, settings)
    checks = {"etcd": lambda: ports.answers(settings.port_of("etcd")), "kube-apiserver": api.is_ready}
    if name in checks:  # the others look for the API themselves, and nobody waits for them
        daemons.await_service(name, checks[name], limit_s=START_LIMIT_S)
