"""A Slurm that does not answer costs one call's time limit now and then, whatever the number of jobs, and loses none."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import Mock, call

import pytest

from pytest_mlhpc.jobs.provisioner import StateChanged
from pytest_mlhpc.jobs.spec import JobState
from pytest_mlhpc.provision.scheduler.client import (
    UNDER_WAY_S,
    PartitionLimits,
    SchedulerRefused,
    SchedulerState,
    SchedulerUnavailable,
    SchedulerUnusable,
)
from pytest_mlhpc.provision.scheduler.poll import MAX_RETRY_S, MIN_RETRY_S, Backoff
from pytest_mlhpc.provision.scheduler.submit import SUBMIT_LIMIT_S, UNANSWERED_LIMIT_S

NAMES = [f"job{number}" for number in range(20)]


@pytest.fixture
def many(world):
    """Twenty jobs are queued."""
    for name in NAMES:
        world.submit(name)
    return world


@pytest.fixture
def silent(world):
    """Twenty jobs were submitted, and Slurm answers nothing."""
    world.slurm.hangs = {"all"}
    world.before = world.clock.now
    for name in NAMES:
        world.submit(name)
    return world


@pytest.fixture
def hopeless(world):
    """A job is queued that will never start."""
    world.submit()
    world.slurm.set("101", reason="PartitionNodeLimit")
    return world


def test_of_many_submissions_only_the_first_is_tried_in_vain(silent):
    assert silent.slurm.calls == ["submit"]
    assert silent.clock.now - silent.before == silent.slurm.limit_s
    silent.follow(1.0)
    assert silent.reasons("job19")[:1] == ["not submitted yet: submit: no answer within 30 s"]


def new_calls(world, act):
    """Return the calls of Slurm that *act* leads to."""
    before = len(world.slurm.calls)
    act()
    return world.slurm.calls[before:]


def test_a_round_makes_one_call_in_vain_however_many_jobs_wait(silent):
    silent.clock.now += MIN_RETRY_S
    began = silent.clock.now
    assert len(new_calls(silent, lambda: silent.provisioner.events(silent.handles, 5.0))) == 1
    assert silent.clock.now - began <= silent.slurm.limit_s + 5.0


def test_queries_and_submissions_wait_for_each_other(world):
    world.submit("taken")
    world.slurm.hangs = {"all"}
    world.follow(60.0)
    assert new_calls(world, lambda: world.submit("new")) == []


def test_whoever_wakes_it_waits_for_no_call(silent):
    silent.clock.now += MAX_RETRY_S
    silent.provisioner.wake()
    assert new_calls(silent, lambda: silent.provisioner.events(silent.handles, 5.0)) == []


def test_a_wake_while_slurm_is_asked_ends_the_round(world):
    world.slurm.hangs = {"all"}
    for name in NAMES[:3]:
        world.submit(name)
    world.clock.now += MAX_RETRY_S
    world.slurm.hangs, world.slurm.on = set(), {"submit": world.provisioner.wake}
    calls = new_calls(world, lambda: world.provisioner.events(world.handles, 5.0))
    assert calls.count("submit") == 1


def test_a_wake_between_two_looks_at_its_flag_is_not_lost(world):
    world.submit()
    flag = world.provisioner._awake
    asked = flag.is_set

    def then_woken():
        answer = asked()
        flag.is_set = asked
        flag.set()
        return answer

    flag.is_set = then_woken
    began = world.clock.now
    world.provisioner.events(world.handles, 500.0)
    assert world.clock.now - began < 5.0


def test_when_slurm_answers_again_everything_is_submitted_once(silent):
    silent.follow(200.0)
    silent.slurm.hangs = set()
    assert silent.follow(MAX_RETRY_S + 10.0) == []
    submitted = [job.name.removeprefix("mlhpc-") for job in silent.slurm.queued.values()]
    changes = silent.all_of(StateChanged)
    accepted = [one.handle.id for one in changes if one.state is JobState.QUEUED and one.native_id]
    assert sorted(submitted) == sorted(accepted) == sorted(NAMES)


@pytest.mark.parametrize("name", ["job.sh", "plan.json"])
def test_what_others_could_have_changed_while_slurm_was_silent_is_not_submitted(world, name):
    world.slurm.hangs = {"all"}
    changed = Path(world.submit().directory) / name
    changed.chmod(0o660)
    world.slurm.hangs = set()
    (end,) = world.follow(MAX_RETRY_S + 10.0)
    assert str(end.error).startswith(
        f"unsafe_directory: {changed}: group {os.getgid()} may change it (mode 0660)"
    )
    assert world.slurm.queued == {}


def test_a_submission_that_may_have_got_through_is_given_up_but_not_forgotten(world):
    world.slurm.hangs = {"all"}
    world.submit()
    (end,) = world.follow(SUBMIT_LIMIT_S + 200.0)
    assert str(end.error).startswith("never_scheduled: Slurm did not take the job: ")
    assert end.unsure


def test_a_submission_that_could_not_even_be_started_has_left_nothing(world):
    def unusable():
        raise SchedulerUnusable("sbatch: the command 'sbatch' is not on PATH")

    world.slurm.on["submit"] = unusable
    world.submit()
    assert world.provisioner.cancel(world.handles) == []


def test_cancelling_many_jobs_without_an_answer_takes_a_minute_and_is_not_sure(many):
    many.slurm.hangs = {"all"}
    began = many.clock.now
    assert len(many.provisioner.cancel(many.handles)) == len(NAMES)
    assert many.clock.now - began <= UNANSWERED_LIMIT_S + 1.0
    assert len(many.provisioner.cancel(many.handles)) == len(NAMES), "asked again it is not sure either"
    many.slurm.hangs = set()
    assert many.provisioner.cancel(many.handles) == []
    assert {job.state for job in many.slurm.queued.values()} == {SchedulerState.CANCELLED}


def test_a_slurm_that_has_hung_just_now_is_told_to_cancel_once(world):
    world.slurm.hangs = {"all"}
    world.submit()
    assert len(new_calls(world, lambda: world.provisioner.cancel(world.handles))) == 1
    assert world.provisioner.cancel(world.handles) == world.handles


def test_a_submission_without_answer_that_was_found_is_sure_again(world):
    world.slurm.on["submit"] = lambda: world.slurm.add("mlhpc-a")
    world.slurm.hangs = {"submit"}
    world.submit()
    world.follow(MIN_RETRY_S + 5.0)
    assert (world.slurm.calls.count("submit"), world.provisioner.cancel(world.handles)) == (1, [])
    assert world.slurm.cancelled == ["101"]


def test_a_slurm_that_falls_silent_while_it_is_asked_why_does_not_make_us_guess(world):
    world.started(state=SchedulerState.NODE_FAIL, nodes=("n1",))
    world.slurm.steps = lambda _ids: world.slurm.jobs(ids=("101",)) and {}
    world.slurm.on["jobs"] = lambda: world.slurm.hangs.symmetric_difference_update({"jobs"})
    world.slurm.hangs = {"jobs"}  # every second query gets no answer: the one for steps
    assert world.follow(60.0) == []
    world.slurm.on, world.slurm.hangs = {}, set()
    (end,) = world.follow(MAX_RETRY_S + 10.0)
    assert str(end.error).startswith("node_failure: ")


def test_a_cancelled_job_whose_submission_got_no_answer_is_unsure_for_a_while(world):
    world.slurm.hangs = {"submit"}
    world.submit()
    assert [handle.id for handle in world.provisioner.cancel(world.handles)] == ["a"]
    world.clock.now += UNDER_WAY_S
    assert world.provisioner.cancel(world.handles) == []


def test_jobs_that_are_given_up_are_cancelled_by_one_call_and_confirmed_later(many):
    for job in list(many.slurm.queued):
        many.slurm.set(job, reason="PartitionNodeLimit")
    assert [end.unsure for end in many.follow(120.0)] == [False] * len(NAMES)
    assert many.slurm.calls.count("cancel") == 1


def test_a_job_that_is_given_up_ends_only_when_slurm_has_cancelled_it(hopeless):
    hopeless.slurm.hangs = {"cancel"}
    assert hopeless.follow(300.0) == []
    hopeless.slurm.hangs = set()
    (end,) = hopeless.follow(MAX_RETRY_S + 20.0)
    assert str(end.error).startswith("never_scheduled: job 101 is pending: PartitionNodeLimit")
    assert hopeless.slurm.cancelled == ["101"]


def test_a_job_that_does_not_go_is_not_waited_for_endlessly_and_not_forgotten(hopeless):
    hopeless.slurm.cancel = hopeless.slurm.cancelled.extend
    (end,) = hopeless.follow(300.0)
    assert end.unsure


def test_each_kind_of_call_has_its_own_count_of_failures(world):
    backoff, busy = Backoff(world.clock.monotonic), SchedulerUnavailable("busy")
    for _ in range(3):
        backoff.failed("submit", busy)
    backoff.answered("ask")
    world.clock.now += 2 * MIN_RETRY_S
    assert (backoff.waits() > 0, backoff.trouble) == (True, "busy")
    backoff.answered("submit")
    world.clock.now += 2 * MIN_RETRY_S
    assert not backoff.waits()
    backoff.failed("submit", busy)
    world.clock.now += MIN_RETRY_S
    assert not backoff.waits()


def test_limits_that_slurm_did_not_tell_are_asked_for_again_but_not_for_every_job(world):
    limits = PartitionLimits("cpu", up=True, max_time_s=60.0)
    world.slurm.partition = Mock(side_effect=[SchedulerUnavailable("no answer"), limits])
    assert [world.provisioner.longest() for _ in range(5)] == [None] * 5
    world.clock.now += MIN_RETRY_S
    assert [world.provisioner.longest() for _ in range(5)] == [60.0] * 5
    assert world.slurm.partition.mock_calls == [call("cpu"), call("cpu")]


def test_a_question_that_slurm_refuses_keeps_nobody_waiting(world):
    world.slurm.nodes = Mock(side_effect=SchedulerRefused("no such node"))
    world.started("failed", state=SchedulerState.RUNNING, nodes=("n1",))
    world.follow(20.0)
    world.submit("b")
    assert world.slurm.calls.count("submit") == 2


@pytest.mark.parametrize("count", [1, 2])
def test_slurm_is_always_asked_for_our_own_jobs_alone(world, count):
    for name in NAMES[:count]:
        world.submit(name)
    world.follow(20.0)
    world.provisioner.cancel(world.handles)
    world.provisioner.close()
    (user,) = world.slurm.users
    assert user
