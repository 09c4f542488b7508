"""Jobs that share allocations, that are run again, and that outlive their session; the queue of test_jobs_queue.py."""

from __future__ import annotations

import dataclasses

import pytest
from test_jobs_queue import LIMIT_S, Bench, ended

from pytest_mlhpc.batch.plan import Plan
from pytest_mlhpc.errors import NodeFault, ProvisionError, RunFailure
from pytest_mlhpc.jobs.allocation import Adopted
from pytest_mlhpc.jobs.attempt import Attempt
from pytest_mlhpc.jobs.job import Job
from pytest_mlhpc.jobs.packing import BETWEEN_S, MARGIN_S, fits, same_needs, time_of
from pytest_mlhpc.jobs.planning import plan_of
from pytest_mlhpc.jobs.spec import JobState
from pytest_mlhpc.provision.base import AllocationEnded, LineArrived, StateChanged
from pytest_mlhpc.results.lines import Message


@pytest.fixture
def packed(tmp_path):
    made = Bench(tmp_path, max_jobs=2, pack=True)
    yield made
    made.driver.close()
    made.driver.join(LIMIT_S)
    assert not made.driver.is_alive()


def say(bench, handle, attempt, kind, **body):
    bench.provisioner.say(LineArrived(handle, Message(attempt.run.run_id, attempt.run.nonce, kind, body)))


def test_jobs_with_the_same_needs_share_one_allocation_in_test_order(packed, command):
    jobs = [Job(command(number)) for number in range(3)]
    packed.driver.add(jobs)
    handle = packed.provisioner.next()
    assert {job.attempts[0].handle for job in jobs} == {handle}
    assert [event for event, _ in packed.ledger] == ["submitted"]
    assert len({job.attempts[0].directory for job in jobs}) == 3
    packed.provisioner.say(AllocationEnded(handle))
    for job in jobs:
        ended(job)


def test_a_result_is_handed_out_when_its_run_ends_not_when_the_allocation_does(packed, command):
    jobs = [Job(command(number)) for number in range(2)]
    packed.driver.add(jobs)
    handle = packed.provisioner.next()
    say(packed, handle, jobs[0].attempts[0], "end", exit=[0])
    ended(jobs[0])
    assert not jobs[1].done.is_set()
    assert ("ended", handle.id) not in packed.ledger
    packed.provisioner.say(AllocationEnded(handle))
    ended(jobs[1])


def test_a_failing_run_does_not_hurt_the_next_one_of_its_allocation(packed, command):
    jobs = [Job(command(number)) for number in range(2)]
    packed.driver.add(jobs)
    handle = packed.provisioner.next()
    say(packed, handle, jobs[0].attempts[0], "failed", outcome="worker_exit", text="code 3")
    say(packed, handle, jobs[0].attempts[0], "end", exit=[3])
    ended(jobs[0])
    say(packed, handle, jobs[1].attempts[0], "end", exit=[0])
    ended(jobs[1])
    assert jobs[0].attempts[0].failure.outcome == "worker_exit"
    assert jobs[1].attempts[0].failure.outcome == "no_result"  # the fake run has measured nothing
    packed.provisioner.say(AllocationEnded(handle))


def test_cancelling_one_of_several_leaves_the_allocation_to_the_others(packed, command):
    jobs = [Job(command(number)) for number in range(2)]
    packed.driver.add(jobs)
    handle = packed.provisioner.next()
    packed.driver.cancel([jobs[0]], "no longer wanted")
    assert ended(jobs[0]).failure.outcome == "cancelled"
    assert packed.provisioner.cancelled == []
    assert packed.provisioner.skipped == [jobs[0].attempts[0].run.run_id]
    packed.driver.cancel([jobs[1]], "no longer wanted")
    ended(jobs[1])
    assert packed.provisioner.cancelled == [handle.id]


def test_other_nodes_or_ranks_are_other_needs(command, declare):
    one, other = command(0), command(1)
    assert same_needs(one, other)
    assert not same_needs(one, dataclasses.replace(other, nodes=2))
    assert not same_needs(one, dataclasses.replace(other, ranks=2))
    assert not same_needs(one, declare("cosmoflow"))  # trains alone, the commands do not


