"""Ranks behind torchrun: which one failed first, and how, is told although torchrun stands between."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_mlhpc.batch.plan import Plan, RunPlan
from pytest_mlhpc.results.lines import Decoder, Message
from pytest_mlhpc.results.schema import to_json

LAUNCHER = """
def launch(run, nodes, environment):
    argv = [run.python, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={run.ranks}"]
    return argv + [run.parameters["script"]], dict(environment)
"""

RANK = """
import os, signal, sys
import torch
import torch.distributed as dist
from pytest_mlhpc.batch.channel import RankChannel
from pytest_mlhpc.results.schema import RankReport

torch.set_num_threads(1)
channel = RankChannel.from_environment()
channel.started({"torch": torch.__version__})
dist.init_process_group("gloo")
ones = torch.ones(4)
dist.all_reduce(ones)
"""

REPORT = """
channel.report(RankReport(
    rank=channel.rank, local_rank=channel.rank, host="here", device_type="cpu", device_index=channel.rank,
    device_model="made up", steps=1, samples=2, started_ns=1, ended_ns=2, epoch_s=1.0, wait_s=0.1, copy_s=0.0,
    warmup_s=0.5, step_times_s=(1.0,), losses=(2.0,)))
channel.close()
"""


def run_batch(folder: Path, script: str) -> list[Message]:
    (folder / "rank.py").write_text(RANK + script)
    package = folder / "stand_in"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "torchrun.py").write_text(LAUNCHER)
    run = RunPlan(
        "run-1", "nonce", 0, "resnet50", {"script": str(folder / "rank.py")}, 1, 2, 1, "cpu", "stand_in.torchrun",
        60.0, 1, 0, python=sys.executable,
    )  # fmt: skip
    plan = Plan("run-1", "", str(folder), 1, 60.0, (run,))
    (folder / "plan.json").write_text(json.dumps(to_json(plan)))
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-m", "pytest_mlhpc.batch.main", str(folder / "plan.json")]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=folder
    ) as batch:
        assert batch.stdout is not None
        output = batch.stdout.read()
    assert batch.returncode == 0
    return [item for item in Decoder({"run-1": "nonce"}).feed(output) if isinstance(item, Message)]


@pytest.mark.servers
def test_a_rank_killed_while_the_other_waits_in_all_reduce_is_the_one_that_is_named(tmp_path):
    script = "if channel.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.all_reduce(ones)\n"
    messages = run_batch(tmp_path, script)
    assert [message.kind for message in messages] == ["started", "failed", "end"]
    assert messages[1].body["outcome"] == "worker_killed"
    assert messages[1].body["text"].startswith("rank 1 was killed by SIGKILL")
    assert messages[2].body["exit"][1] == -signal.SIGKILL


@pytest.mark.servers
def test_a_rank_that_fails_after_all_have_reported_is_named_with_its_exit_code(tmp_path):
    messages = run_batch(
        tmp_path, REPORT + "dist.destroy_process_group()\nsys.exit(7 if channel.rank == 1 else 0)\n"
    )
    assert [message.kind for message in messages] == ["started", "failed", "end"]
    assert messages[1].body["outcome"] == "worker_exit"
    assert messages[1].body["text"].startswith("rank 1 ended with exit code 7 after it had reported")


@pytest.mark.servers
def test_two_ranks_that_report_are_one_measurement(tmp_path):
    messages = run_batch(tmp_path, REPORT + "dist.destroy_process_group()\n")
    assert [message.kind for message in messages] == ["started", "measurement", "end"]
    assert messages[1].body["ranks"] == 2
    assert messages[2].body["exit"] == [0, 0]
