"""The batch on the nodes of a real Slurm: right ranks, every failure by its name, nothing left."""

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from services import Slurm
from slurm_batches import Batch, broken, plan_of, submit, tiny, wait_until

from pytest_mlhpc.node.worker.workloads.catalogue import WORKLOADS
from pytest_mlhpc.node.worker.workloads.trainings import parameters_of

LAUNCHERS = ["srun", "torchrun", "mpirun"]
#: For what launchers do alike: one in `make test`, all in the slow tier.
ONE_AND_SLOW = ["srun", *(pytest.param(one, marks=pytest.mark.slow) for one in LAUNCHERS[1:])]

#: Runs of one allocation of two nodes, in order. None hurts the next.
RUNS = [
    *(tiny(launcher, launcher=launcher) for launcher in LAUNCHERS),
    *(broken(f"killed-{launcher}", "killed", launcher=launcher) for launcher in LAUNCHERS),
    broken("exit", "exit", rank=0, ignore_sigterm=True),
    broken("hang", "hang", ignore_sigterm=True, time_limit_s=15.0),
    tiny("no-python", python="/no/python"),
    tiny("no-program", workload="command", argv=("/no/program",)),
    tiny("too-many", nodes=3, ranks=3),
    tiny("uneven", ranks=3),
    tiny("command", workload="command", argv=("bash", "-c", "echo rank $SLURM_PROCID on $SLURMD_NODENAME")),
    broken("raises", "raise", rank=1, launcher="torchrun"),
    tiny("port", launcher="taken_port", parameters={"global_batch": 8, "launcher": "srun"}),
    tiny("plain", nodes=1, ranks=1, launcher="plain"),
    tiny("one-node", nodes=1, ranks=2),
]


def places(measurement: dict) -> list[tuple[int, int, str]]:
    return [(one["rank"], one["local_rank"], one["host"]) for one in measurement["per_rank"]]


def nodes_of(batch: Batch) -> list[str]:
    return json.loads((batch.folder / "lines/alloc.up").read_text())["nodes"]


@pytest.fixture(scope="module")
def batch(slurm: Slurm, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Batch:
    """A batch that has ended, of all these runs: made by the first worker that asks, read by all."""
    assert shutil.which("mpirun"), "install openmpi-bin: it is no part of Slurm"
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if hasattr(request.config, "workerinput") else base) / "batch"
    folder.mkdir(exist_ok=True)
    number = folder / "job"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if number.exists():
            return Batch(slurm, folder, number.read_text(), plan_of(folder, *RUNS))
        made = submit(slurm, folder, *RUNS, options=("--nodes=2", "--exclusive"))
        try:
            assert made.await_end() == 0
        finally:
            slurm.run("scancel", made.job)
        number.write_text(made.job)
        return made


def test_runs_are_made_in_the_plans_order_whatever_becomes_of_each(batch):
    assert list(dict.fromkeys(one.run_id for one in batch.lines())) == [run.run_id for run in RUNS]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_on_two_nodes_are_one_measurement(batch, launcher):
    measured = batch.body(launcher, "measurement")
    first, second = nodes_of(batch)
    assert places(measured) == [(0, 0, first), (1, 1, first), (2, 0, second), (3, 1, second)]
    assert (measured["ranks"], measured["nodes"]) == (4, [first, second])
    assert batch.body(launcher, "end")["exit"] == [0, 0, 0, 0]


def test_fewer_ranks_and_nodes_than_there_are_run_on_the_first(batch):
    first, _ = nodes_of(batch)
    assert places(batch.body("plain", "measurement")) == [(0, 0, first)]
    assert places(batch.body("one-node", "measurement")) == [(0, 0, first), (1, 1, first)]


def test_a_port_that_is_taken_costs_one_more_start(batch):
    assert batch.kinds("port") == ["started", "measurement", "end"]


def test_a_program_runs_once_for_each_rank(batch):
    printed = (batch.folder / "command/launcher.log").read_text()
    assert {f"rank {rank} on {nodes_of(batch)[rank // 2]}" for rank in range(4)} <= set(printed.splitlines())


def failures(nodes: list[str]) -> dict[str, tuple[str, str]]:
    """Return run -> outcome and what its text has."""
    return {
        **{
            f"killed-{one}": ("worker_killed", f"rank 3 on {nodes[1]} was killed by SIGKILL")
            for one in LAUNCHERS
        },
        "exit": ("worker_exit", f"rank 0 on {nodes[0]} ended with exit code 7"),
        "hang": ("time_limit", "the run did not end within 15 s"),
        "no-python": ("launch_failed", "execve(): /no/python: No such file"),
        "no-program": ("command_not_found", "/no/program"),
        "too-many": ("unfit_nodes", f"the run wants 3 nodes, there are 2: {', '.join(nodes)}"),
        "uneven": ("launch_failed", "3 ranks cannot be shared evenly by 2 nodes"),
        "raises": ("worker_exit", f"rank 1 on {nodes[0]}: RuntimeError: the device caught fire"),
    }


@pytest.mark.parametrize("run", list(failures(["", ""])))
def test_a_run_that_fails_is_named_with_its_rank_and_node(batch, run):
    outcome, text = failures(nodes_of(batch))[run]
    found = batch.failure(run)
    assert (found[0], text in found[1]) == (outcome, True), found
    if run.startswith("killed-"):
        assert batch.body(run, "end")["exit"][3] == -signal.SIGKILL


