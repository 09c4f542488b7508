"""Queues of hours: what one session submits, a later one judges, once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from labs import LIMIT_S, Lab, until

from pytest_mlhpc.provision.reapers import cluster_name

SUITE = """
RATE = {"rate": {"pattern": r"rate: (\\S+)", "unit": "items/s", "better": "higher"}}

@pytest.mark.parametrize("name", ["one", "two", "three"])
@pytest.mark.job("command", argv=["sh", "-c", "echo $SLURMD_NODENAME; echo rate: 4"], metrics=RATE, judge=False)
def test_it(run):
    assert run["rate"].value == 4
"""


@pytest.fixture
def lab(lab: Lab) -> Lab:
    lab.write(SUITE)
    return lab


def ours(slurm) -> list:
    return [
        job
        for job in slurm.jobs()
        if job.key == os.environ["MLHPC_TEST"] and job.name != "wrap" and not job.ended
    ]


@pytest.fixture
def full(slurm):
    """A job of somebody else that has all nodes of the partition, so that others wait."""
    done = slurm.run(
        "sbatch", "--parsable", "-p", "cpu", "-N4", "--exclusive", "--time=5", "-o", "/dev/null",
        "--wrap=exec sleep 250",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    job = done.stdout.strip()
    try:
        until(lambda: any(one.id == job and one.state == "RUNNING" for one in slurm.jobs()))
        yield lambda: slurm.run("scancel", job)
    finally:
        slurm.run("scancel", job)


def test_a_detached_session_is_judged_by_the_one_that_resumes_it(slurm, lab, full):
    first = lab.run("--pack", "--detach")
    assert first.returncode == 75, first.stdout
    assert "3 skipped" in first.stdout
    assert "a later session" in first.stdout
    assert len(ours(slurm)) == 1

    second = lab.run("--resume", "--wait", "2s")
    assert second.returncode == 75, second.stdout
    assert "going on with 3 runs of an earlier session" in second.stdout
    assert lab.records() == []

    full()
    third = lab.run("--resume")
    assert third.returncode == 0, third.stdout
    assert "3 passed" in third.stdout
    assert len(ours(slurm)) == 0
    assert len({record["id"] for record in lab.records()}) == len(lab.records()) == 3


def test_what_a_session_leaves_says_of_which_cluster_it_is(slurm, lab, full):
    assert lab.run("--pack", "--detach").returncode == 75
    lines = [
        json.loads(line)
        for path in (lab.state / "ledger").rglob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    named = {line["cluster"] for line in lines if line["event"] == "submitted"}
    assert named == {cluster_name({**os.environ, **slurm.environment})}
    full()
    assert lab.run("--resume").returncode == 0, "it is its own cluster's"


def test_three_nightly_sessions_in_a_row_give_each_result_once_dated_by_the_run(slurm, lab, full):
    """The same command every night, the queue blocked for two of them."""
    assert lab.run("--wait", "3s").returncode == 75
    jobs = {job.id for job in ours(slurm)}
    assert len(jobs) == 3
    assert lab.run("--wait", "3s").returncode == 75
    assert {job.id for job in ours(slurm)} == jobs  # adopted, not submitted twice
    full()
    until(lambda: not ours(slurm))
    ran_until = time.time_ns()
    third = lab.run("--wait", "100s")
    assert third.returncode == 0, third.stdout
    records = lab.records()
    assert sorted(record["node_id"] for record in records) == [
        f"test_suite.py::test_it[lab:cpu-{name}]" for name in ("one", "three", "two")
    ]
    assert {record["job_id"] for record in records} == jobs
    assert all(record["nodes"] for record in records)
    assert all(record["created_ns"] <= ran_until for record in records)
    fourth = lab.run()
    assert fourth.returncode == 0
    assert len(lab.records()) == 6  # a session after the last one measures anew


def test_resuming_where_nothing_was_left_submits_nothing(slurm, lab):
    done = lab.run("--resume")
    assert done.returncode == 5, done.stdout
    assert "no earlier session left anything of it" in done.stdout or "3 skipped" in done.stdout
    assert ours(slurm) == []


def test_only_the_named_session_is_resumed(slurm, lab, full):
    lab.run("--pack", "--detach")
    other = lab.run("--resume", "01a1fe39-0000-7000-8000-000000000000")
    assert other.returncode == 5, other.stdout
    assert len(ours(slurm)) == 1
    (ledger,) = (lab.state / "ledger").glob("*.jsonl")
    full()
    assert lab.run("--resume", ledger.stem).returncode == 0


def test_sigterm_detaches_and_the_same_command_goes_on(slurm, lab, full):
    process = lab.start("--pack")
    until(lambda: ours(slurm))
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 75, output
    assert len(ours(slurm)) == 1
    full()
    done = lab.run("--pack")
    assert done.returncode == 0, done.stdout
    assert len(lab.records()) == 3


def test_ctrl_c_cancels_what_waits(slurm, lab, full):
    process = lab.start()
    until(lambda: len(ours(slurm)) == 3)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 2, output
    assert ours(slurm) == []


def test_a_lease_that_ran_out_is_reaped_with_a_line(slurm, lab, full):
    lab.run("--pack", "--detach", "--lease", "1s")
    (job,) = ours(slurm)
    time.sleep(1.1)
    reaped = subprocess.run(
        [sys.executable, "-m", "pytest_mlhpc.cli", "reap"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert reaped.returncode == 0, reaped.stdout + reaped.stderr
    assert f"(job {job.id}) on lab:cpu" in reaped.stdout
    until(lambda: ours(slurm) == [])


def test_a_budget_refuses_before_anything_is_submitted(slurm, lab):
    done = lab.run("--budget", "0.01nh")
    assert done.returncode == 4, done.stdout
    assert "3 tests may take" in done.stdout
    assert "(--budget)" in done.stdout
    assert ours(slurm) == []
    assert not (lab.state / "ledger").exists()


def test_what_it_may_cost_is_said_before_it_is_spent(slurm, lab):
    done = lab.run("--pack")
    assert "at most, with 3 runs and 0 re-runs at their time limits: lab:cpu (default account)" in done.stdout
    assert all(record["node_hours"] > 0 for record in lab.records())
    (note,) = (lab.state / "runs").glob("*/session.json")
    assert json.loads(note.read_text())["node_hours_at_most"].keys() == {"lab:cpu (default account)"}
    assert {record["account"] for record in lab.records()} == {"lab:cpu (default account)"}


@pytest.mark.parametrize("workers", ["0", "2"])
def test_packed_tests_share_one_job_and_each_has_its_own_log(slurm, lab, workers):
    done = lab.run("--pack", "-n", workers)
    assert done.returncode == 0, done.stdout
    records = lab.records()
    assert len({record["job_id"] for record in records}) == 1
    logs = list((lab.state / "runs").rglob("launcher.log"))
    assert len(logs) == 3
    assert all("rate: 4" in log.read_text() for log in logs)


def test_a_failure_says_on_which_nodes_and_in_which_job_it_happened(slurm, lab):
    suite = lab.folder / "test_suite.py"
    suite.write_text(suite.read_text().replace("echo rate: 4", "exit 3"))
    done = lab.run("-k", "one")
    assert done.returncode == 1, done.stdout
    (record,) = lab.records()
    assert "worker_exit: " in done.stdout
    assert f"ran on: {record['nodes'][0]} (job {record['job_id']}" in done.stdout


def test_taking_over_one_of_several_packed_tests_leaves_the_others_to_their_own_session(slurm, lab, full):
    lab.run("--pack", "--detach")
    (job,) = ours(slurm)
    full()
    until(lambda: not ours(slurm))
    one = lab.run("-k", "one")
    assert one.returncode == 0, one.stdout
    again = lab.run("--resume")
    assert "2 passed, 1 skipped" in again.stdout
    assert sorted(record["node_id"][-5:-1] for record in lab.records()) == ["-one", "-two", "hree"]
    assert {record["job_id"] for record in lab.records()} == {job.id}


def test_a_session_that_is_killed_after_it_detached_has_its_lease_written(slurm, lab, full):
    (lab.folder / "conftest.py").write_text(
        "import pytest, time\n@pytest.hookimpl(trylast=True)\ndef pytest_sessionfinish():\n    time.sleep(60)\n"
        "def pytest_runtest_logfinish(nodeid):\n    open('over', 'a').close()\n    time.sleep(60)\n"
    )
    process = lab.start("--pack", "--wait", "1s")
    until((lab.folder / "over").exists)
    process.kill()
    process.communicate(timeout=LIMIT_S)
    (lab.folder / "conftest.py").unlink()
    reaped = subprocess.run(
        [sys.executable, "-m", "pytest_mlhpc.cli", "reap"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert reaped.returncode == 0, reaped.stdout + reaped.stderr
    assert len(ours(slurm)) == 1, reaped.stdout
    full()
    assert lab.run("--resume").returncode == 0


def test_packed_tests_are_parted_where_the_partition_does_not_give_the_time_for_all(slurm, lab):
    systems = lab.folder / "systems.yaml"
    systems.write_text(
        systems.read_text().replace(", max_time: 30m", "").replace("time_limit: 2m", "time_limit: 25m")
    )
    done = lab.run("--pack")
    assert done.returncode == 0, done.stdout
    assert len({record["job_id"] for record in lab.records()}) == 2  # the partition gives an hour
