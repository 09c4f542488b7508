"""The batch on the nodes of a real Slurm: right ranks, every failure by its name, nothing left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
from slurm_batches import broken, submit, tiny, wait_until

from pytest_mlhpc.worker.workloads.catalogue import WORKLOADS, parameters_of

LAUNCHERS = ["srun", "torchrun", "mpirun"]
#: For what launchers do alike: one in `make test`, all in the slow tier.
ONE_AND_SLOW = ["srun", *(pytest.param(one, marks=pytest.mark.slow) for one in LAUNCHERS[1:])]


def need(launcher: str) -> None:
    """Say clearly what is missing: OpenMPI is not part of Slurm."""
    assert launcher != "mpirun" or shutil.which("mpirun"), "install openmpi-bin"


def places(measurement: dict) -> list[tuple[int, int, str]]:
    return [(one["rank"], one["local_rank"], one["host"]) for one in measurement["per_rank"]]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_on_two_nodes_are_one_measurement(slurm, tmp_path, launcher):
    need(launcher)
    batch = submit(slurm, tmp_path, tiny(launcher=launcher))
    assert batch.await_end() == 0
    measured = batch.body("run-1", "measurement")
    first, second = json.loads((tmp_path / "lines/alloc.up").read_text())["nodes"]
    assert places(measured) == [(0, 0, first), (1, 1, first), (2, 0, second), (3, 1, second)]
    assert (measured["ranks"], measured["nodes"]) == (4, [first, second])
    assert batch.body("run-1", "end")["exit"] == [0, 0, 0, 0]


@pytest.mark.parametrize("launcher", ONE_AND_SLOW)
def test_a_rank_that_is_killed_while_the_others_wait_is_named_with_its_node(slurm, tmp_path, launcher):
    need(launcher)
    batch = submit(slurm, tmp_path, broken("bad", "killed", launcher=launcher), tiny("good"))
    assert batch.await_end() == 0
    outcome, text = batch.failure("bad")
    node = json.loads((tmp_path / "lines/alloc.up").read_text())["nodes"][1]
    assert outcome == "worker_killed"
    assert text.startswith(f"rank 3 on {node} was killed by SIGKILL")
    assert batch.body("bad", "end")["exit"][3] == -signal.SIGKILL
    assert batch.kinds("good") == ["started", "measurement", "end"]


def test_a_rank_that_ends_with_an_exit_code_is_named_with_its_node(slurm, tmp_path):
    batch = submit(slurm, tmp_path, broken("bad", "exit", rank=0, ignore_sigterm=True))
    assert batch.await_end() == 0
    outcome, text = batch.failure("bad")
    assert outcome == "worker_exit"
    node = json.loads((tmp_path / "lines/alloc.up").read_text())["nodes"][0]
    assert text.startswith(f"rank 0 on {node} ended with exit code 7")


def test_a_rank_that_hangs_and_ignores_sigterm_ends_at_the_time_limit(slurm, tmp_path):
    hanging = broken("bad", "hang", ignore_sigterm=True, time_limit_s=15.0)
    batch = submit(slurm, tmp_path, hanging, tiny("good"))
    assert batch.await_end() == 0
    outcome, text = batch.failure("bad")
    assert outcome == "time_limit"
    assert text.startswith("the run did not end within 15 s")
    assert batch.kinds("good") == ["started", "measurement", "end"]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_scancel_ends_everything_and_nothing_is_made_up(slurm, tmp_path, launcher):
    need(launcher)
    batch = submit(
        slurm, tmp_path, broken("bad", "hang", ignore_sigterm=True, launcher=launcher), tiny("next")
    )
    batch.await_line("bad", "started")
    slurm.run("scancel", batch.job)
    assert batch.await_end() == 128 + signal.SIGTERM
    assert [one.kind for one in batch.lines() if one.kind != "progress"] == ["started"]
    assert batch.steps() == []


def test_sigterm_to_the_batch_alone_leaves_no_step(slurm, tmp_path):
    batch = submit(slurm, tmp_path, broken("bad", "hang", ignore_sigterm=True))
    batch.await_line("bad", "started")
    for _ in range(2):
        slurm.run("scancel", "--batch", "--signal=TERM", batch.job)
    assert batch.await_end() == 128 + signal.SIGTERM
    assert batch.kinds("bad") == ["started"]
    assert batch.steps() == []


def test_a_killed_srun_leaves_nothing_and_the_next_run_is_done(slurm, tmp_path):
    batch = submit(slurm, tmp_path, broken("bad", "hang", ignore_sigterm=True), tiny("good"))
    batch.await_line("bad", "started")
    for pid in srun_of(batch.job):
        with contextlib.suppress(ProcessLookupError):  # srun's second process ends with the first
            os.kill(pid, signal.SIGKILL)
    assert batch.await_end() == 0
    assert batch.failure("bad")[0] == "worker_killed"
    assert batch.kinds("good") == ["started", "measurement", "end"]


def srun_of(job: str) -> list[int]:
    """Return the processes of the srun that this job's batch has started."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            is_srun = entry.name.isdigit() and (entry / "comm").read_text() == "srun\n"
            if is_srun and f"SLURM_JOB_ID={job}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue  # it has ended meanwhile
    assert found
    return found


