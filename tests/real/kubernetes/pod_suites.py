"""Suites that run against the real Kubernetes, and the objects that they created."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import running_suites
from kubernetes_service import Kubernetes

#: Every object of ours.
OURS = "app.kubernetes.io/managed-by=pytest-mlhpc"


def partition_of(cluster: Kubernetes, namespace: str, **kubernetes: Any) -> dict[str, Any]:
    """Return a partition of systems.yaml whose pods run this very environment, mounted from the host, as user 1000."""
    environment = cluster.environment
    volumes = [
        {"name": name, "host_path": path, "mount": path, "read_only": True}
        for name, path in cluster.host_folders().items()
    ]
    return {
        "scheduler": "kubernetes",
        "launcher": "torchrun",
        "accelerator": "cpu",
        "nodes": {"cores": 2, "memory": "3GiB", "max": 2},
        "kubernetes": {
            "namespace": namespace, "image": "mlhpc.test/host:1", "run_as_user": 1000, "run_as_group": 1000,
            "fs_group": 1000, "volumes": volumes, "spread": "none", "grace": "3s",
            # A small part of a node: no pod waits for room that pods of other tests have.
            "resources": {"requests": {"cpu": "500m", "memory": "512Mi"}}, **kubernetes,
        },
        "environments": {
            "default": {"python": environment["MLHPC_TEST_PYTHON"], "variables": {"OMP_NUM_THREADS": "1"}}
        },
        "preset": "smoke",
        "time_limit": "10m",
        "max_jobs": 8,
    }  # fmt: skip


class Suite(running_suites.Suite):
    """A suite run in *namespace* of *cluster*."""

    def __init__(self, cluster: Kubernetes, namespace: str, folder: Path, state: Path) -> None:
        super().__init__(folder, state)
        self.cluster, self.namespace = cluster, namespace

    def partition(self, changes: dict[str, Any] | None = None, **kubernetes: Any) -> None:
        """Write the systems file: one partition, with these options under ``kubernetes:`` and *changes* beside it."""
        self.folder.chmod(0o777)  # pods write marks there, as another user
        entry = partition_of(self.cluster, self.namespace, **kubernetes)
        path = str(self.folder)
        entry["kubernetes"]["volumes"].append({"name": "suite", "host_path": path, "mount": path})
        for name, value in (changes or {}).items():
            entry[name] = {**entry.get(name, {}), **value} if isinstance(value, dict) else value
        self.systems(cluster={"description": "for tests", "partitions": {"part": entry}})

    def kubectl(self, *words: str) -> str:
        """Return what kubectl prints, in the suite's namespace."""
        done = self.cluster.run("kubectl", "--namespace", self.namespace, *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def objects(self, *kinds: str) -> list[dict[str, Any]]:
        """Return our objects of these kinds."""
        found = self.kubectl("get", ",".join(kinds), "--selector", OURS, "--output", "json")
        return json.loads(found)["items"]

    def pod(self, *phases: str) -> dict[str, Any]:
        """Wait until there is a pod in one of *phases* (any, without) while the last session runs; return it."""

        def pods() -> list[dict[str, Any]]:
            found = self.objects("pods")
            return [pod for pod in found if not phases or pod["status"].get("phase") in phases]

        return self.sessions[-1].until(f"pod in {phases}", pods)[0]
