"""Suites that run against the real Grid Engine, and the jobs that they submitted."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import running_suites
from gridengine_service import GridEngine


class Suite(running_suites.Suite):
    """A suite run against *cluster*."""

    def __init__(self, cluster: GridEngine, folder: Path, state: Path) -> None:
        super().__init__(folder, state)
        self.cluster = cluster

    def partition(self, time_limit: str = "10m", **commands: Any) -> None:
        """Write the systems file: one partition of two hosts, with more options under ``commands:``."""
        entry = {
            "scheduler": "commands", "accelerator": "cpu", "nodes": {"cores": 2, "memory": "2GiB", "max": 2},
            "environments": {"default": {"python": sys.executable, "variables": {"OMP_NUM_THREADS": "1"}}},
            "preset": "smoke", "time_limit": time_limit, "max_jobs": 8,
            "commands": {"definition": "gridengine", "pending_limit": "1h", **commands},
        }  # fmt: skip
        self.systems(cluster={"description": "for tests", "partitions": {"part": entry}})

    def jobs(self) -> dict[str, str]:
        """Return id -> state, in Grid Engine's letters, of jobs that sessions of this state directory submitted and that have not ended."""
        found = self.cluster.jobs().items()
        return {job: self.cluster.state(job) for job, text in found if f"{self.state}/" in text}

    def running(self) -> str:
        """Wait until one job runs while the last session does; return its id."""
        session = self.sessions[-1]
        return session.until(
            "running job", lambda: [job for job, state in self.jobs().items() if state == "r"]
        )[0]
