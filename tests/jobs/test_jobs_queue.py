"""The queue: order, limits, cancelling, closing, and errors of its own."""

import threading
from unittest.mock import Mock

import pytest
from queue_world import HANG_S, failure_of, outcome_of

from pytest_mlhpc.jobs.spec import JobState


def test_at_most_max_jobs_are_submitted_in_the_order_of_tests(start_queue):
    queue = start_queue(2)
    jobs = queue.add_commands(4)
    first, second = queue.next(), queue.next()
    assert queue.provisioner.submitted.empty()
    assert [job.state for job in jobs[2:]] == [JobState.DECLARED] * 2
    queue.end(second)
    outcome_of(jobs[1])
    third = queue.next()  # before the job is looked at: it waits for its submission
    assert jobs[2].attempts[0].handle.id == third.id
    queue.end(first)
    outcome_of(jobs[0])


def test_the_ledger_knows_of_a_job_before_it_is_submitted(start_queue):
    queue = start_queue()
    queue.provisioner.refusal = "no such account"
    (job,) = queue.add_commands(1)
    assert str(failure_of(job)).startswith("rejected: no such account")
    assert queue.ledger_events() == ["submitted", "ended"]
    (attempt,) = job.attempts
    assert queue.concluded == [attempt.run.run_id]  # it has a record, as what ran has
    assert failure_of(job).log == attempt.directory


def test_a_job_that_can_never_run_is_not_submitted(start_queue, command):
    queue = start_queue()
    (job,) = queue.add(command(name="big"))
    assert str(failure_of(job)).startswith("rejected: too big")
    assert queue.ledger == []


def test_reruns_go_before_jobs_that_wait(start_queue):
    queue = start_queue(2)
    queue.reruns["job0"] = 2
    first, *_ = queue.add_commands(4)
    queue.end(queue.next())
    queue.next()
    rerun = queue.next()
    assert (first.attempts[1].handle.id, first.state) == (rerun.id, JobState.RERUNNING)
    assert first.attempts[1].run.run_id != first.attempts[0].run.run_id
    queue.end(rerun)
    queue.end(queue.next())
    assert outcome_of(first).attempts == 3


def test_cancelling_a_running_job_frees_its_place(start_queue):
    queue = start_queue(2)
    jobs = queue.add_commands(3)
    handle, _ = queue.next(), queue.next()
    queue.driver.cancel([jobs[0]], "no longer wanted")
    assert failure_of(jobs[0]).outcome == "cancelled"
    assert queue.provisioner.cancelled == [handle.id]
    assert jobs[2].attempts or queue.next()
    queue.end(handle)  # its late end disturbs nobody
    queue.driver.cancel([jobs[2]], "no longer wanted")
    assert failure_of(jobs[2]).outcome == "cancelled"


def test_cancelling_a_waiting_job_never_submits_it(start_queue):
    queue = start_queue(2)
    jobs = queue.add_commands(3)
    first = queue.next()
    queue.driver.cancel([jobs[2]], "no longer wanted")
    outcome_of(jobs[2])
    queue.end(first)
    outcome_of(jobs[0])
    queue.close()
    assert jobs[2].attempts == []


def test_jobs_that_are_given_up_together_are_cancelled_by_one_call(start_queue):
    queue = start_queue(8)
    jobs = queue.add_commands(9)
    handles = [queue.next().id for _ in range(8)]
    queue.driver.cancel(jobs[1:], "the session is about to end")
    assert {failure_of(job).text for job in jobs[1:]} == {"the session is about to end"}
    assert (queue.provisioner.cancel_calls, queue.provisioner.cancelled) == ([7], handles[1:])
    assert not jobs[0].done.is_set()
    queue.close()
    assert queue.provisioner.cancel_calls == [7, 1]


