"""A cluster that does what a test says, with a clock of its own: for orders of events that a real one cannot be made to have."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_mlhpc.batch.plan import PROTOCOL, Plan, RunPlan
from pytest_mlhpc.provision.base import AllocationEnded, Event, StateChanged
from pytest_mlhpc.provision.clock import Clock
from pytest_mlhpc.provision.slurm import cancelling
from pytest_mlhpc.provision.slurm.client import Job, SlurmUnavailable, State, Submission
from pytest_mlhpc.provision.slurm.provisioner import SlurmProvisioner
from pytest_mlhpc.provision.slurm.submitting import lines_folder
from pytest_mlhpc.results.lines import Message, encode
from pytest_mlhpc.system.model import Environment, NodeType, Partition

ME = str(os.getuid())

PARTITION = Partition(
    system="lab",
    name="cpu",
    scheduler="slurm",
    launcher="srun",
    accelerator="cpu",
    nodes=NodeType(cores=8, memory=2**30, max=4),
    environments=(Environment("default", "python3"),),
    scheduler_options={"partition": "cpu"},
)


class Scripted:
    """A SlurmClient. ``on`` maps a call (submit, jobs, cancel ...) to what happens first; ``hangs`` to what gets no answer."""

    name = "scripted"

    def __init__(self, clock: FakeClock) -> None:
        self.queued: dict[str, Job] = {}
        self.said: list[str] = []  #: calls in their order
        self.cancelled: list[str] = []
        self.users: set[str] = set()
        self.hangs: set[str] = set()
        self.on: dict[str, Callable[[], Any]] = {}
        self.limit_s = 30.0
        self._clock = clock
        self._next = 100

    def _call(self, what: str) -> None:
        self.said.append(what)
        self.on.get(what, lambda: None)()
        if what in self.hangs or "all" in self.hangs:
            self._clock.now += self.limit_s
            raise SlurmUnavailable(f"{what}: no answer within {self.limit_s:g} s")

    def add(self, name: str, state: State = State.PENDING, **more: Any) -> Job:
        self._next += 1
        job = Job(str(self._next), name, ME, state, **more)
        self.queued[job.id] = job
        return job

    def set(self, job_id: str, **changes: Any) -> None:
        self.queued[job_id] = replace(self.queued[job_id], **changes)

    def submit(self, submission: Submission) -> str:
        self._call("submit")
        return self.add(submission.name).id

    def jobs(self, *, ids=(), names=(), user="") -> list[Job]:
        self._call("jobs")
        self.users.add(user)
        return [job for job in self.queued.values() if job.id in ids or job.name in names]

    def cancel(self, ids, signal: str = "") -> None:
        del signal
        self._call("cancel")
        self.cancelled += ids
        for job_id in ids:
            self.set(job_id, state=State.CANCELLED)

    def accounting(self, _ids) -> list[Job]:
        raise SlurmUnavailable("no accounting here")

    def steps(self, _ids) -> dict:
        return {}

    def nodes(self, _names=()) -> list:
        return []

    def queue(self, _partition) -> list[Job]:
        return []

    def expand(self, _hostlist) -> tuple[str, ...]:
        return ()


class FakeClock:
    """Time passes by waiting, and by calls that hang."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def wait(self, event, seconds: float) -> bool:
        if not event.is_set():
            self.now += seconds
        return event.is_set()

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class World:
    """A provisioner on such a cluster, and what its batches would write."""

    def __init__(self, folder: Path, monkeypatch) -> None:
        self.clock = FakeClock()
        self.slurm = Scripted(self.clock)
        self.provisioner = SlurmProvisioner(
            PARTITION,
            self.slurm,
            lambda _sha: None,
            Clock(self.clock.monotonic, self.clock.wait),
        )
        self.handles: list[Any] = []
        self.events: list[Event] = []
        self._folder = folder
        monkeypatch.setattr(cancelling, "time", self.clock)

    def plan(self, name: str = "a") -> Plan:
        run = RunPlan(
            run_id=f"run-{name}", nonce="nonce", attempt=0, workload="tiny", parameters={}, nodes=1, ranks=1,
            cores_per_rank=1, device_type="cpu", launcher="srun", time_limit_s=9.0, steps=1, warmup_steps=0,
            python="python3",
        )  # fmt: skip
        directory = str(self._folder / "runs/session" / name)
        return Plan(name, "", directory, 1, 60.0, (run,), environment="default")

    def submit(self, name: str = "a") -> Plan:
        plan = self.plan(name)
        self.handles.append(self.provisioner.submit(plan))
        return plan

    def adopt(self, name: str = "a", native_id: str = "") -> Plan:
        plan = self.plan(name)
        lines_folder(plan).mkdir(parents=True, exist_ok=True)
        self.handles.append(self.provisioner.adopt(plan, native_id))
        return plan

    def write(self, plan: Plan, *kinds: str, job_id: str = "101", code: int | None = None) -> None:
        """Write what the batch of *plan* has said so far: ``.up``, lines of these kinds, and ``.over`` with *code*."""
        stem, (run,) = str(lines_folder(plan) / plan.allocation_id), plan.runs
        up = {"schema": 1, "job_id": job_id, "nodes": ["n1"], "started_ns": 1}
        Path(f"{stem}.up").write_text(json.dumps(up))
        bodies = {
            "started": {"protocol": PROTOCOL, "payload_sha256": ""},
            "failed": {"outcome": "worker_exit", "text": "it failed", "log": ""},
            "end": {"exit": [0]},
        }
        told = [
            encode(Message(run.run_id, run.nonce, kind, bodies[kind]), at) for at, kind in enumerate(kinds)
        ]
        Path(f"{stem}.jsonl").write_bytes(b"".join(line for lines in told for line in lines))
        if code is not None:
            Path(f"{stem}.over").write_text(json.dumps({"schema": 1, "exit": code}))

    def follow(self, seconds: float) -> list[AllocationEnded]:
        """Let time pass and return the ends of allocations so far."""
        until = self.clock.now + seconds
        while self.clock.now < until:
            self.events += self.provisioner.events(self.handles, 5.0)
        return self.ends

    @property
    def ends(self) -> list[AllocationEnded]:
        return [event for event in self.events if isinstance(event, AllocationEnded)]

    def reasons(self, name: str = "a") -> list[str]:
        return [
            event.reason
            for event in self.events
            if isinstance(event, StateChanged) and event.handle.id == name and event.reason
        ]
