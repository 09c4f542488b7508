"""From a partition of systems.yaml to its provisioner."""

from __future__ import annotations

import os
from pathlib import Path

from pytest_mlhpc.payload import payload_path
from pytest_mlhpc.provision.kubernetes.clusters import Clusters
from pytest_mlhpc.provision.kubernetes.options import settings_of
from pytest_mlhpc.provision.kubernetes.provisioner import KubernetesProvisioner
from pytest_mlhpc.system.model import Partition


def start(partition: Partition, root: Path, session_id: str) -> KubernetesProvisioner:
    """Return the provisioner of *partition*; payloads lie below *root*. Nothing is asked of a server yet.

    Raises:
        UsageError: there is no way to a server: no client, no kubeconfig, no such context.
    """
    clusters = Clusters(os.environ)
    clusters.reach(settings_of(partition))  # what cannot work is told before anything is begun
    return KubernetesProvisioner(partition, clusters, lambda sha: payload_path(root, sha), session_id)
