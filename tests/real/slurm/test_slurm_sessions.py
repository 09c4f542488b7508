"""Queues of hours: what one session submits, a later one judges, once. Jobs are held until a test releases them."""

import json
import os
import time

import pytest
from fault_suites import Suite
from running_suites import wait_for

from pytest_mlhpc.provision.reapers import cluster_name

SUITE = """\
@pytest.mark.parametrize("name", ["one", "two", "three"])
@script("echo $SLURMD_NODENAME; echo rate: 4", ranks_per_node=1)
def test_it(run, name):
    assert run["rate"].value == 4
"""


@pytest.fixture
def suite(suite: Suite) -> Suite:
    suite.tests(SUITE)
    return suite


@pytest.fixture
def held_suite(suite: Suite) -> Suite:
    """The suite with jobs that wait as in a queue of hours."""
    suite.partition(sbatch=["--hold"], pending_limit="1h")
    return suite


def test_a_detached_session_is_judged_by_the_one_that_resumes_it(held_suite):
    held_suite.run("--mlhpc-pack", "--mlhpc-wait=0").expect(75, "a later session", skipped=3)
    (job,) = held_suite.jobs()
    (file,) = held_suite.state.glob("ledger/*@*.jsonl")
    submitted = json.loads(file.read_text().splitlines()[0])
    assert submitted["cluster"] == cluster_name({**os.environ, **held_suite.slurm.environment})

    held_suite.run("--mlhpc-resume", "01a1fe39-0000-7000-8000-000000000000").expect(5)
    held_suite.run("--mlhpc-resume", "--mlhpc-wait", "2s").expect(
        75, "going on with 3 runs of an earlier session"
    )
    assert held_suite.records() == []

    held_suite.release()
    held_suite.run("--mlhpc-resume", submitted["session"]).expect(0, passed=3)
    assert [found.id for found in held_suite.jobs()] == [job.id]
    assert len({record["id"] for record in held_suite.records()}) == len(held_suite.records()) == 3
    held_suite.run("--mlhpc-resume").expect(5, "no earlier session left anything of it")
    assert [found.id for found in held_suite.jobs()] == [job.id]


def test_three_nightly_sessions_in_a_row_give_each_result_once_dated_by_the_run(held_suite):
    """The same command every night, the queue blocked for two of them."""
    assert held_suite.run("--mlhpc-wait=0").code == 75  # once all are submitted
    jobs = {job.id for job in held_suite.jobs()}
    assert len(jobs) == 3
    assert held_suite.run("--mlhpc-wait", "3s").code == 75
    assert {job.id for job in held_suite.jobs()} == jobs  # adopted, not submitted twice
    held_suite.release()
    wait_for(lambda: all(job.ended for job in held_suite.jobs()))
    ran_until = time.time_ns()
    held_suite.run("--mlhpc-wait", "1h").expect(0, passed=3)
    records = held_suite.records()
    assert sorted(record["node_id"] for record in records) == [
        f"test_faults.py::test_it[cluster:part-{name}]" for name in ("one", "three", "two")
    ]
    assert {record["job_id"] for record in records} == jobs
    assert all(record["nodes"] for record in records)
    assert all(record["created_ns"] <= ran_until for record in records)
    held_suite.partition()
    held_suite.run().expect(0, passed=3)
    assert len(held_suite.records()) == 6  # a session after the last one measures anew


def test_a_session_that_is_killed_after_it_detached_has_its_lease_written(held_suite):
    conftest = held_suite.folder / "conftest.py"
    conftest.write_text(
        "import pytest, time\n@pytest.hookimpl(trylast=True)\ndef pytest_sessionfinish():\n    time.sleep(600)\n"
        "def pytest_runtest_logfinish(nodeid):\n    open('over', 'a').close()\n    time.sleep(600)\n"
    )
    session = held_suite.start("--mlhpc-pack", "--mlhpc-wait=0")
    session.until("its end", (held_suite.folder / "over").exists)
    session.kill()
    conftest.unlink()
    said = held_suite.reap()
    assert [job.state for job in held_suite.jobs()] == ["PENDING"], said
    held_suite.release()
    held_suite.run("--mlhpc-resume").expect(0, passed=3)


def test_taking_over_one_of_several_packed_tests_leaves_the_others_to_their_own_session(held_suite):
    held_suite.run("--mlhpc-pack", "--mlhpc-wait=0")
    held_suite.release()
    wait_for(lambda: all(job.ended for job in held_suite.jobs()))
    held_suite.run("-k", "one").expect(0, passed=1)
    held_suite.run("--mlhpc-resume").expect(0, passed=2, skipped=1)
    assert sorted(record["node_id"][-5:-1] for record in held_suite.records()) == ["-one", "-two", "hree"]
    assert {record["job_id"] for record in held_suite.records()} == {job.id for job in held_suite.jobs()}


def test_a_budget_refuses_before_anything_is_submitted(suite):
    suite.run("-o", "mlhpc_budget=0.01nh").expect(4, "3 tests may take", "(mlhpc_budget)")
    assert suite.jobs() == []
    assert not (suite.state / "ledger").exists()


def test_packed_tests_share_one_job_whose_cost_is_said_before_it_is_spent(suite):
    account = "cluster:part (default account)"
    said = f"of {account} (3 runs, 0 re-runs, all at their time limits)"
    suite.run("--mlhpc-pack").expect(0, said, passed=3)
    records = suite.records()
    assert len({record["job_id"] for record in records}) == 1
    assert all(record["node_hours"] > 0 for record in records)
    assert {record["account"] for record in records} == {account}
    (note,) = suite.state.glob("runs/*/session.json")
    assert json.loads(note.read_text())["node_hours_at_most"].keys() == {account}
    logs = list((suite.state / "runs").rglob("launcher.log"))
    assert [log.read_text().count("rate: 4") for log in logs] == [1, 1, 1]


def test_packed_tests_are_parted_where_the_partition_does_not_give_the_time_for_all(suite):
    suite.partition(time_limit="25m")
    suite.run("--mlhpc-pack").expect(0, passed=3)
    assert len({record["job_id"] for record in suite.records()}) == 2  # the partition gives an hour
