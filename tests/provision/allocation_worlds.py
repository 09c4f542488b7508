"""Plans, worker lines and a clock for tests of provisioners, and what all worlds with a scripted cluster share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pods

from pytest_mlhpc.config.model import Environment, NodeType, Partition
from pytest_mlhpc.jobs.provisioner import AllocationEnded, Event, LineArrived, StateChanged
from pytest_mlhpc.node.protocol.lines import Message, encode
from pytest_mlhpc.node.protocol.plan import PROTOCOL, Plan, RunPlan


def run_plan(run_id: str = "run-a", **changes: Any) -> RunPlan:
    """Return a plan for a run of one rank."""
    fields = {"workload": "tiny", "argv": (), "time_limit_s": 60.0, "warmup_steps": 0, "python": "python3"}
    return pods.run_plan(run_id, **{**fields, **changes})


def worker_lines(plan: Plan, *kinds: str, start: int = 0) -> list[bytes]:
    """Return the protocol lines by which the first run of *plan* reports messages of these kinds."""
    run = plan.runs[0]
    bodies: dict[str, dict[str, Any]] = {
        "started": {"protocol": PROTOCOL, "payload_sha256": plan.payload_sha256},
        "failed": {"outcome": "worker_killed", "text": "rank 0 was killed", "log": ""},
        "end": {"exit": [0]},
    }
    messages = [Message(run.run_id, run.nonce, kind, bodies[kind]) for kind in kinds]
    return [line for at, message in enumerate(messages, start) for line in encode(message, at)]


class ManualClock:
    """Time passes by waiting, and by calls that hang."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def wait(self, event: Any, seconds: float) -> bool:
        if not event.is_set():
            self.now += seconds
        return bool(event.is_set())

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class AllocationWorld:
    """A provisioner on a scripted cluster, a clock of its own, and the events that the provisioner returned."""

    provisioner: Any

    def __init__(self, folder: Path, scheduler: str, launcher: str, options: dict[str, Any]) -> None:
        self.clock = ManualClock()
        self.events: list[Event] = []
        self.handles: list[Any] = []
        self.folder = folder
        self.partition = Partition(
            system="lab", name="cpu", scheduler=scheduler, launcher=launcher, accelerator="cpu",
            nodes=NodeType(cores=8, memory=2**30, max=4), environments=(Environment("default", "python3"),),
            scheduler_options=options,
        )  # fmt: skip

    def plan(self, name: str = "a", nodes: int = 1, payload_sha256: str = "") -> Plan:
        run = run_plan("run-a", nodes=nodes, ranks=nodes, launcher=self.partition.launcher, time_limit_s=9.0)
        directory = str(self.folder / "runs/session" / name)
        return Plan(name, payload_sha256, directory, nodes, 60.0, (run,), environment="default")

    def submit(self, name: str = "a") -> Plan:
        plan = self.plan(name)
        self.handles.append(self.provisioner.submit(plan))
        return plan

    def follow(self, seconds: float = 3.0) -> list[AllocationEnded]:
        """Let time pass; return the ends of allocations so far."""
        until = self.clock.now + seconds
        while self.clock.now < until:
            self.events += self.provisioner.events(self.handles, min(5.0, until - self.clock.now))
        return self.ends

    def all_of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def ends(self) -> list[AllocationEnded]:
        return self.all_of(AllocationEnded)

    def lines(self) -> list[str]:
        return [event.message.kind for event in self.all_of(LineArrived)]

    def states(self) -> list[str]:
        return [event.state.value for event in self.all_of(StateChanged)]

    def reasons(self, name: str = "a") -> list[str]:
        changes = self.all_of(StateChanged)
        return [event.reason for event in changes if event.handle.id == name and event.reason]
