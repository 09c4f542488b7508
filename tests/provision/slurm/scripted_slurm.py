"""A cluster that does what a test says, with a clock of its own: for orders of events that a real one cannot be made to have."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from allocation_worlds import AllocationWorld, ManualClock, worker_lines

from pytest_mlhpc.jobs.provisioner import MonotonicClock
from pytest_mlhpc.node.protocol.plan import Plan
from pytest_mlhpc.provision.scheduler import submit
from pytest_mlhpc.provision.scheduler.client import (
    JobSubmission,
    SchedulerJob,
    SchedulerState,
    SchedulerUnavailable,
)
from pytest_mlhpc.provision.scheduler.submit import lines_directory
from pytest_mlhpc.provision.slurm.provisioner import SlurmProvisioner

ME = str(os.getuid())


class ScriptedSlurm:
    """A SlurmClient. ``on`` maps a call (submit, jobs, cancel ...) to what happens first; ``hangs`` to what gets no answer."""

    title, key, name = "Slurm", "slurm", "scripted"

    def __init__(self, clock: ManualClock) -> None:
        self.queued: dict[str, SchedulerJob] = {}
        self.calls: list[str] = []  #: in their order
        self.cancelled: list[str] = []
        self.users: set[str] = set()
        self.hangs: set[str] = set()
        self.on: dict[str, Callable[[], Any]] = {}
        self.limit_s = 30.0
        self._clock = clock
        self._next = 100

    def _call(self, what: str) -> None:
        self.calls.append(what)
        self.on.get(what, lambda: None)()
        if what in self.hangs or "all" in self.hangs:
            self._clock.now += self.limit_s
            raise SchedulerUnavailable(f"{what}: no answer within {self.limit_s:g} s")

    def add(self, name: str, state: SchedulerState = SchedulerState.PENDING, **more: Any) -> SchedulerJob:
        self._next += 1
        job = SchedulerJob(str(self._next), name, ME, state, **more)
        self.queued[job.id] = job
        return job

    def set(self, job_id: str, **changes: Any) -> None:
        self.queued[job_id] = replace(self.queued[job_id], **changes)

    def submit(self, submission: JobSubmission) -> str:
        self._call("submit")
        return self.add(submission.name).id

    def jobs(self, *, ids=(), names=(), user="") -> list[SchedulerJob]:
        self._call("jobs")
        self.users.add(user)
        return [job for job in self.queued.values() if job.id in ids or job.name in names]

    def cancel(self, ids, signal: str = "") -> None:

        self._call("cancel")
        self.cancelled += ids
        for job_id in ids:
            self.set(job_id, state=SchedulerState.CANCELLED)

    def accounting(self, _ids) -> list[SchedulerJob]:
        raise SchedulerUnavailable("no accounting here")

    def steps(self, _ids) -> dict:
        return {}

    def nodes(self, _names=()) -> list:
        return []

    def queue(self, _partition) -> list[SchedulerJob]:
        return []

    def expand(self, _hostlist) -> tuple[str, ...]:
        return ()


class World(AllocationWorld):
    """A provisioner on such a cluster, and what its batches would write."""

    def __init__(self, folder: Path, monkeypatch, **options: Any) -> None:
        super().__init__(folder, "slurm", "srun", {"partition": "cpu", **options})
        self.slurm = ScriptedSlurm(self.clock)
        clock = MonotonicClock(self.clock.monotonic, self.clock.wait)
        self.provisioner = SlurmProvisioner(self.partition, self.slurm, lambda _sha: None, clock)
        monkeypatch.setattr(submit, "time", self.clock)

    def adopt(self, name: str = "a", native_id: str = "") -> Plan:
        plan = self.plan(name)
        lines_directory(plan).mkdir(parents=True, exist_ok=True)
        self.handles.append(self.provisioner.adopt(plan, native_id))
        return plan

    def write(self, plan: Plan, *kinds: str, job_id: str = "101", code: int | None = None) -> None:
        """Write the files of *plan*'s batch so far: ``.up``, lines of these kinds, and ``.over`` with *code*."""
        stem = str(lines_directory(plan) / plan.allocation_id)
        up = {"schema": 1, "job_id": job_id, "nodes": ["n1"], "started_ns": 1}
        Path(f"{stem}.up").write_text(json.dumps(up))
        Path(f"{stem}.jsonl").write_bytes(b"".join(worker_lines(plan, *kinds)))
        if code is not None:
            Path(f"{stem}.over").write_text(json.dumps({"schema": 1, "exit": code}))

    def started(self, *kinds: str, code: int | None = None, **changes: Any) -> Plan:
        """Submit an allocation whose job has these attributes, and whose batch has begun and reported these kinds too."""
        plan = self.submit()
        self.write(plan, "started", *kinds, code=code)
        if changes:
            self.slurm.set("101", **changes)
        return plan
