"""Files and answers in orders that a real cluster shows once in a year: no job is lost, made twice or cancelled wrongly."""

from __future__ import annotations

import pytest
from scripted_slurm import World

from pytest_mlhpc.provision.scheduler import allocation
from pytest_mlhpc.provision.scheduler.allocation import (
    FILES_LAG_S,
    OLD_AFTER_S,
    READ_INTERVAL_OLD_S,
    READ_INTERVAL_S,
    UNKNOWN_LIMIT_S,
)
from pytest_mlhpc.provision.scheduler.client import SchedulerState
from pytest_mlhpc.provision.scheduler.poll import LOST_BATCH_S, MAX_POLL_S, MIN_POLL_S


def test_lines_that_come_while_slurm_is_asked_count(world):
    plan = world.started(code=0)
    world.slurm.on["jobs"] = lambda: (
        world.write(plan, "started", "end", code=0),
        world.slurm.set("101", state=SchedulerState.COMPLETED),
    )
    (end,) = world.follow(20.0)
    assert end.error is None


@pytest.mark.parametrize(
    ("state", "seconds", "text"),
    [
        (
            SchedulerState.RESV_DEL_HOLD,
            60.0,
            "job 101 is RESV_DEL_HOLD: None; waiting does not help, so it was cancelled",
        ),
        (SchedulerState.REQUEUE_FED, 300.0, "job 101 is REQUEUE_FED: None; cancelled after"),
        (SchedulerState.UNKNOWN, 300.0, "job 101 is UNKNOWN: None; cancelled after"),
    ],
)
def test_a_job_that_neither_waits_nor_runs_as_we_know_it_is_never_called_running(
    tmp_path, monkeypatch, state, seconds, text
):
    world = World(tmp_path, monkeypatch, pending_limit=100.0)
    world.submit()
    world.slurm.set("101", state=state, reason="None")
    (end,) = world.follow(seconds)
    assert end.error.outcome == "never_scheduled"
    assert text in str(end.error)
    assert "running" not in world.states()


def test_lines_that_lag_behind_the_end_of_the_batch_are_waited_for(world):
    plan = world.started(code=0, state=SchedulerState.COMPLETED)
    assert world.follow(FILES_LAG_S - 5.0) == []
    world.write(plan, "started", "end", code=0)
    (end,) = world.follow(10.0)
    assert end.error is None


@pytest.mark.parametrize(
    ("code", "state", "seconds", "text"),
    [
        pytest.param(
            0, SchedulerState.COMPLETED, FILES_LAG_S + 10.0, "the results file lacks the end of its runs", id="lines that never come"
        ),
        pytest.param(143, SchedulerState.CANCELLED, 10.0, "cancelled_outside: ", id="a batch that was told to end is not waited for"),
    ],
)  # fmt: skip
def test_an_end_without_lines_is_named(world, code, state, seconds, text):
    world.started(code=code, state=state)
    (end,) = world.follow(seconds)
    assert text in str(end.error)


def test_one_answer_without_a_running_job_does_not_end_it_though_a_run_has_failed(world):
    plan = world.started("failed", state=SchedulerState.RUNNING)
    known = dict(world.slurm.queued)
    world.slurm.on["jobs"] = world.slurm.queued.clear
    assert world.follow(UNKNOWN_LIMIT_S / 2) == []
    world.slurm.on.clear()
    world.slurm.queued.update(known)
    world.write(plan, "started", "failed", "end", code=0)
    (end,) = world.follow(20.0)
    assert end.error is None


def test_a_job_that_slurm_has_not_known_for_a_minute_is_lost(world):
    world.started("failed")
    world.slurm.queued.clear()
    (end,) = world.follow(UNKNOWN_LIMIT_S + 30.0)
    assert "Slurm knows nothing of the job any more" in str(end.error)


def test_a_job_that_leaves_the_queue_while_it_waits_was_cancelled_from_outside(world):
    world.submit()
    world.slurm.set("101", reason="state qw")
    world.follow(10.0)
    world.slurm.queued.clear()
    (end,) = world.follow(UNKNOWN_LIMIT_S + MAX_POLL_S)
    assert str(end.error) == (
        "cancelled_outside: Slurm job 101 left the queue while it waited (state qw): it was cancelled from outside"
    )


def test_a_job_whose_batch_has_no_heartbeat_is_lost_where_nobody_else_tells_of_its_nodes(world):
    world.started(state=SchedulerState.RUNNING, reason="state r")
    assert world.follow(LOST_BATCH_S - 10.0) == []
    (end,) = world.follow(MIN_POLL_S + 20.0)
    assert end.error.outcome == "node_failure"
    assert "Slurm job 101 runs (state r), but its batch has had no heartbeat for 30" in str(end.error)
    assert world.slurm.cancelled == ["101"]