def test_an_allocation_is_never_longer_than_its_partition_gives(command):
    specs = [command(number, time_limit=600.0) for number in range(3)]
    assert time_of(specs) == 1800 + MARGIN_S + 2 * BETWEEN_S
    assert fits(specs[:2], specs[2], time_of(specs))
    assert not fits(specs[:2], specs[2], time_of(specs) - 1)


@pytest.mark.parametrize(
    ("own", "given", "shared"), [(0, 1, True), (-1, None, False), (1, -1, False), (None, None, True)]
)
def test_an_allocation_is_never_longer_than_its_tests_say_themselves(command, own, given, shared):
    plain = [command(number, time_limit=600.0) for number in range(2)]
    needed = time_of(plain)
    options = {"max_time": None if own is None else needed + own}
    one, other = (dataclasses.replace(one, scheduler_options=options) for one in plain)
    assert fits([one], other, None if given is None else needed + given) is shared


def test_a_run_whose_node_failed_is_run_once_more_without_that_node(tmp_path, command):
    bench = Bench(tmp_path, max_jobs=1)
    job = Job(command())
    bench.driver.add([job])
    first = bench.provisioner.next()
    bench.provisioner.say(AllocationEnded(first, NodeFault("node_failure", "node n3 is down", ["n3"])))
    second = bench.provisioner.next()
    assert job.excluded == {"n3"}
    assert job.lost[0].failure.nodes == ("n3",)
    assert job.attempts[0].handle.id == second.id
    assert job.attempts[0].number == 0  # it takes the first one's place
    bench.provisioner.say(AllocationEnded(second, NodeFault("node_failure", "node n4 is down", ["n4"])))
    ended(job)
    assert job.attempts[0].failure.nodes == ("n4",)
    assert bench.provisioner.submitted.empty()
    bench.driver.close()
    bench.driver.join(LIMIT_S)
    assert sorted(event for event, _ in bench.ledger) == ["ended"] * 2 + ["submitted"] * 2


@pytest.mark.parametrize(("nodes", "away"), [(3, {"n3"}), (4, set())])
def test_a_node_that_a_run_names_is_avoided_if_the_partition_has_enough_others(
    tmp_path, command, nodes, away
):
    bench = Bench(tmp_path, max_jobs=1)
    job = Job(command(nodes=nodes, devices=nodes))
    bench.driver.add([job])
    first = bench.provisioner.next()
    words = {"outcome": "node_failure", "text": "pod p-1 (node n3) was lost", "log": "", "nodes": ["n3"]}
    say(bench, first, job.attempts[0], "failed", **words)
    bench.provisioner.say(AllocationEnded(first))
    second = bench.provisioner.next()
    assert job.lost[0].failure.nodes == ("n3",)
    assert job.excluded == away
    bench.provisioner.say(AllocationEnded(second))
    ended(job)
    bench.driver.close()
    bench.driver.join(LIMIT_S)


@pytest.mark.parametrize(
    "error", [RunFailure("time_limit", "too long"), ProvisionError("cancelled_outside", "by root")]
)
def test_what_says_something_of_the_run_is_not_run_again(tmp_path, command, error):
    bench = Bench(tmp_path, max_jobs=1)
    job = Job(command())
    bench.driver.add([job])
    bench.provisioner.say(AllocationEnded(bench.provisioner.next(), error))
    ended(job)
    assert job.lost == []
    assert job.attempts[0].failure.outcome == error.outcome
    bench.driver.close()
    bench.driver.join(LIMIT_S)


def test_an_allocation_stays_in_the_ledger_while_its_job_has_reruns(bench_of_reruns, command):
    bench, job = bench_of_reruns
    first = bench.provisioner.next()
    bench.provisioner.say(AllocationEnded(first))
    second = bench.provisioner.next()
    assert ("ended", first.id) not in bench.ledger  # killed now, the first result is still found
    bench.provisioner.say(AllocationEnded(second))
    ended(job)
    bench.driver.close()
    bench.driver.join(LIMIT_S)
    assert {i for event, i in bench.ledger if event == "ended"} == {first.id, second.id}


