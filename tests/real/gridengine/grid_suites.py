"""Suites that run against the real Grid Engine, and the jobs that they submitted."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import running_suites
from gridengine_service import GridEngine


class Suite(running_suites.Suite):
    """A suite run against *cluster*."""

    def __init__(self, cluster: GridEngine, folder: Path, state: Path) -> None:
        super().__init__(folder, state)
        self.cluster = cluster

    def partition(self, commands: Mapping[str, Any] | None = None, **changes: Any) -> None:
        """Write the systems file: one partition of two hosts; *commands* are more of its options, *changes* the rest of it."""
        entry = {
            "scheduler": "commands", "accelerator": "cpu", "preset": "smoke", "time_limit": "10m", "max_jobs": 8,
            "nodes": {"cores": 2, "memory": "4000MiB", "max": 3},
            "environments": {"default": {"python": sys.executable, "variables": {"OMP_NUM_THREADS": "1"}}},
            "commands": {"definition": "gridengine", **(commands or {})},
        }  # fmt: skip
        self.systems(cluster={"description": "for tests", "partitions": {"part": {**entry, **changes}}})

    def job_ids(self) -> list[str]:
        """Return the scheduler's ids that the ledgers have now."""
        lines = [json.loads(line) for path in self.ledgers() for line in path.read_text().splitlines()]
        return sorted({str(line["native_id"]) for line in lines if line.get("native_id")})

    def jobs(self) -> dict[str, str]:
        """Return id -> state, in Grid Engine's letters, of jobs that sessions of this state directory submitted and that have not ended."""
        found = self.cluster.jobs().items()
        return {job: self.cluster.state(job) for job, text in found if f"{self.state}/" in text}

    def ended_alone(self) -> None:
        """Assert that no job and no entry of the ledger is left."""
        running_suites.wait_for(lambda: self.jobs() == {})
        assert self.ledgers() == []

    def running(self) -> str:
        """Wait until one job runs while the last session does; return its id."""
        session = self.sessions[-1]
        return session.until(
            "running job", lambda: [job for job, state in self.jobs().items() if state == "r"]
        )[0]
