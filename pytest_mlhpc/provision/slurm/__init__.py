"""Provisioner `slurm`: nodes come from sbatch. :func:`make_provisioner` is the entry; imports wait until it is called."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_mlhpc.config.model import Partition

if TYPE_CHECKING:
    from pytest_mlhpc.provision.scheduler.client import SlurmClient
    from pytest_mlhpc.provision.slurm.over_ssh import RemoteRuns
    from pytest_mlhpc.provision.slurm.provisioner import SlurmProvisioner


def make_provisioner(partition: Partition, root: Path, session_id: str) -> SlurmProvisioner:
    """Return the provisioner of *partition*; *root* is the folder that its nodes see.

    Raises:
        UsageError: ``client: pyslurm`` is configured, and pyslurm cannot be used here.
    """
    from pytest_mlhpc.provision.payload import payload_of
    from pytest_mlhpc.provision.slurm.options import settings_of

    settings = settings_of(partition)
    runs = None
    if partition.ssh and not settings.here:
        from pytest_mlhpc.provision.slurm.over_ssh import RemoteRuns
        from pytest_mlhpc.provision.ssh import host_of

        runs = RemoteRuns(host_of(partition.ssh, os.environ), root, settings.shared_directory)
    client, note = client_of(partition, os.environ, runs)
    if note:
        logging.getLogger("pytest_mlhpc").info("%s: %s", partition.id, note)

    payload = payload_of(root)
    if settings.here:
        from pytest_mlhpc.provision.slurm.inside_job import InsideJobProvisioner

        runs_dir = root / "runs" / session_id
        return InsideJobProvisioner(partition, client, payload, session_id=session_id, runs_dir=runs_dir)
    from pytest_mlhpc.provision.slurm.provisioner import SlurmProvisioner

    return SlurmProvisioner(partition, client, payload, runs=runs)


def client_of(
    partition: Partition, environ: Mapping[str, str], runs: RemoteRuns | None = None
) -> tuple[SlurmClient, str]:
    """Return the client by which *partition*'s Slurm is asked, and a line for the log, mostly empty.

    *runs*: the folders of jobs that it submits by ssh.

    Raises:
        UsageError: ``client: pyslurm`` is configured, and pyslurm cannot be used here.
    """
    from pytest_mlhpc.provision.slurm.options import settings_of
    from pytest_mlhpc.provision.slurm.pyslurm import choose_client

    settings = settings_of(partition)
    if not partition.ssh or settings.here:
        return choose_client(settings.client, environ)
    from pytest_mlhpc.provision.slurm.over_ssh import RemoteSlurmClient
    from pytest_mlhpc.provision.ssh import host_of

    return RemoteSlurmClient(host_of(partition.ssh, environ), runs), ""