@pytest.fixture
def bench_of_reruns(tmp_path, command):
    bench = Bench(tmp_path, max_jobs=1)
    job = Job(command())
    bench.reruns["job0"] = 1
    bench.driver.add([job])
    return bench, job


def test_a_driver_that_leaves_cancels_nothing_and_its_ledger_stays_open(tmp_path, command):
    bench = Bench(tmp_path, max_jobs=1)
    jobs = [Job(command(number)) for number in range(2)]
    bench.driver.add(jobs)
    handle = bench.provisioner.next()
    bench.provisioner.say(StateChanged(handle, JobState.QUEUED, "Priority", native_id="4711"))
    assert bench.driver.settled.wait(LIMIT_S)
    while ("accepted", "4711") not in bench.ledger:
        assert bench.driver.is_alive()
    bench.driver.close(detach=True)
    bench.driver.join(LIMIT_S)
    assert bench.provisioner.cancelled == []
    assert [event for event, _ in bench.ledger] == ["submitted", "accepted"]
    assert [job.outcome.failure.outcome for job in jobs] == ["detached"] * 2
    assert "job 4711 is queued" in jobs[0].outcome.failure.text
    assert "not submitted yet" in jobs[1].outcome.failure.text
    assert [left.id for left in bench.driver.left] == [handle.id]


def test_an_adopted_allocation_gives_its_results_without_being_submitted(tmp_path, command):
    bench = Bench(tmp_path, max_jobs=1)
    job = Job(command())
    plan: Plan = plan_of([(job.spec, 0)], tmp_path, "")
    attempt = Attempt(plan.runs[0], 0, directory=plan.directory, adopted=True)
    bench.driver.adopt([Adopted(plan, "4711", {attempt.run.run_id: (job, attempt)})])
    while not bench.provisioner.adopted:
        assert bench.driver.is_alive()
    bench.provisioner.say(AllocationEnded(bench.provisioner.adopted[0]))
    ended(job)
    assert bench.provisioner.submitted.empty()
    bench.driver.close()
    bench.driver.join(LIMIT_S)
    assert bench.ledger == [("ended", plan.allocation_id)]


def test_what_is_not_surely_cancelled_stays_in_the_ledger(tmp_path, command):
    bench = Bench(tmp_path, max_jobs=1)
    bench.provisioner.silent = True
    job = Job(command())
    bench.driver.add([job])
    handle = bench.provisioner.next()
    bench.driver.close()
    bench.driver.join(LIMIT_S)
    assert ended(job).failure.outcome == "cancelled"
    assert [left.id for left in bench.driver.left] == [handle.id]
    assert [event for event, _ in bench.ledger] == ["submitted"]


@pytest.fixture
def half_wanted(tmp_path, command):
    """An adopted allocation of two runs of which this session's tests want the first."""
    bench = Bench(tmp_path, max_jobs=1)
    job = Job(command(0))
    plan = plan_of([(job.spec, 0), (command(1), 0)], tmp_path, "")
    first, second = plan.runs
    attempt = Attempt(first, 0, directory=plan.directory, adopted=True, shared=True)
    others = frozenset({second.run_id})
    bench.driver.adopt([Adopted(plan, "4711", {first.run_id: (job, attempt)}, others)])
    while not bench.provisioner.adopted:
        assert bench.driver.is_alive()
    return bench, job, bench.provisioner.adopted[0]


def test_what_nobody_wants_of_an_adopted_allocation_goes_on_and_stays_in_the_ledger(half_wanted):
    bench, job, handle = half_wanted
    say(bench, handle, job.attempts[0], "end", exit=[0])
    ended(job)
    bench.driver.close()
    bench.driver.join(LIMIT_S)
    assert bench.provisioner.cancelled == []
    assert bench.ledger == []
    assert [kept.id for kept in bench.driver.kept] == [handle.id]
    assert bench.concluded == [job.attempts[0].run.run_id]


