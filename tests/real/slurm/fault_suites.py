"""Suites that run against the real Slurm, and the jobs that they submitted."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import running_suites
from running_suites import LIMIT_S, Result, wait_for
from services import QueuedJob, Slurm

__all__ = ["LIMIT_S", "Result", "Session", "Suite", "wait_for"]


@dataclass
class Session(running_suites.Session):
    """One pytest that runs."""

    suite: Suite

    def job(self, *states: str) -> QueuedJob:
        """Wait until there is one job that this suite submitted in one of *states*; return it."""
        found = self.until(f"job in {states}", lambda: [j for j in self.suite.jobs() if j.state in states])
        assert isinstance(found[0], QueuedJob)
        return found[0]


class Suite(running_suites.Suite):
    """A suite run against *slurm*."""

    def __init__(self, slurm: Slurm, folder: Path, state: Path) -> None:
        super().__init__(folder, state)
        self.slurm = slurm

    def session(self, process: subprocess.Popen[bytes], output: Path) -> Session:
        """Return what stands for a pytest that was started."""
        return Session(self, process, output)

    def start(self, *options: str, environment: dict[str, str] | None = None) -> Session:
        """Start pytest."""
        started = super().start(*options, environment=environment)
        assert isinstance(started, Session)
        return started

    def partition(self, name: str = "cpu", time_limit: str = "2m", setup: str = "", **slurm: Any) -> None:
        """Write the systems file: one partition, whose options under ``slurm:`` are *slurm*.

        ``slurm`` may hold ``partition``, the cluster's own name for it (default: *name*).
        """
        environment: dict[str, Any] = {"python": sys.executable, "variables": {"OMP_NUM_THREADS": "1"}}
        if setup:
            environment["setup"] = setup
        entry = {
            "scheduler": "slurm",
            "launcher": "srun",
            "accelerator": "cpu",
            "nodes": {"cores": 2, "memory": "16000MiB", "max": 4},
            "slurm": {"partition": name, "pending_limit": "5m", **slurm},
            "environments": {"default": environment},
            "preset": "smoke",
            "time_limit": time_limit,
            "max_jobs": 8,
        }
        self.systems(cluster={"description": "for tests", "partitions": {"part": entry}})

    def jobs(self) -> list[QueuedJob]:
        """Return all jobs that sessions of this state directory submitted, ended ones too; oldest first."""
        below = [job for job in self.slurm.jobs() if job.folder.startswith(f"{self.state}/")]
        return sorted(below, key=lambda job: int(job.id))

    def lines(self, suffix: str) -> Iterator[Path]:
        """Yield the files of batches with this suffix."""
        yield from self.state.glob(f"runs/*/lines/*.{suffix}")
