"""Energy comes from the accounting, which lags: the end of a run waits for it where the partition says `energy: true`."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_mlhpc.batch.plan import PROTOCOL, Plan, RunPlan
from pytest_mlhpc.provision.base import AllocationEnded, LineArrived
from pytest_mlhpc.provision.clock import Clock
from pytest_mlhpc.provision.slurm.client import Job, State, Step, Submission
from pytest_mlhpc.provision.slurm.polling import ASK_ENERGY
from pytest_mlhpc.provision.slurm.provisioner import SlurmProvisioner
from pytest_mlhpc.results.lines import Message, encode
from pytest_mlhpc.system.model import Environment, NodeType, Partition

PARTITION = Partition(
    system="lab",
    name="cpu",
    scheduler="slurm",
    launcher="srun",
    accelerator="cpu",
    nodes=NodeType(cores=8, memory=2**30, max=4),
    environments=(Environment("default", "python3"),),
    scheduler_options={"partition": "cpu", "energy": True},
)
STEP = Step("0", "run-1", State.COMPLETED, nodes=("n1",), energy_j=420.0, end_ns=1)


class Cluster:
    """A cluster that ran the job at once; the accounting knows its step after *lag* questions."""

    name = "made up"

    def __init__(self, lag: int) -> None:
        self.lag = lag
        self.asked = 0

    def submit(self, submission: Submission) -> str:
        lines = submission.directory.parent / "lines"
        (lines / "alloc.up").write_text(
            json.dumps({"schema": 1, "job_id": "7", "nodes": ["n1"], "started_ns": 1})
        )
        started = Message("run-1", "nonce", "started", {"protocol": PROTOCOL, "payload_sha256": ""})
        end = Message("run-1", "nonce", "end", {"exit": [0]})
        log = submission.directory / "run-1" / "launcher.log"
        log.write_text("")
        (lines / "alloc.jsonl").write_bytes(b"".join([*encode(started, 0), *encode(end, 1)]))
        (lines / "alloc.over").write_text(json.dumps({"schema": 1, "exit": 0}))
        return "7"

    def jobs(self, **asked) -> list[Job]:
        return [Job("7", "mlhpc-alloc", str(os.getuid()), State.COMPLETED, nodes=("n1",), end_ns=1)]

    def accounting(self, ids) -> list[Job]:
        self.asked += 1
        steps = (STEP,) if self.asked > self.lag else ()
        return [replace(self.jobs()[0], steps=steps)]

    def nodes(self, names=()) -> list:
        return []

    def steps(self, ids) -> dict:
        return {}


def plan(folder: Path) -> Plan:
    run = RunPlan(
        run_id="run-1", nonce="nonce", attempt=0, workload="command", parameters={}, nodes=1, ranks=1,
        cores_per_rank=1, device_type="cpu", launcher="srun", time_limit_s=9.0, steps=1, warmup_steps=0, argv=("true",),
    )  # fmt: skip
    return Plan("alloc", "", str(folder / "runs/session/alloc"), 1, 60.0, (run,), environment="default")


def follow(tmp_path: Path, cluster: Cluster) -> list:
    now = [0.0]

    def wait(_event, seconds: float) -> bool:
        now[0] += seconds
        return False

    provisioner = SlurmProvisioner(PARTITION, cluster, lambda _sha: None, Clock(lambda: now[0], wait))
    handle = provisioner.submit(plan(tmp_path))
    events: list = []
    while not any(isinstance(event, AllocationEnded) for event in events):
        assert now[0] < 600
        events += provisioner.events([handle], 5.0)
    return events


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_the_end_of_a_run_brings_its_energy_and_its_step(tmp_path, lag):
    cluster = Cluster(lag)
    (end,) = [
        one.message
        for one in follow(tmp_path, cluster)
        if isinstance(one, LineArrived) and one.message.kind == "end"
    ]
    assert (end.body["step"], end.body["energy_j"]) == ("0", 420.0)
    assert cluster.asked == lag + 1


def test_an_accounting_that_never_knows_does_not_hold_the_result_up_for_ever(tmp_path):
    cluster = Cluster(lag=1000)
    events = follow(tmp_path, cluster)
    (end,) = [one.message for one in events if isinstance(one, LineArrived) and one.message.kind == "end"]
    assert "energy_j" not in end.body
    assert events[-1].error is None
    assert cluster.asked == ASK_ENERGY