def test_a_step_that_somebody_cancels_is_a_cancelled_run(slurm, tmp_path):
    batch = submit(slurm, tmp_path, broken("bad", "hang"), tiny("good"))
    batch.await_line("bad", "started")
    slurm.run("scancel", f"{batch.job}.0")
    assert batch.await_end() == 0
    assert batch.failure("bad")[0] == "cancelled"
    assert batch.kinds("good") == ["started", "measurement", "end"]


def test_runs_fail_alone_and_in_the_plans_order(slurm, tmp_path):
    command = ("bash", "-c", "echo rank $SLURM_PROCID on $SLURMD_NODENAME")
    runs = [
        tiny("no-python", python="/no/python"),
        tiny("no-program", workload="command", argv=("/no/program",)),
        tiny("too-many", nodes=3, ranks=3),
        tiny("uneven", ranks=3),
        tiny("command", workload="command", argv=command),
        broken("raises", "raise", rank=1, launcher="torchrun"),
        tiny("plain", nodes=1, ranks=1, launcher="plain"),
        tiny("one-node", nodes=1, ranks=2),
    ]
    batch = submit(slurm, tmp_path, *runs, options=("--nodes=2", "--exclusive"))
    assert batch.await_end() == 0
    assert list(dict.fromkeys(one.run_id for one in batch.lines())) == [run.run_id for run in runs]
    outcomes = {run.run_id: batch.failure(run.run_id) for run in (*runs[:4], runs[5])}
    assert outcomes["no-python"][0] == "launch_failed"
    assert "execve(): /no/python: No such file" in outcomes["no-python"][1]
    assert outcomes["no-program"][0] == "command_not_found"
    nodes = json.loads((tmp_path / "lines/alloc.up").read_text())["nodes"]
    assert outcomes["too-many"] == ("unfit_nodes", f"the run wants 3 nodes, there are 2: {', '.join(nodes)}")
    assert outcomes["uneven"][0] == "launch_failed"
    assert "3 ranks cannot be shared evenly by 2 nodes" in outcomes["uneven"][1]
    assert outcomes["raises"][1].startswith(f"rank 1 on {nodes[0]}: RuntimeError: the device caught fire")
    printed = (tmp_path / "command/launcher.log").read_text()
    assert {f"rank {rank} on {nodes[rank // 2]}" for rank in range(4)} <= set(printed.splitlines())
    assert places(batch.body("plain", "measurement")) == [(0, 0, nodes[0])]
    assert places(batch.body("one-node", "measurement")) == [(0, 0, nodes[0]), (1, 1, nodes[0])]


@pytest.mark.parametrize("launcher", ["srun", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_a_port_that_is_taken_costs_one_more_start(slurm, tmp_path, launcher):
    run = tiny(launcher="taken_port", parameters={"global_batch": 8, "launcher": launcher})
    batch = submit(slurm, tmp_path, run)
    assert batch.await_end() == 0
    assert batch.kinds("run-1") == ["started", "measurement", "end"]


@pytest.mark.slow
def test_files_are_made_once_for_the_ranks_of_all_nodes(slurm, tmp_path):
    chosen = next(one for one in WORKLOADS if one.name == "cosmoflow")
    run = tiny(workload="cosmoflow", data_source="files", parameters=parameters_of(chosen, "smoke"))
    batch = submit(slurm, tmp_path, run)
    assert batch.await_end() == 0
    measured = batch.body("run-1", "measurement")
    assert (measured["data_source"], measured["ranks"]) == ("files", 4)


def test_lines_that_cannot_be_written_end_the_run(slurm, tmp_path):
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines/alloc.jsonl").symlink_to("/dev/full")
    batch = submit(slurm, tmp_path, broken("bad", "hang", ignore_sigterm=True))
    assert batch.await_end() == 74
    assert "worker lines of the allocation alloc cannot be written: No space left" in batch.log("bad")
    assert batch.steps() == []


def test_a_rank_that_uses_too_much_memory_is_told_apart(start_own_slurm, tmp_path):
    confined = start_own_slurm("--accounting", "none", "--cgroup", "v1")
    batch = submit(confined, tmp_path, broken("bad", "memory"), options=("--exclusive", "--mem=1200M"))
    assert batch.await_end() is not None
    outcome, text = batch.failure("bad")
    assert outcome == "out_of_memory"
    # Slurm counts kills by node and step, and lays them on whichever of the node's tasks it saw ending first.
    assert re.match("rank [23] on node2 used more memory than it may", text), text


@pytest.mark.slow
def test_sixteen_ranks_a_node_train_together(slurm, tmp_path):
    batch = submit(slurm, tmp_path, tiny(ranks=32, parameters={"global_batch": 32}, time_limit_s=230.0))
    assert batch.await_end() == 0
    assert batch.body("run-1", "measurement")["ranks"] == 32


def test_a_sign_of_life_comes_while_nothing_is_said(slurm, tmp_path):
    batch = submit(slurm, tmp_path, tiny(workload="command", argv=("sleep", "600")))
    wait_until((tmp_path / "lines/alloc.jsonl").exists, "lines", batch)
    before = (tmp_path / "lines/alloc.jsonl").stat().st_mtime_ns
    wait_until(lambda: (tmp_path / "lines/alloc.jsonl").stat().st_mtime_ns > before, "sign of life", batch)
    slurm.run("scancel", batch.job)
    assert batch.await_end() == 128 + signal.SIGTERM