@pytest.mark.parametrize("launcher", ONE_AND_SLOW)
def test_scancel_ends_everything_and_nothing_is_made_up(slurm, tmp_path, launcher):
    batch = submit(
        slurm, tmp_path, broken("bad", "hang", ignore_sigterm=True, launcher=launcher), tiny("next")
    )
    batch.await_line("bad", "started")
    slurm.run("scancel", batch.job)
    assert batch.await_end() == 128 + signal.SIGTERM
    assert [one.kind for one in batch.lines() if one.kind != "progress"] == ["started"]
    assert batch.steps() == []


def test_what_happens_to_a_step_ends_its_run_and_what_happens_to_the_batch_ends_all(slurm, tmp_path):
    # A program's run is said to have started before srun has its step: each rank says itself that it is there.
    steps = [
        tiny(
            name,
            workload="command",
            argv=("sh", "-c", f"touch {tmp_path}/{name}-$SLURM_PROCID; exec sleep 600"),
        )
        for name in ("killed", "cancelled")
    ]
    batch = submit(slurm, tmp_path, *steps, broken("ended", "hang", ignore_sigterm=True))
    wait_until(lambda: len([*tmp_path.glob("killed-*")]) == 4, "four ranks", batch)
    for pid in wait_until(lambda: srun_of(batch.job), "an srun", batch):
        with contextlib.suppress(ProcessLookupError):  # srun's second process ends with the first
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: len([*tmp_path.glob("cancelled-*")]) == 4, "four ranks", batch)
    assert batch.failure("killed")[0] == "worker_killed"
    slurm.run("scancel", f"{batch.job}.1")
    batch.await_line("ended", "started")
    assert batch.failure("cancelled")[0] == "cancelled_outside"
    for _ in range(2):
        slurm.run("scancel", "--batch", "--signal=TERM", batch.job)
    assert batch.await_end() == 128 + signal.SIGTERM
    assert batch.kinds("ended") == ["started"]
    assert batch.steps() == []


#: Connects to a port of this machine, says what it is given, and waits for the answer.
STRANGER = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as line:
    line.sendall(sys.argv[2].encode() + b"\\n")
    while line.recv(4096):
        pass
"""


def test_another_user_who_claims_to_be_a_rank_changes_nothing_but_a_count(slurm, tmp_path):
    batch = submit(slurm, tmp_path, broken("bad", "hang"))
    batch.await_line("bad", "started")
    channel = wait_until(lambda: channel_of(batch.job), "an address", batch)
    hello = '{"run": "bad", "nonce": "wrong", "rank": 0, "purpose": "messages"}'
    other = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    words = [*other, "/usr/bin/python3", "-c", STRANGER, channel.rpartition(":")[2], hello]
    subprocess.run(words, check=True, timeout=600)
    slurm.run("scancel", f"{batch.job}.0")
    assert batch.await_end() is not None
    outcome, text = batch.failure("bad")
    assert outcome == "cancelled_outside"
    assert "connections that did not prove to be of this run and were dropped: 1" in text


def channel_of(job: str) -> str:
    """Return where this job's batch listens for ranks of other nodes, as one of them knows it; empty until there is one."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # no process, or one that has ended meanwhile
            environ = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            if f"SLURM_JOB_ID={job}" in environ:
                found = [line for line in environ if line.startswith("MLHPC_CHANNEL=tcp://")]
                if found:
                    return found[0].partition("=")[2]
    return ""


def srun_of(job: str) -> list[int]:
    """Return the processes of the srun that this job's batch has started."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            is_srun = entry.name.isdigit() and (entry / "comm").read_text() == "srun\n"
            if is_srun and f"SLURM_JOB_ID={job}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


@pytest.mark.slow
def test_a_port_that_is_taken_costs_torchrun_one_more_start(slurm, tmp_path):
    run = tiny(launcher="taken_port", parameters={"global_batch": 8, "launcher": "torchrun"})
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


def test_a_rank_that_uses_too_much_memory_has_its_own_outcome(start_own_slurm, tmp_path):
    confined = start_own_slurm("--accounting", "none", "--cgroup", "v1")
    batch = submit(confined, tmp_path, broken("bad", "memory"), options=("--exclusive", "--mem=1200M"))
    assert batch.await_end() is not None
    outcome, text = batch.failure("bad")
    assert outcome == "out_of_memory", (text, batch.log("bad"))
    # Slurm counts kills by node and step, and lays them on whichever of the node's tasks it saw ending first.
    assert re.match("rank [23] on node2 used more memory than it may", text), text


@pytest.mark.slow
def test_sixteen_ranks_a_node_train_together(slurm, tmp_path):
    batch = submit(slurm, tmp_path, tiny(ranks=32, parameters={"global_batch": 32}, time_limit_s=900.0))
    assert batch.await_end() == 0
    assert batch.body("run-1", "measurement")["ranks"] == 32


def test_a_sign_of_life_comes_while_nothing_is_said(slurm, tmp_path):
    batch = submit(slurm, tmp_path, tiny(workload="command", argv=("sleep", "600")))
    wait_until((tmp_path / "lines/alloc.jsonl").exists, "lines", batch)
    before = (tmp_path / "lines/alloc.jsonl").stat().st_mtime_ns
    wait_until(lambda: (tmp_path / "lines/alloc.jsonl").stat().st_mtime_ns > before, "sign of life", batch)
    slurm.run("scancel", batch.job)
    assert batch.await_end() == 128 + signal.SIGTERM
