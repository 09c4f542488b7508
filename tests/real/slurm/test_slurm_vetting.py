"""Readiness on a real Slurm: a node that is really slower is found, named, left out, and kept out of the next session."""

import contextlib
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_suites import Suite

CHILD = b"pytest_mlhpc.node.vet.load.main"

#: The machine is shared and has few cores: what is tested is who is blamed for being much slower, not how steady it is.
POLICY = Path(__file__).with_name("shared_machine_policy.toml")

MEASURED = """
@workload("nbody", nodes=3, bodies=96, steps=2, warmup=1, judge=False, time_limit=900)
def test_it(run): assert run["step_time"].value > 0
"""


@contextlib.contextmanager
def slowed(node: str) -> Iterator[None]:
    """Let the programs by which vetting computes on *node* run for a small part of the time only.

    They give way to others besides: on a busy machine, who has slept for most of the time is given the more of the rest.
    """
    over = threading.Event()
    thread = threading.Thread(target=_slow_down, args=(node, over))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _slow_down(node: str, over: threading.Event) -> None:
    os.setpriority(
        os.PRIO_PROCESS, threading.get_native_id(), -15
    )  # or a short go lasts as long as others let us wait
    while not over.is_set():
        found = _children(node)
        for task in (task for pid in found for task in Path(f"/proc/{pid}/task").glob("*")):
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, int(task.name), 15)
        for number, seconds in ((signal.SIGSTOP, 0.38), (signal.SIGCONT, 0.02)):
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            over.wait(seconds if found else 0.05)


def _children(node: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            there = f"SLURMD_NODENAME={node}".encode() in (folder / "environ").read_bytes().split(b"\0")
            if there and CHILD in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def memory() -> str:
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line)
    return f"{int(total.split()[1]) * 1024}B"


@pytest.fixture
def suite(slurm, tmp_path, state_dir) -> Iterator[Suite]:
    made = Suite(slurm, tmp_path, state_dir)
    shutil.copy(POLICY, tmp_path / "policy.toml")
    entry = {
        "scheduler": "slurm", "launcher": "srun", "accelerator": "cpu", "preset": "smoke", "time_limit": "15m",
        "nodes": {"cores": os.cpu_count(), "memory": memory(), "max": 4},
        "slurm": {"partition": "cpu", "pending_limit": "1h", "spares": 1},
        "environments": {"default": {"python": sys.executable, "variables": {"OMP_NUM_THREADS": "1"}}},
        "vet": {"level": "quick", "unknown": "warn", "policy": "policy.toml", "budget": "15m"},
    }  # fmt: skip
    made.systems(cluster={"partitions": {"part": entry}})
    yield made
    made.close()


@pytest.mark.long
def test_a_slow_node_is_left_out_named_in_the_record_and_excluded_from_the_next_session(suite):
    suite.tests(MEASURED)
    with slowed("node3"):
        first = suite.start().end()
    first.expect(0, passed=1)
    (record,) = first.records
    found = record["vetting"]
    assert list(found["unfit"]) == ["node3"], found
    assert "[node_problem]" in found["unfit"]["node3"]
    assert sorted(found["fit"]) == ["node1", "node2", "node4"]
    assert {rank["host"] for rank in record["measurement"]["per_rank"]} == {"node1", "node2", "node4"}

    second = suite.start().end()
    second.expect(0, passed=1)
    found = second.records[-1]["vetting"]
    assert list(found["kept_out"]) == ["node3"]
    assert found["kept_out"]["node3"] == record["vetting"]["unfit"]["node3"]
    assert sorted(second.records[-1]["nodes"]) == ["node1", "node2", "node4"]

    shown = suite.slurm.run(sys.executable, "-m", "pytest_mlhpc.cli", "vet", "history", "--system", "cluster")
    assert shown.returncode == 0, shown.stderr
    assert "node3" in shown.stdout


def test_a_session_killed_while_nodes_are_vetted_is_gone_on_with_by_the_next(suite):
    """It takes one vetting and one job in all: the second session measures nothing anew."""
    suite.tests(MEASURED.replace("nodes=3", "nodes=2"))
    first = suite.start()
    first.until("nodes are vetted", lambda: any(map(_children, ("node1", "node2", "node3", "node4"))))
    first.kill()
    second = suite.start().end()
    assert "going on with 1 run of an earlier session" in second.text
    second.expect(0, passed=1)
    (job,) = suite.jobs()
    (record,) = second.records
    assert record["job_id"] == job.id
    assert len(record["vetting"]["fit"]) == 3, record["vetting"]
    assert len(list(suite.state.glob("runs/*/*/*-vet/verdict.json"))) == 1
