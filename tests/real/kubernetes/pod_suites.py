"""Suites that run against the real Kubernetes, and the objects that they created."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import running_suites
from kubernetes_service import Kubernetes
from services import LIMIT_S

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
            "fs_group": 1000, "volumes": volumes, "spread": "none", "grace": "3s", **kubernetes,
        },
        "environments": {
            "default": {"python": environment["MLHPC_TEST_PYTHON"], "variables": {"OMP_NUM_THREADS": "1"}}
        },
        "preset": "smoke",
        "time_limit": "10m",
        "max_jobs": 8,
    }  # fmt: skip


@dataclass
class Session(running_suites.Session):
    """One pytest that runs."""

    suite: Suite

    def pod(self, *phases: str) -> dict[str, Any]:
        """Wait until there is a pod in one of *phases* (any, without); return it."""
        found = self.until(
            f"pod in {phases}",
            lambda: [
                pod
                for pod in self.suite.objects("pods")
                if not phases or pod["status"].get("phase") in phases
            ],
        )
        return dict(found[0])


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

    def session(self, process: subprocess.Popen[bytes], output: Path) -> Session:
        """Return what stands for a pytest that was started."""
        return Session(self, process, output)

    def start(self, *options: str, environment: dict[str, str] | None = None) -> Session:
        """Start pytest."""
        started = super().start(*options, environment=environment)
        assert isinstance(started, Session)
        return started

    def kubectl(self, *words: str) -> str:
        """Return what kubectl prints, in the suite's namespace."""
        done = self.cluster.run("kubectl", "--namespace", self.namespace, *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def objects(self, *kinds: str) -> list[dict[str, Any]]:
        """Return our objects of these kinds."""
        found = self.kubectl("get", ",".join(kinds), "--selector", OURS, "--output", "json")
        items = json.loads(found)["items"]
        return [dict(item) for item in items]

    def ledgers(self) -> list[Path]:
        """Return the open ledgers."""
        return list(self.state.glob("ledger/*.jsonl"))

    def reap(self, code: int | None = 0) -> str:
        """Run ``mlhpc reap`` in the test's own environment; it ends with this code (None: any). Return its output."""
        done = subprocess.run(
            [sys.executable, "-m", "pytest_mlhpc.cli", "reap", "--state-dir", self.state],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
        assert code in {None, done.returncode}, done.stdout + done.stderr
        return done.stdout + done.stderr
