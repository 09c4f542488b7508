"""Jobs that wait for the runs that they need (``prepare``), in the queue and when a session goes on with earlier ones."""

from dataclasses import replace

import pytest
from queue_world import failure_of, outcome_of

from pytest_mlhpc.errors import NodeFault, RunFailure
from pytest_mlhpc.jobs.job import Job, Outcome
from pytest_mlhpc.jobs.ledger_entry import spec_digest
from pytest_mlhpc.jobs.programs import with_needed
from pytest_mlhpc.jobs.resume import without_user
from pytest_mlhpc.jobs.spec import with_needs
from pytest_mlhpc.node.protocol.plan import FinishedRun
from pytest_mlhpc.store.record import Failure


@pytest.fixture
def needed(command):
    """Return jobs: one, and so many that need it."""

    def make(count=1):
        first = Job(command(9, name="made"))
        users = [Job(replace(command(number), needs={"made": first.spec})) for number in range(count)]
        for job in users:
            job.needs = {"made": first}
        return first, users

    return make


def test_a_job_is_submitted_when_what_it_needs_has_ended(start_queue, needed, command):
    queue = start_queue(3)
    first, (user,) = needed()
    other = Job(command(7))
    queue.driver.add([first, user, other])
    submitted = [queue.next(), queue.next()]
    assert {job.attempts[0].handle.id for job in (first, other)} == {one.id for one in submitted}
    assert not user.attempts
    queue.end(submitted[0])
    third = queue.next()
    assert user.attempts[0].handle.id == third.id
    assert set(user.attempts[0].run.needed) == {"made"}
    for handle in (submitted[1], third):
        queue.end(handle)
    assert outcome_of(user).failure is None


def test_jobs_that_need_another_do_not_share_its_allocation(start_queue, needed):
    queue = start_queue(pack=True)
    first, users = needed(2)
    queue.driver.add([first, *users])
    one = queue.next()
    assert first.attempts[0].handle.id == one.id
    assert not any(job.attempts for job in users)
    queue.end(one)
    two = queue.next()
    assert {job.attempts[0].handle.id for job in users} == {two.id}


def test_what_a_failed_run_was_needed_for_is_not_submitted(start_queue, needed):
    queue = start_queue()
    first, users = needed(2)
    first.conclude(failed(first))
    queue.driver.add(users)
    for job in users:
        failure = failure_of(job)
        assert failure.outcome == "prepare_failed"
        assert "the run made (" in failure.text
        assert "worker_exit: it ended with exit code 3" in failure.text
    assert queue.ledger_events() == []


def failed(job, outcome="worker_exit"):
    failure = Failure(outcome, "it ended with exit code 3", "/log")
    return Outcome(job.spec.node_id, job.spec.benchmark, failure=failure)


@pytest.mark.parametrize(("outcome", "recorded"), [("node_failure", True), ("cancelled", False)])
def test_what_says_nothing_of_the_run_is_not_called_its_failure(start_queue, needed, outcome, recorded):
    queue = start_queue()
    first, (user,) = needed()
    first.conclude(failed(first, outcome))
    queue.driver.add([user])
    failure = failure_of(user)
    assert failure.outcome == outcome
    assert failure.text.startswith("the run made that it needs: ")
    assert bool(user.attempts) is recorded


def test_a_retry_needs_the_same_run_once_more_and_waits_for_nothing(start_queue, needed):
    queue = start_queue()
    first, (user,) = needed()
    queue.driver.add([first, user])
    queue.end(queue.next())
    queue.end(queue.next(), NodeFault("node_failure", "node n1 failed", ["n1"]))
    queue.end(queue.next())
    assert outcome_of(user).failure is None
    assert user.attempts[0].run.needed == user.lost[0].run.needed != {}


def test_each_run_is_declared_once_and_before_what_needs_it(needed):
    first, users = needed(2)
    specs = with_needs([job.spec for job in users])
    assert [spec.node_id for spec in specs] == [job.spec.node_id for job in (first, *users)]


def test_another_run_that_is_needed_is_another_job(needed):
    _, (user,) = needed()
    other = replace(user.spec, needs={"made": replace(user.spec.needs["made"], argv=("other",))})
    assert spec_digest(user.spec) != spec_digest(other)
    assert spec_digest(user.spec) == spec_digest(replace(user.spec, needed={}))


def test_a_run_that_only_runs_of_an_earlier_session_need_is_not_made_again(needed):
    first, users = needed(2)
    jobs = [first, *users]
    assert without_user(jobs, {id(users[0])}) == []
    assert without_user(jobs, {id(job) for job in users}) == [first]
    assert without_user(jobs, {id(job) for job in jobs}) == []


def test_artifacts_that_a_pod_cannot_take_are_named(command, tmp_path):
    spec = command()
    partition = replace(spec.target.partition, scheduler="kubernetes")
    spec = replace(spec, argv=("cat", "{made}/x"), target=replace(spec.target, partition=partition))
    (tmp_path / "x").write_bytes(bytes(1 << 20))
    with pytest.raises(RunFailure, match="artifacts of made: have 1MiB, a pod gets 900KiB at most"):
        with_needed(spec, {"made": FinishedRun(str(tmp_path), "", ("x",))})
