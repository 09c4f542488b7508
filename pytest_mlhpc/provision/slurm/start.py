"""From a partition of systems.yaml to its provisioner: which client, and where the payload lies."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from pytest_mlhpc.jobs.places import SOURCE
from pytest_mlhpc.payload import payload_path
from pytest_mlhpc.provision.slurm.choose import choose
from pytest_mlhpc.provision.slurm.options import settings_of
from pytest_mlhpc.provision.slurm.provisioner import SlurmProvisioner
from pytest_mlhpc.system.model import Partition


def start(partition: Partition, root: Path) -> SlurmProvisioner:
    """Return the provisioner of *partition*; *root* is the folder that its nodes see.

    Raises:
        UsageError: ``client: pyslurm`` is asked for and cannot be had.
    """
    client, note = choose(settings_of(partition).client, os.environ)
    if note:
        logging.getLogger("pytest_mlhpc").info("%s: %s", partition.id, note)
    return SlurmProvisioner(partition, client, lambda sha: None if sha == SOURCE else payload_path(root, sha))
