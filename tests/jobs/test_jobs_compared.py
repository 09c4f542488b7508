"""A job with two sides: its runs are one allocation, judged one by one, and the allocation ends with the verdict."""

from dataclasses import replace

import pytest
from queue_world import failure_of, outcome_of
from running_suites import wait_for

from pytest_mlhpc.errors import NodeFault
from pytest_mlhpc.jobs.job import Job, Opponent, is_first_side
from pytest_mlhpc.jobs.spec import JobState, allocation_time_s


class Undecided(dict):
    """A judge's answers: so many times that more runs are needed, then the verdict."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.left = times

    def pop(self, name, default=0):
        self.left -= 1
        return 1 if self.left >= 0 else 0


@pytest.fixture
def compare(start_queue, command):
    """Start a comparison of up to 12 runs in a queue; the judge decides after *runs* of them."""

    def start(runs=12, longest=None, **changes):
        world = start_queue(2)
        world.reruns = Undecided(runs - 1)
        world.provisioner.longest = lambda: longest
        first = replace(command(1), **changes)
        job = Job(first, opponent=Opponent(replace(first, env={"SIDE": "B"}), 12, 8))
        world.driver.add([job])
        return world, job

    return start


def end_runs(world, job, handle, count):
    """Let the next *count* runs of an allocation end."""
    for attempt in [one for one in job.attempts if not one.over][:count]:
        world.line(handle, attempt, "started")
        world.line(handle, attempt, "end", exit=[0])
        wait_for(lambda ended=attempt: ended.over)


def test_the_order_is_a_b_b_a():
    assert [is_first_side(number) for number in range(1, 9)] == [True, False, False, True] * 2


def test_all_runs_of_both_sides_are_one_allocation_and_none_is_a_first_attempt(compare):
    world, job = compare()
    handle = world.next()
    assert [attempt.number for attempt in job.attempts] == list(range(1, 13))
    assert [attempt.run.variables.get("SIDE", "A") for attempt in job.attempts] == ["A", "B", "B", "A"] * 3
    assert {attempt.handle for attempt in job.attempts} == {handle}
    assert world.ledger_events() == ["submitted"]
    assert job.state is JobState.QUEUED


def test_its_allocation_is_cancelled_once_the_verdict_stands(compare):
    world, job = compare(runs=8)
    handle = world.next()
    end_runs(world, job, handle, 7)
    assert not job.done.is_set()
    end_runs(world, job, handle, 1)
    outcome_of(job)
    wait_for(lambda: world.ended_allocations() == {handle.id})
    assert world.provisioner.cancelled == [handle.id]
    assert set(world.concluded) == {attempt.run.run_id for attempt in job.attempts}


def test_after_its_last_run_nothing_is_cancelled(compare):
    world, job = compare(runs=12)
    handle = world.next()
    end_runs(world, job, handle, 12)
    outcome_of(job)
    world.end(handle)
    wait_for(lambda: world.ended_allocations() == {handle.id})
    assert world.provisioner.cancelled == []


def test_a_run_that_the_infrastructure_ended_is_not_made_again(compare):
    world, job = compare(runs=3)
    handle = world.next()
    end_runs(world, job, handle, 2)
    world.end(handle, NodeFault("node_failure", "node7 died", nodes=("node7",)))
    outcome_of(job)
    assert job.lost == []
    assert job.attempts[2].failure.outcome == "node_failure"
    wait_for(lambda: world.ended_allocations() == {handle.id})
    assert world.provisioner.submitted.empty()


def test_as_many_runs_are_made_as_fit_into_the_longest_allocation(compare, command):
    world, job = compare(longest=allocation_time_s([command(1)] * 10) + 1)
    world.next()
    assert (job.planned, len(job.attempts)) == (10, 10)


def test_too_few_runs_are_refused_with_the_time_limit_that_would_do(compare, command):
    spec = command(1)
    longest = allocation_time_s([spec] * 8) - 80
    _, job = compare(longest=longest)
    failure = failure_of(job)
    assert failure.outcome == "rejected"
    limit = int(spec.time_limit_s - 10)
    assert f"set time_limit={limit} of the test" in failure.text
    assert allocation_time_s([replace(spec, time_limit_s=limit)] * 8) <= longest


def test_a_session_that_ends_meanwhile_leaves_nothing(compare):
    world, job = compare(runs=13)
    handle = world.next()
    end_runs(world, job, handle, 3)
    world.close()
    assert world.provisioner.cancelled == [handle.id]
    assert job.done.is_set()
    assert world.ended_allocations() == {handle.id}
