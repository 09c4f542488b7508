"""Launchers turn a run plan into an argument vector and an environment, nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pytest_mlhpc.batch.plan import RunPlan
from pytest_mlhpc.launch import plain, torchrun


def run_plan(**changes) -> RunPlan:
    fields = {
        "run_id": "run-1", "nonce": "nonce", "attempt": 0, "workload": "resnet50", "parameters": {}, "nodes": 1,
        "ranks": 1, "cores_per_rank": 3, "device_type": "cpu", "launcher": "plain", "time_limit_s": 30.0, "steps": 1,
        "warmup_steps": 0, "python": "/env/bin/python",
    }  # fmt: skip
    return RunPlan(**{**fields, **changes})


def test_plain_starts_the_worker_with_the_environments_interpreter():
    argv, environment = plain.launch(run_plan(), ["here"], {"A": "1"})
    assert argv == ["/env/bin/python", "-m", "pytest_mlhpc.worker.main"]
    assert environment == {"A": "1"}


def test_plain_starts_a_program_as_it_is():
    run = run_plan(workload="command", argv=("./bench", "$HOME; true"))
    assert plain.launch(run, ["here"], {})[0] == ["./bench", "$HOME; true"]


@pytest.mark.parametrize(("ranks", "nodes"), [(2, ["a"]), (1, ["a", "b"])])
def test_plain_refuses_more_than_one(ranks, nodes):
    with pytest.raises(ValueError, match="launcher plain starts one rank on one node"):
        plain.launch(run_plan(ranks=ranks), nodes, {})


def test_torchrun_starts_all_ranks_of_the_node():
    argv, _ = torchrun.launch(run_plan(ranks=4), ["here"], {})
    assert argv[0] == "/env/bin/python"
    assert "--nproc_per_node=4" in argv
    assert "--max_restarts=0" in argv
    assert "--rdzv_endpoint=localhost:0" in argv  # a free port, never one where a neighbour may listen
    assert argv[-2:] == ["-m", "pytest_mlhpc.worker.main"]


def test_torchrun_gives_each_rank_its_cores_unless_told_otherwise():
    assert torchrun.launch(run_plan(), ["here"], {})[1]["OMP_NUM_THREADS"] == "3"
    assert torchrun.launch(run_plan(), ["here"], {"OMP_NUM_THREADS": "7"})[1]["OMP_NUM_THREADS"] == "7"


def test_torchrun_refuses_several_nodes_without_slurm():
    with pytest.raises(ValueError, match="needs a Slurm job for 2 nodes"):
        torchrun.launch(run_plan(ranks=2), ["a", "b"], {})


def test_a_launcher_imports_no_torch():
    code = "import sys, pytest_mlhpc.launch.torchrun; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
