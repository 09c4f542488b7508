"""Jobs that share allocations, that are run again, and that outlive their session."""

import dataclasses

import pytest
from queue_world import failure_of, outcome_of
from running_suites import wait_for

from pytest_mlhpc.errors import NodeFault, ProvisionError, RunFailure
from pytest_mlhpc.jobs.job import AdoptedAllocation, Attempt, Job
from pytest_mlhpc.jobs.plan import plan_of
from pytest_mlhpc.jobs.spec import MARGIN_S, PER_RUN_S, JobState, allocation_time_s, fits_into, same_needs


@pytest.fixture
def packed(start_queue):
    """Start a queue whose jobs share allocations."""
    return start_queue(2, pack=True)


def test_jobs_with_the_same_needs_share_one_allocation_in_test_order(packed):
    jobs = packed.add_commands(3)
    handle = packed.next()
    assert {job.attempts[0].handle for job in jobs} == {handle}
    assert packed.ledger_events() == ["submitted"]
    assert len({job.attempts[0].directory for job in jobs}) == 3
    packed.end(handle)
    for job in jobs:
        outcome_of(job)


def test_a_run_that_fails_is_over_before_its_allocation_and_does_not_hurt_the_next_one(packed):
    jobs = packed.add_commands(2)
    handle = packed.next()
    packed.line(handle, jobs[0].attempts[0], "failed", outcome="worker_exit", text="code 3")
    packed.line(handle, jobs[0].attempts[0], "end", exit=[3])
    outcome_of(jobs[0])
    assert (jobs[1].done.is_set(), packed.ended_allocations()) == (False, set())
    packed.line(handle, jobs[1].attempts[0], "end", exit=[0])
    outcome_of(jobs[1])
    # The second run has measured nothing.
    assert [job.attempts[0].failure.outcome for job in jobs] == ["worker_exit", "no_result"]
    packed.end(handle)


def test_cancelling_one_of_several_leaves_the_allocation_to_the_others(packed):
    jobs = packed.add_commands(2)
    handle = packed.next()
    packed.driver.cancel([jobs[0]], "no longer wanted")
    assert failure_of(jobs[0]).outcome == "cancelled"
    assert packed.provisioner.cancelled == []
    assert packed.provisioner.skipped == [jobs[0].attempts[0].run.run_id]
    packed.driver.cancel([jobs[1]], "no longer wanted")
    outcome_of(jobs[1])
    assert packed.provisioner.cancelled == [handle.id]


def test_a_run_that_never_began_is_not_blamed_for_what_ended_its_allocation(packed):
    first, second = packed.add_commands(2)
    handle = packed.next()
    packed.line(handle, first.attempts[0], "started", protocol=1, payload_sha256="")
    packed.end(handle, RunFailure("out_of_memory", "step 0 ran out of memory"))
    outcome_of(first)
    again = packed.next()
    outcomes = (first.attempts[0].failure.outcome, second.lost[0].failure.outcome)
    assert outcomes == ("out_of_memory", "not_begun")
    packed.end(again)
    outcome_of(second)


def test_other_nodes_or_ranks_are_other_needs(command, declare):
    one, other = command(0), command(1)
    others = [dataclasses.replace(other, nodes=2), dataclasses.replace(other, ranks=2), declare("cosmoflow")]
    assert [same_needs(one, spec) for spec in (other, *others)] == [True, False, False, False]


def test_an_allocation_is_never_longer_than_its_partition_gives(command):
    specs = [command(number, time_limit=600.0) for number in range(3)]
    assert allocation_time_s(specs) == 1800 + MARGIN_S + 2 * PER_RUN_S
    assert fits_into(specs[:2], specs[2], allocation_time_s(specs))
    assert not fits_into(specs[:2], specs[2], allocation_time_s(specs) - 1)


