"""Nodes that a test holds: when they are asked for, when its test begins, and how they are given back."""

from __future__ import annotations

import json

import pytest
from test_jobs_queue import LIMIT_S, Bench, ended

from pytest_mlhpc.errors import NodeFault, SpecError
from pytest_mlhpc.jobs import board
from pytest_mlhpc.jobs.contradictions import duplicates
from pytest_mlhpc.jobs.job import Job
from pytest_mlhpc.jobs.lending import folder_of
from pytest_mlhpc.jobs.packing import fits
from pytest_mlhpc.jobs.recovery import wanted_by
from pytest_mlhpc.jobs.submitted import Submitted, SubmittedRun, spec_digest
from pytest_mlhpc.provision.base import AllocationEnded, LineArrived, StateChanged
from pytest_mlhpc.results.lines import Message


@pytest.fixture
def bench(tmp_path):
    made = Bench(tmp_path, max_jobs=2)
    yield made
    made.driver.close()
    made.driver.join(LIMIT_S)
    assert not made.driver.is_alive()


@pytest.fixture
def held(declare):
    def make(number=0, **marked):
        return declare("nodes", node_id=f"t.py::test_{number}", name=f"held{number}", **marked)

    return make


def in_order(*specs):
    jobs = [Job(spec) for spec in specs]
    for job, previous in zip(jobs[1:], jobs, strict=False):
        job.previous = previous
    return jobs


def lend(bench, job, nodes=("n1", "n2")):
    """Let the batch of *job* say that it is there; return its handle."""
    handle = bench.provisioner.next()
    run = job.attempts[-1].run
    folder_of(job.attempts[-1]).mkdir(parents=True)
    (folder_of(job.attempts[-1]) / "requests.jsonl").touch()
    bench.provisioner.say(StateChanged(handle, job.state, nodes=nodes, native_id="77"))
    body = {"protocol": 1, "payload_sha256": "", "nodes": list(nodes)}
    bench.provisioner.say(LineArrived(handle, Message(run.run_id, run.nonce, "started", body)))
    ended(job)
    return handle


def test_the_test_begins_while_the_allocation_goes_on(bench, held):
    (job,) = in_order(held(nodes=2))
    bench.driver.add([job])
    handle = lend(bench, job)
    assert job.outcome.failure is None
    assert (job.outcome.held.id, job.outcome.held.nodes, job.outcome.held.partition) == (
        "77",
        ("n1", "n2"),
        "part",
    )
    assert not job.attempts[0].over
    assert ("ended", handle.id) not in bench.ledger


def test_released_nodes_end_by_themselves_and_their_job_is_not_cancelled(bench, held):
    (job,) = in_order(held(nodes=2))
    bench.driver.add([job])
    handle = lend(bench, job)
    bench.driver.release(job)
    bench.driver.close()  # the session ends at once; it waits for what is going anyway
    bench.provisioner.say(AllocationEnded(handle))
    bench.driver.join(LIMIT_S)
    assert bench.provisioner.cancelled == []
    assert ("ended", handle.id) in bench.ledger
    assert job.attempts[0].over
    assert job.attempts[0].failure is None
    asked = (folder_of(job.attempts[0]) / "requests.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in asked] == [{"kind": "release"}]


@pytest.mark.servers
def test_nodes_whose_batch_does_not_go_are_cancelled(bench, held, monkeypatch):
    monkeypatch.setattr(board, "RELEASE_S", 0.0)
    (job,) = in_order(held())
    bench.driver.add([job])
    handle = lend(bench, job)
    bench.driver.release(job)
    bench.driver.close()
    bench.driver.join(LIMIT_S)
    assert bench.provisioner.cancelled == [handle.id]
    assert ("ended", handle.id) in bench.ledger


def test_nodes_are_asked_for_when_no_run_before_them_can_be_repeated(bench, command, held):
    jobs = in_order(command(0), held(1), command(2))
    bench.reruns["job0"] = 1
    bench.driver.add(jobs)
    first, third = bench.provisioner.next(), bench.provisioner.next()
    assert jobs[2].attempts[0].handle.id == third.id  # what is measured does not wait for them
    bench.provisioner.say(AllocationEnded(first))
    rerun = bench.provisioner.next()
    assert jobs[0].attempts[1].handle.id == rerun.id
    bench.provisioner.say(AllocationEnded(third))
    ended(jobs[2])
    assert jobs[1].attempts == []
    bench.provisioner.say(AllocationEnded(rerun))
    assert bench.provisioner.next().id == jobs[1].attempts[0].handle.id


def test_a_node_that_failed_before_the_test_began_is_replaced(bench, held):
    (job,) = in_order(held(nodes=2))
    bench.driver.add([job])
    first = bench.provisioner.next()
    bench.provisioner.say(AllocationEnded(first, NodeFault("node_failure", "n1 died", ["n1"])))
    lend(bench, job, ("n3", "n2"))
    assert job.excluded == {"n1"}
    assert job.outcome.held.nodes == ("n3", "n2")


def test_a_node_that_failed_under_the_test_is_not(bench, held):
    (job,) = in_order(held(nodes=2))
    bench.driver.add([job])
    handle = lend(bench, job)
    bench.provisioner.say(AllocationEnded(handle, NodeFault("node_failure", "n1 died", ["n1"])))
    bench.driver.close()
    bench.driver.join(LIMIT_S)
    assert bench.provisioner.submitted.empty()
    assert job.attempts[0].failure.nodes == ("n1",)


def test_nodes_are_not_left_to_a_later_session(bench, held, command):
    jobs = in_order(held(0), held(1), command(2))
    bench.driver.add(jobs)
    lent = lend(bench, jobs[0])
    bench.provisioner.next()
    bench.driver.close(detach=True)
    bench.driver.join(LIMIT_S)
    assert lent.id in bench.provisioner.cancelled
    assert ended(jobs[1]).failure.outcome == "cancelled"
    assert "no later session" in jobs[1].outcome.failure.text
    assert ended(jobs[2]).failure.outcome == "detached"


def test_nodes_of_a_dead_session_are_not_adopted(held):
    job = Job(held())
    run = SubmittedRun("r", job.spec.node_id, job.spec.benchmark, 0, spec_digest(job.spec))
    assert not wanted_by([job])(Submitted("r", "sys:part", scheduler="slurm", runs=(run,)))


def test_held_nodes_are_never_shared(held, command):
    assert not fits([held(0)], held(1), None)
    assert not fits([held(0)], command(1), None)
    assert not fits([command(0)], held(1), None)


def test_what_is_held(held):
    spec = held(nodes=2)
    assert (spec.nodes, spec.ranks, spec.launcher, spec.judged, spec.exclusive) == (2, 2, "plain", (), True)
    assert spec.benchmark == "nodes[] devices=2 name=held0 nodes=2 preset=smoke"


def test_two_tests_may_hold_the_same(declare):
    assert duplicates([declare("nodes", node_id=f"t.py::test_it[{number}]") for number in range(2)]) == []


def test_fields_of_measured_runs_are_refused(held):
    with pytest.raises(SpecError) as raised:
        held(steps=3, launcher="torchrun", data="files")
    assert [problem.key for problem in raised.value.problems] == ["steps", "data", "launcher"]