def test_jobs_that_are_given_up_while_others_are_cancelled_follow_by_one_call(start_queue):
    queue = start_queue(4)
    jobs = queue.add_commands(4)
    for _ in jobs:
        queue.next()
    begun, go, cancel = threading.Event(), threading.Event(), queue.provisioner.cancel

    def slow(handles):
        begun.set()
        assert go.wait(HANG_S)
        return cancel(handles)

    queue.provisioner.cancel = slow
    queue.driver.cancel(jobs[:1], "its test is over")
    assert begun.wait(HANG_S)
    for job in jobs[1:]:
        queue.driver.cancel([job], f"{job.spec.name} is over")
    queue.driver.cancel(jobs, "the session is about to end")  # the first reason counts
    go.set()
    assert [failure_of(job).text for job in jobs[1:]] == ["job1 is over", "job2 is over", "job3 is over"]
    queue.close()
    assert queue.provisioner.cancel_calls == [1, 3]
    assert len(queue.ended_allocations()) == 4


def test_of_those_given_up_together_only_what_is_surely_gone_is_forgotten(start_queue):
    queue = start_queue(3)
    jobs = queue.add_commands(3)
    first, second, third = (queue.next().id for _ in jobs)
    queue.provisioner.unsure = {second}
    queue.driver.cancel(jobs, "no longer wanted")
    for job in jobs:
        outcome_of(job)
    queue.close()
    assert queue.ended_allocations() == {first, third}
    assert [handle.id for handle in queue.driver.remaining] == [second]


def test_closing_cancels_all_and_gives_every_job_an_outcome(start_queue):
    queue = start_queue(2)
    jobs = queue.add_commands(4)
    handles = {queue.next().id, queue.next().id}
    queue.close()
    assert {failure_of(job).outcome for job in jobs} == {"cancelled"}
    assert set(queue.provisioner.cancelled) == queue.ended_allocations() == handles


def test_what_ends_while_the_queue_closes_is_judged(start_queue):
    queue = start_queue()
    events = queue.provisioner.events

    def ends_now(handles, timeout_s):
        queue.provisioner.events = events
        assert events(handles, timeout_s) == []  # it was woken for the new job
        queue.end(handles[0])
        queue.driver.close()
        return []

    queue.provisioner.events = ends_now
    (job,) = queue.add_commands(1)
    queue.join()
    assert (failure_of(job), queue.provisioner.cancelled) == (None, [])


def test_a_run_that_said_its_end_is_judged_though_its_allocation_has_not_ended(start_queue):
    queue = start_queue()
    job, handle = queue.submit_one()
    (attempt,) = job.attempts
    attempt.measurement = Mock()
    queue.line(handle, attempt, "end", started_ns=1, ended_ns=2)
    while not attempt.ended_ns:
        threading.Event().wait(0.01)
    queue.close()
    assert (failure_of(job), queue.provisioner.cancelled) == (None, [handle.id])


def test_a_run_that_has_ended_is_judged_though_reruns_of_it_are_cancelled(start_queue):
    queue = start_queue()
    queue.reruns["job0"] = 1
    job, first = queue.submit_one()
    queue.end(first)
    rerun = queue.next()
    queue.close()
    assert (failure_of(job), job.refused.outcome) == (None, "cancelled")
    assert (len(queue.concluded), queue.provisioner.cancelled) == (2, [rerun.id])


@pytest.mark.parametrize(
    "error", [RuntimeError("broken"), SystemExit(0), pytest.skip.Exception("by a hook"), KeyboardInterrupt()]
)
def test_what_would_end_a_thread_in_silence_is_an_error_of_our_own(start_queue, error):
    queue = start_queue(2)
    jobs = queue.add_commands(3)
    handles = [queue.next(), queue.next()]
    queue.provisioner.events = Mock(side_effect=error)
    queue.change(handles[0], JobState.RUNNING)
    queue.join()
    assert type(error).__name__ in queue.driver.crash
    assert str(error) in queue.driver.crash
    assert set(queue.provisioner.cancelled) == {handle.id for handle in handles}
    assert {failure_of(job).outcome for job in jobs} == {"channel_broken"}
    assert all("internal error" in failure_of(job).text for job in jobs)


def test_a_provisioner_that_fails_to_close_is_an_error_of_our_own(start_queue):
    queue = start_queue()
    job, _ = queue.submit_one()
    close = queue.provisioner.close

    def fails():
        close()
        raise RuntimeError("cannot close")

    queue.provisioner.close = fails
    queue.close()
    assert "cannot close" in queue.driver.crash
    assert failure_of(job).outcome == "cancelled"