@pytest.mark.parametrize(
    ("own", "given", "shared"), [(0, 1, True), (-1, None, False), (1, -1, False), (None, None, True)]
)
def test_an_allocation_is_never_longer_than_its_tests_say_themselves(command, own, given, shared):
    plain = [command(number, time_limit=600.0) for number in range(2)]
    needed = allocation_time_s(plain)
    options = {"max_time": None if own is None else needed + own}
    one, other = (dataclasses.replace(one, scheduler_options=options) for one in plain)
    assert fits_into([one], other, None if given is None else needed + given) is shared


def test_a_run_whose_node_failed_is_run_once_more_without_that_node(start_queue):
    queue = start_queue()
    job, first = queue.submit_one()
    queue.end(first, NodeFault("node_failure", "node n3 is down", ["n3"]))
    second = queue.next()
    assert (job.excluded, job.lost[0].failure.nodes) == ({"n3"}, ("n3",))
    (attempt,) = job.attempts
    assert (attempt.handle.id, attempt.number) == (second.id, 0)  # it takes the first one's place
    queue.end(second, NodeFault("node_failure", "node n4 is down", ["n4"]))
    outcome_of(job)
    assert attempt.failure.nodes == ("n4",)
    assert queue.provisioner.submitted.empty()
    queue.close()
    assert sorted(queue.ledger_events()) == ["ended"] * 2 + ["submitted"] * 2


@pytest.mark.parametrize(("nodes", "away"), [(3, {"n3"}), (4, set())])
def test_a_node_that_a_run_names_is_avoided_if_the_partition_has_enough_others(
    start_queue, command, nodes, away
):
    queue = start_queue()
    (job,) = queue.add(command(nodes=nodes, ranks_per_node=1))
    first = queue.next()
    failure = {"outcome": "node_failure", "text": "pod p-1 (node n3) was lost", "log": "", "nodes": ["n3"]}
    queue.line(first, job.attempts[0], "failed", **failure)
    queue.end(first)
    second = queue.next()
    assert (job.lost[0].failure.nodes, job.excluded) == (("n3",), away)
    queue.end(second)
    outcome_of(job)


@pytest.mark.parametrize(
    "error", [RunFailure("time_limit", "too long"), ProvisionError("cancelled_outside", "by root")]
)
def test_what_says_something_of_the_run_is_not_run_again(start_queue, error):
    queue = start_queue()
    job, handle = queue.submit_one()
    queue.end(handle, error)
    outcome_of(job)
    assert (job.lost, job.attempts[0].failure.outcome) == ([], error.outcome)


def test_an_allocation_stays_in_the_ledger_while_its_job_has_reruns(start_queue):
    queue = start_queue()
    queue.reruns["job0"] = 1
    job, first = queue.submit_one()
    queue.end(first)
    second = queue.next()
    assert first.id not in queue.ended_allocations()  # killed now, the first result is still found
    queue.end(second)
    outcome_of(job)
    queue.close()
    assert queue.ended_allocations() == {first.id, second.id}


def test_a_refused_rerun_does_not_lose_the_first_result(start_queue):
    queue = start_queue()
    queue.reruns["job0"] = 1
    job, first = queue.submit_one()
    queue.provisioner.refusal = "QOSMaxSubmitJobPerUserLimit"
    queue.end(first)
    assert failure_of(job) is None  # it was judged by what there is
    assert "QOSMaxSubmitJobPerUserLimit" in str(job.refused)
    assert [attempt.number for attempt in job.attempts] == [0, 1]
    queue.close()
    assert sorted(queue.ledger_events()) == ["ended"] * 2 + ["submitted"] * 2