def test_a_job_whose_batch_has_no_heartbeat_is_waited_for_where_its_nodes_are_known(world):
    world.started(state=SchedulerState.RUNNING, nodes=("n1",))
    assert world.follow(2 * LOST_BATCH_S) == []


def test_one_answer_from_before_the_batch_began_does_not_requeue_a_running_job(world):
    plan = world.submit()

    def stale():
        world.write(plan, "started", "failed")
        world.slurm.on["jobs"] = lambda: world.slurm.set("101", state=SchedulerState.RUNNING)

    world.slurm.on["jobs"] = stale
    assert (world.follow(60.0), world.slurm.cancelled) == ([], [])


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_job_that_waits_again_after_it_had_begun_was_requeued(world, restarts):
    world.started(restarts=restarts)
    (end,) = world.follow(60.0)
    assert str(end.error).startswith("preempted: Slurm job 101 was requeued after it had begun")
    assert world.slurm.cancelled == ["101"]


def test_of_two_jobs_of_one_submission_the_one_that_runs_is_followed_and_the_other_cancelled(world):
    world.slurm.on["submit"] = lambda: world.slurm.add("mlhpc-a")  # it gets through, but nobody hears of it
    world.slurm.hangs = {"submit"}
    plan = world.submit()
    (late,) = world.slurm.queued
    found = world.slurm.queued.pop(late)  # Slurm has not dealt with it yet when it is asked
    world.slurm.hangs, world.slurm.on = set(), {}
    world.follow(10.0)
    (second,) = world.slurm.queued
    world.slurm.queued[late] = found
    world.slurm.set(late, state=SchedulerState.RUNNING)
    world.write(plan, "started", job_id=late)
    world.follow(5.0)
    assert world.slurm.cancelled == [second]
    world.write(plan, "started", "end", job_id=late, code=0)
    (end,) = world.follow(5.0)
    assert (end.error, end.handle.native_id) == (None, late)


def test_whoever_is_woken_looks_at_all_that_there_is(world):
    plan = world.started()
    world.follow(0.3)
    world.write(plan, "started", "end", code=0)
    world.provisioner.wake()
    world.events += world.provisioner.events(world.handles, 0.0)
    assert [end.error for end in world.ends] == [None]


def test_a_second_job_that_comes_late_is_cancelled_at_the_end(world):
    world.started("end", code=0)
    world.follow(5.0)
    world.slurm.set("101", state=SchedulerState.COMPLETED)
    late = world.slurm.add("mlhpc-a")
    world.provisioner.close()
    assert world.slurm.cancelled == [late.id]


def test_another_job_with_the_same_id_is_left_alone_at_the_end(world):
    plan = world.adopt(native_id="77")
    world.slurm.queued["77"] = world.slurm.add("my-thesis", SchedulerState.RUNNING)
    world.write(plan, "started", "end", job_id="77", code=0)
    (end,) = world.follow(5.0)
    world.provisioner.close()
    assert (end.error, world.slurm.cancelled) == (None, [])


def test_an_adopted_job_is_cancelled_by_its_name(world):
    job = world.slurm.add("mlhpc-a", SchedulerState.RUNNING)
    world.adopt(native_id=job.id)
    assert (world.provisioner.cancel(world.handles), world.slurm.cancelled) == ([], [job.id])


def test_many_jobs_are_cancelled_by_as_few_calls_as_one(world):
    for number in range(20):
        world.submit(f"job{number}")
    world.slurm.calls.clear()
    assert world.provisioner.cancel(world.handles) == []
    assert (world.slurm.calls, len(world.slurm.cancelled)) == (["jobs", "cancel", "jobs"], 20)


@pytest.mark.parametrize(("age", "pause"), [(0.0, READ_INTERVAL_S), (OLD_AFTER_S + 5.0, READ_INTERVAL_OLD_S)])
def test_a_look_at_a_running_batch_opens_one_file_and_there_are_few(world, monkeypatch, age, pause):
    world.started(state=SchedulerState.RUNNING, nodes=("n1",))
    world.follow(5.0 + age)
    opened = []
    real = allocation.os.open
    with monkeypatch.context() as patch:
        patch.setattr(allocation.os, "open", lambda path, *more: opened.append(path) or real(path, *more))
        patch.setattr(allocation.Path, "open", lambda path, *_: pytest.fail(f"opens {path}"))
        world.follow(100.0)
    assert 0.7 * 100.0 / pause <= len(opened) <= 100.0 / pause + 1
