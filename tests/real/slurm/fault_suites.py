"""Suites that run against the real Slurm, and the jobs that they submitted."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import running_suites
from faults import Fault, run_faults
from services import QueuedJob, Slurm


class Suite(running_suites.Suite):
    """A suite run against *slurm*."""

    def __init__(self, slurm: Slurm, folder: Path, state: Path) -> None:
        super().__init__(folder, state)
        self.slurm = slurm

    def partition(
        self,
        name: str = "cpu",
        time_limit: str = "10m",
        setup: str = "",
        python: str = sys.executable,
        also: Mapping[str, Mapping[str, Any]] | None = None,
        **slurm: Any,
    ) -> None:
        """Write the systems file: one partition, whose options under ``slurm:`` are *slurm*.

        Args:
            name: The cluster's own name for it; ``partition`` in *slurm* overrides it.
            time_limit: Of its runs.
            setup: What its jobs do first.
            python: Their interpreter.
            also: Further partitions, each with options that differ.
            slurm: Its options.
        """
        environment: dict[str, Any] = {"python": python, "variables": {"OMP_NUM_THREADS": "1"}}
        if setup:
            environment["setup"] = setup
        entry = {
            "scheduler": "slurm", "launcher": "srun", "accelerator": "cpu",
            "nodes": {"cores": 2, "memory": "16000MiB", "max": 4},
            "environments": {"default": environment}, "preset": "smoke", "time_limit": time_limit, "max_jobs": 8,
        }  # fmt: skip
        common = {"partition": name, "pending_limit": "1h", **slurm}
        self.also = set(also or {})
        options = {"part": common, **{key: {**common, **changes} for key, changes in (also or {}).items()}}
        partitions = {key: {**entry, "slurm": value} for key, value in options.items()}
        self.systems(cluster={"description": "for tests", "partitions": partitions})

    def ids(self, *tests: str) -> list[str]:
        """Return pytest's names of tests, each on the partition that is named like it, or on the usual one."""
        return [f"test_faults.py::test_{one}[cluster:{one if one in self.also else 'part'}]" for one in tests]

    def run_faults(self, faults: Sequence[Fault]) -> None:
        """Run them all in one session, each on a partition with its options, and assert what became of each."""
        self.partition(also={fault.name: fault.options for fault in faults if fault.options})
        run_faults(self, faults, *self.ids(*(fault.name for fault in faults)), scheduler="")

    def jobs(self) -> list[QueuedJob]:
        """Return all jobs that sessions of this state directory submitted, ended ones too; oldest first."""
        below = [job for job in self.slurm.jobs() if job.folder.startswith(f"{self.state}/")]
        return sorted(below, key=lambda job: int(job.id))

    def job(self, *states: str) -> QueuedJob:
        """Wait until there is a job in one of *states* while the last session runs; return it."""
        session = self.sessions[-1]
        return session.until(f"job in {states}", lambda: [j for j in self.jobs() if j.state in states])[0]

    def job_of(self, name: str) -> QueuedJob:
        """Return the newest job that runs a test: its plan has the script that says that it has begun."""
        return [
            job for job in self.jobs() if f"begun-{name};" in (Path(job.folder) / "plan.json").read_text()
        ][-1]

    def accepted(self, session: running_suites.Session) -> None:
        """Wait until the ledger has the ids of all jobs that *session* submitted."""
        ids = [job.id for job in self.jobs() if not job.ended]
        assert ids

        def written() -> bool:
            ledger = "".join(path.read_text() for path in self.ledgers())
            return all(job_id in ledger for job_id in ids)

        session.until("the ids in the ledger", written)

    def release(self) -> None:
        """Let jobs start that were submitted with --hold."""
        held = [job.id for job in self.jobs() if job.state == "PENDING"]
        self.slurm.run("scontrol", "release", *held)

    def once(self) -> None:
        """Assert that one job was submitted in all, and one record was made of it."""
        (job,), (record,) = self.jobs(), self.records()
        assert (record["verdict"], record["job_id"], self.ledgers()) == ("unjudged", job.id, [])

    def lines(self, suffix: str) -> Iterator[Path]:
        """Yield the files of batches with this suffix."""
        yield from self.state.glob(f"runs/*/lines/*.{suffix}")