def test_a_driver_that_leaves_cancels_nothing_and_its_ledger_stays_open(start_queue):
    queue = start_queue()
    jobs = queue.add_commands(2)
    handle = queue.next()
    queue.change(handle, JobState.QUEUED, "Priority", native_id="4711")
    wait_for(queue.driver.settled.is_set)
    wait_for(lambda: ("accepted", "4711") in queue.ledger)
    queue.close(detach=True)
    assert (queue.provisioner.cancelled, queue.ledger_events()) == ([], ["submitted", "accepted"])
    assert [failure_of(job).outcome for job in jobs] == ["detached"] * 2
    assert "job 4711 is queued" in failure_of(jobs[0]).text
    assert "not submitted yet" in failure_of(jobs[1]).text
    assert [left.id for left in queue.driver.remaining] == [handle.id]


def test_what_was_left_without_an_answer_is_not_called_queued(start_queue):
    queue = start_queue()
    job, handle = queue.submit_one()
    queue.change(handle, JobState.QUEUED, "not submitted yet: sbatch does not answer")
    wait_for(lambda: job.reason)
    queue.close(detach=True)
    assert failure_of(job).text.startswith("not submitted yet: sbatch does not answer; a later session")


@pytest.fixture
def adopt(start_queue, tmp_path, command):
    """Let a queue adopt an allocation of so many runs, of which this session's test wants the first."""

    def start(runs):
        queue, job = start_queue(), Job(command(0))
        plan = plan_of([(job.spec, 0), *((command(number), 0) for number in range(1, runs))], tmp_path, "")
        first, *others = plan.runs
        attempt = Attempt(first, 0, directory=plan.directory, adopted=True, shared=runs > 1)
        unwanted = frozenset(run.run_id for run in others)
        queue.driver.adopt([AdoptedAllocation(plan, "4711", {first.run_id: (job, attempt)}, unwanted)])
        return queue, job, queue.next_adopted()

    return start


def test_an_adopted_allocation_gives_its_results_without_being_submitted(adopt):
    queue, job, handle = adopt(1)
    queue.end(handle)
    outcome_of(job)
    assert queue.provisioner.submitted.empty()
    queue.close()
    assert queue.ledger == [("ended", handle.id)]


def test_what_nobody_wants_of_an_adopted_allocation_goes_on_and_stays_in_the_ledger(adopt):
    queue, job, handle = adopt(2)
    queue.line(handle, job.attempts[0], "end", exit=[0])
    outcome_of(job)
    queue.close()
    assert queue.provisioner.cancelled == queue.ledger == []
    assert [kept.id for kept in queue.driver.resumable] == [handle.id]
    assert queue.concluded == [job.attempts[0].run.run_id]


def test_a_test_that_is_over_takes_nothing_from_others_that_may_come_later(adopt):
    queue, job, handle = adopt(2)
    queue.driver.cancel([job], "its test is over")
    outcome_of(job)
    queue.close()
    assert queue.provisioner.cancelled == []
    assert queue.provisioner.skipped == [job.attempts[0].run.run_id]
    assert [kept.id for kept in queue.driver.resumable] == [handle.id]


def test_a_session_whose_ledger_was_taken_over_touches_nothing_more(start_queue):
    queue = start_queue()
    job, handle = queue.submit_one()
    queue.owns_ledger = False
    queue.change(handle, JobState.QUEUED, "Priority")
    assert failure_of(job).outcome == "channel_broken"
    assert "another session took these jobs over" in failure_of(job).text
    queue.close()
    assert (queue.provisioner.cancelled, queue.ledger_events()) == ([], ["submitted"])


@pytest.mark.parametrize("cancelled", [True, False])
def test_an_allocation_that_may_not_be_gone_stays_in_the_ledger(start_queue, cancelled):
    queue = start_queue()
    job, handle = queue.submit_one()
    if cancelled:
        queue.provisioner.unsure = {handle.id}
    else:
        queue.end(handle, ProvisionError("never_scheduled", "no answer"), unsure=True)
        outcome_of(job)
    queue.close()
    assert getattr(failure_of(job), "outcome", "") == ("cancelled" if cancelled else "")
    assert [left.id for left in queue.driver.remaining] == [handle.id]
    assert queue.ledger_events() == ["submitted"]
