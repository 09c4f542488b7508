"""Ranks behind torchrun: which one failed first, and how, is told although torchrun stands between."""

from __future__ import annotations

import signal
import sys

import pytest
from batches import finish, messages, start
from pods import run_plan

pytestmark = pytest.mark.servers

LAUNCHER = """
def launch(run, nodes, environment):
    argv = [run.python, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={run.ranks}"]
    return argv + [run.parameters["script"]], dict(environment)
"""

RANK = """
import os, signal, sys
from pytest_mlhpc.batch.channel import RankChannel
from pytest_mlhpc.results.schema import RankReport

channel = RankChannel.from_environment()
channel.started({"torch": "none"})
"""

#: All ranks meet; then one dies while the other waits for it.
KILLED = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
ones = torch.ones(4)
dist.all_reduce(ones)
if channel.rank == 1: os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(ones)
"""

FAILED = """
channel.report(RankReport(
    rank=channel.rank, local_rank=channel.rank, host="here", device_type="cpu", device_index=channel.rank,
    device_model="made up", steps=1, samples=2, started_ns=1, ended_ns=2, epoch_s=1.0, wait_s=0.1, copy_s=0.0,
    warmup_s=0.5, step_times_s=(1.0,), losses=(2.0,)))
channel.close()
sys.exit(7 if channel.rank == 1 else 0)
"""


@pytest.fixture(scope="module")
def bodies(tmp_path_factory):
    """Return what a batch tells of two runs, by run."""
    folder = tmp_path_factory.mktemp("torchrun")
    (folder / "stand_in.py").write_text(LAUNCHER)
    names = {"killed": KILLED, "failed": FAILED}
    runs = []
    for name, script in names.items():
        (folder / f"{name}.py").write_text(RANK + script)
        parameters = {"script": str(folder / f"{name}.py")}
        fields = {
            "workload": "resnet50",
            "argv": (),
            "ranks": 2,
            "launcher": "stand_in",
            "time_limit_s": 600.0,
        }
        runs.append(run_plan(name, parameters=parameters, python=sys.executable, **fields))
    code, output, _ = finish(start(folder, *runs, PYTHONPATH=str(folder), OMP_NUM_THREADS="1"))
    assert code == 0
    found = messages(output, *names)
    return {name: {item.kind: item.body for item in found if item.run_id == name} for name in names}


def test_a_rank_killed_while_the_other_waits_in_all_reduce_is_the_one_that_is_named(bodies):
    assert list(bodies["killed"]) == ["started", "failed", "end"]
    assert bodies["killed"]["failed"]["outcome"] == "worker_killed"
    assert bodies["killed"]["failed"]["text"].startswith("rank 1 was killed by SIGKILL")
    assert bodies["killed"]["end"]["exit"][1] == -signal.SIGKILL


def test_a_rank_that_fails_after_all_have_reported_is_named_with_its_exit_code(bodies):
    assert list(bodies["failed"]) == ["started", "failed", "end"]
    assert bodies["failed"]["failed"]["outcome"] == "worker_exit"
    text = "rank 1 ended with exit code 7 after it had reported"
    assert bodies["failed"]["failed"]["text"].startswith(text)
