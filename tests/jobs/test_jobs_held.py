"""Nodes that a test holds: when they are asked for, when its test begins, and how they are given back."""

import pytest
from queue_world import failure_of, outcome_of
from running_suites import wait_for

from pytest_mlhpc.errors import NodeFault
from pytest_mlhpc.jobs import partition_queue
from pytest_mlhpc.jobs.contradictions import duplicates
from pytest_mlhpc.jobs.job import Job, request_folder
from pytest_mlhpc.jobs.ledger_entry import LedgerEntry, LedgerRun, spec_digest
from pytest_mlhpc.jobs.resume import is_needed_by
from pytest_mlhpc.jobs.spec import fits_into


@pytest.fixture
def queue(start_queue):
    return start_queue(2)


@pytest.fixture
def held(declare):
    def make(number=0, **marked):
        return declare("nodes", node_id=f"t.py::test_{number}", name=f"held{number}", **marked)

    return make


@pytest.fixture
def start(queue):
    """Give the driver jobs of tests that follow each other."""

    def add(*specs):
        jobs = [Job(spec) for spec in specs]
        for job, previous in zip(jobs[1:], jobs, strict=False):
            job.previous = previous
        queue.driver.add(jobs)
        return jobs

    return add


@pytest.fixture
def grant(queue):
    """Let the batch of a job say that it is there; return its handle."""

    def let(job, nodes=("n1", "n2")):
        handle = queue.next()
        folder = request_folder(job.attempts[-1])
        folder.mkdir(parents=True)
        (folder / "requests.jsonl").touch()
        queue.change(handle, job.state, nodes=nodes, native_id="77")
        queue.line(handle, job.attempts[-1], "started", protocol=1, payload_sha256="", nodes=list(nodes))
        outcome_of(job)
        return handle

    return let


@pytest.fixture
def granted(start, grant, held):
    """Return a job of two nodes whose test has begun, and its allocation."""
    (job,) = start(held(nodes=2))
    return job, grant(job)


def test_the_test_begins_while_the_allocation_goes_on(queue, granted):
    job, _handle = granted
    assert job.outcome.failure is None
    assert (
        vars(job.outcome.granted).items() >= {"id": "77", "nodes": ("n1", "n2"), "partition": "part"}.items()
    )
    assert (job.attempts[0].over, queue.ended_allocations()) == (False, set())


def test_released_nodes_end_by_themselves_and_their_job_is_not_cancelled(queue, granted):
    job, handle = granted
    queue.driver.release(job)
    queue.driver.close()  # the session ends at once; it waits for what is going anyway
    queue.end(handle)
    queue.join()
    assert (queue.provisioner.cancelled, queue.ended_allocations()) == ([], {handle.id})
    (attempt,) = job.attempts
    assert (attempt.over, attempt.failure) == (True, None)
    assert (request_folder(attempt) / "requests.jsonl").read_text().split() == ['{"kind":"release"}']


def test_nodes_whose_batch_does_not_go_are_cancelled(queue, granted, monkeypatch):
    monkeypatch.setattr(partition_queue, "RELEASE_S", 0.0)
    job, handle = granted
    queue.driver.release(job)
    wait_for(lambda: queue.provisioner.cancelled)
    queue.close()
    assert (queue.provisioner.cancelled, queue.ended_allocations()) == ([handle.id], {handle.id})


def test_nodes_are_asked_for_when_no_run_before_them_can_be_repeated(queue, start, command, held):
    queue.reruns["job0"] = 1
    jobs = start(command(0), held(1), command(2))
    first, third = queue.next(), queue.next()
    assert jobs[2].attempts[0].handle.id == third.id  # what is measured does not wait for them
    queue.end(first)
    rerun = queue.next()
    assert jobs[0].attempts[1].handle.id == rerun.id
    queue.end(third)
    outcome_of(jobs[2])
    assert jobs[1].attempts == []
    queue.end(rerun)
    assert queue.next().id == jobs[1].attempts[0].handle.id


def test_a_node_that_failed_before_the_test_began_is_replaced(queue, start, grant, held):
    (job,) = start(held(nodes=2))
    queue.end(queue.next(), NodeFault("node_failure", "n1 died", ["n1"]))
    grant(job, ("n3", "n2"))
    assert (job.excluded, job.outcome.granted.nodes) == ({"n1"}, ("n3", "n2"))


def test_a_node_that_failed_under_the_test_is_not(queue, granted):
    job, handle = granted
    queue.end(handle, NodeFault("node_failure", "n1 died", ["n1"]))
    queue.close()
    assert queue.provisioner.submitted.empty()
    assert job.attempts[0].failure.nodes == ("n1",)


def test_nodes_are_not_left_to_a_later_session(queue, start, grant, held, command):
    jobs = start(held(0), held(1), command(2))
    handle = grant(jobs[0])
    queue.next()
    queue.close(detach=True)
    assert handle.id in queue.provisioner.cancelled
    assert [failure_of(job).outcome for job in jobs[1:]] == ["cancelled", "detached"]
    assert "no later session" in failure_of(jobs[1]).text


def test_nodes_of_a_dead_session_are_not_adopted(held):
    job = Job(held())
    run = LedgerRun("r", job.spec.node_id, job.spec.benchmark, 0, spec_digest(job.spec))
    assert not is_needed_by([job])(LedgerEntry("r", "sys:part", scheduler="slurm", runs=(run,)))


def test_allocated_nodes_are_never_shared(held, command):
    pairs = [(held(0), held(1)), (held(0), command(1)), (command(0), held(1))]
    assert not [pair for pair in pairs if fits_into([pair[0]], pair[1], None)]


def test_what_the_nodes_fixture_asks_for(held):
    spec = held(nodes=2)
    assert (spec.nodes, spec.ranks, spec.launcher, spec.judged, spec.exclusive) == (2, 2, "plain", (), True)
    assert (spec.benchmark, spec.definition) == ("held0", "nodes devices=2 nodes=2 preset=smoke")


def test_two_tests_may_hold_the_same(declare):
    assert duplicates([declare("nodes", node_id=f"t.py::test_it[{number}]") for number in range(2)]) == []


def test_fields_of_measured_runs_are_refused(problems):
    found = problems("nodes", steps=3, cache="warm", data="files")
    assert [problem.split(": ")[1] for problem in found] == ["steps", "cache", "data"]
