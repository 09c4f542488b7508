"""From a partition of systems.yaml to its provisioner: which client, and where the payload lies."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_mlhpc.jobs.places import SOURCE
from pytest_mlhpc.payload import payload_path
from pytest_mlhpc.provision.slurm.choose import choose
from pytest_mlhpc.provision.slurm.options import settings_of
from pytest_mlhpc.provision.slurm.provisioner import SlurmProvisioner
from pytest_mlhpc.system.model import Partition

if TYPE_CHECKING:
    from pytest_mlhpc.provision.slurm.here import HereProvisioner


def start(partition: Partition, root: Path, session_id: str) -> SlurmProvisioner | HereProvisioner:
    """Return the provisioner of *partition*; *root* is the folder that its nodes see.

    Raises:
        UsageError: ``client: pyslurm`` is asked for and cannot be had.
    """
    settings = settings_of(partition)
    client, note = choose(settings.client, os.environ)
    if note:
        logging.getLogger("pytest_mlhpc").info("%s: %s", partition.id, note)

    def payload(sha: str) -> Path | None:
        return None if sha == SOURCE else payload_path(root, sha)

    if settings.here:
        from pytest_mlhpc.provision.slurm.here import HereProvisioner

        runs_dir = root / "runs" / session_id
        return HereProvisioner(partition, client, payload, session_id=session_id, runs_dir=runs_dir)
    return SlurmProvisioner(partition, client, payload)