def test_a_test_that_is_over_takes_nothing_from_others_that_may_come_later(half_wanted):
    bench, job, handle = half_wanted
    bench.driver.cancel([job], "its test is over")
    ended(job)
    bench.driver.close()
    bench.driver.join(LIMIT_S)
    assert bench.provisioner.cancelled == []
    assert bench.provisioner.skipped == [job.attempts[0].run.run_id]
    assert [kept.id for kept in bench.driver.kept] == [handle.id]


def test_a_refused_rerun_does_not_lose_the_first_result(tmp_path, command):
    bench = Bench(tmp_path, max_jobs=1)
    job = Job(command())
    bench.reruns["job0"] = 1
    bench.driver.add([job])
    first = bench.provisioner.next()
    bench.provisioner.refuse = "QOSMaxSubmitJobPerUserLimit"
    bench.provisioner.say(AllocationEnded(first))
    assert ended(job).failure is None  # it was judged by what there is
    assert job.refused is not None
    assert "QOSMaxSubmitJobPerUserLimit" in str(job.refused)
    assert [attempt.number for attempt in job.attempts] == [0, 1]
    bench.driver.close()
    bench.driver.join(LIMIT_S)
    assert sorted(event for event, _ in bench.ledger) == ["ended"] * 2 + ["submitted"] * 2


def test_a_run_that_never_began_is_not_blamed_for_what_ended_its_allocation(packed, command):
    jobs = [Job(command(number)) for number in range(2)]
    packed.driver.add(jobs)
    handle = packed.provisioner.next()
    say(packed, handle, jobs[0].attempts[0], "started", protocol=1, payload_sha256="")
    packed.provisioner.say(AllocationEnded(handle, RunFailure("out_of_memory", "step 0 ran out of memory")))
    ended(jobs[0])
    assert jobs[0].attempts[0].failure.outcome == "out_of_memory"
    second = packed.provisioner.next()
    assert jobs[1].lost[0].failure.outcome == "not_begun"
    packed.provisioner.say(AllocationEnded(second))
    ended(jobs[1])


def test_a_session_whose_ledger_was_taken_over_touches_nothing_more(tmp_path, command):
    bench = Bench(tmp_path, max_jobs=1)
    job = Job(command())
    bench.driver.add([job])
    handle = bench.provisioner.next()
    bench.ours = False
    bench.provisioner.say(StateChanged(handle, JobState.QUEUED, "Priority"))
    assert ended(job).failure.outcome == "channel_broken"
    assert "another session took these jobs over" in job.outcome.failure.text
    bench.driver.close()
    bench.driver.join(LIMIT_S)
    assert bench.provisioner.cancelled == []
    assert [event for event, _ in bench.ledger] == ["submitted"]


def test_an_end_of_which_nobody_is_sure_stays_in_the_ledger(tmp_path, command):
    bench = Bench(tmp_path, max_jobs=1)
    job = Job(command())
    bench.driver.add([job])
    handle = bench.provisioner.next()
    bench.provisioner.say(
        AllocationEnded(handle, ProvisionError("never_scheduled", "no answer"), unsure=True)
    )
    ended(job)
    bench.driver.close()
    bench.driver.join(LIMIT_S)
    assert [event for event, _ in bench.ledger] == ["submitted"]
    assert [left.id for left in bench.driver.left] == [handle.id]


def test_what_was_left_without_an_answer_is_not_called_queued(tmp_path, command):
    bench = Bench(tmp_path, max_jobs=1)
    job = Job(command())
    bench.driver.add([job])
    handle = bench.provisioner.next()
    bench.provisioner.say(StateChanged(handle, JobState.QUEUED, "not submitted yet: sbatch does not answer"))
    while not job.reason:
        assert bench.driver.is_alive()
    bench.driver.close(detach=True)
    bench.driver.join(LIMIT_S)
    assert job.outcome.failure.text.startswith("not submitted yet: sbatch does not answer; a later session")
