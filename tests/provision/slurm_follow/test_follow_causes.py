"""From Slurm's states to our names: what is told, who is to blame, what to do."""

from __future__ import annotations

import pytest

from pytest_mlhpc.errors import InfrastructureError, NodeFault, RunFailure
from pytest_mlhpc.provision.slurm.causes import (
    HOPELESS,
    amended,
    cause_of,
    damaged,
    hint_of,
    hopeless,
    never_scheduled,
    requeued,
    unavailable,
)
from pytest_mlhpc.provision.slurm.client import Job, Node, State, Step


def job(state: State, **other) -> Job:
    return Job(
        **{"id": "7", "name": "mlhpc-x", "user": "root", "state": state, "nodes": ("node1", "node2"), **other}
    )


DOWN = Node("node2", "down", frozenset({"not_responding"}), "Not responding")
FINE = Node("node1", "idle")
OOM = Step("0", "run-1", State.OUT_OF_MEMORY, nodes=("node2",))


@pytest.mark.parametrize(
    ("state", "outcome", "text"),
    [
        (State.PREEMPTED, "preempted", "another job took its nodes"),
        (State.TIMEOUT, "time_limit", "the allocation reached its time limit"),
        (State.DEADLINE, "time_limit", "the allocation reached its time limit"),
        (State.OUT_OF_MEMORY, "out_of_memory", "a step ran out of memory"),
        (State.CANCELLED, "cancelled_outside", "somebody else cancelled it"),
        (State.NODE_FAIL, "node_failure", "on node1, node2, which respond again"),
        (State.BOOT_FAIL, "node_failure", "on node1, node2, which respond again"),
        (State.COMPLETED, "channel_broken", "the results file lacks the end of its runs"),
        (State.FAILED, "launch_failed", "with exit code 0 before its runs had ended"),
        (State.UNKNOWN, "launch_failed", "with exit code 0 before its runs had ended"),
    ],
)
def test_every_end_of_a_job_has_its_outcome_and_names_the_job_with_slurms_word(state, outcome, text):
    error = cause_of(job(state), (), (FINE,), None, "")
    assert isinstance(error, (InfrastructureError, RunFailure))
    assert error.outcome == outcome
    assert f"Slurm job 7 {state.value}" in str(error)
    assert text in str(error)


@pytest.mark.parametrize("state", list(State))
def test_no_state_is_without_an_error(state):
    assert str(cause_of(job(state), (), (), None, ""))


def test_a_node_that_is_down_is_blamed_whatever_else_the_job_says():
    error = cause_of(job(State.FAILED, exit_code=1), (OOM,), (FINE, DOWN), 143, "")
    assert isinstance(error, NodeFault)
    assert error.nodes == ("node2",)
    assert str(error) == "node_failure: Slurm job 7 FAILED: node node2 is down+not_responding: Not responding"


def test_a_step_out_of_memory_is_told_with_its_node_though_the_job_only_failed():
    error = cause_of(job(State.FAILED, exit_code=1), (OOM,), (), 1, "Killed")
    assert str(error).startswith("out_of_memory: Slurm job 7 FAILED: step 0 ran out of memory on node2")
    assert "its last lines:\nKilled" in str(error)


@pytest.mark.parametrize(("batch", "exit_code"), [(74, 0), (None, 74)])
def test_a_batch_that_could_not_write_is_a_full_disk(batch, exit_code):
    error = cause_of(
        job(State.FAILED, exit_code=exit_code), (), (), batch, "cannot write /x: No space left on device"
    )
    assert str(error).startswith("disk_full: Slurm job 7 FAILED: the batch could not write its results")
    assert "No space left on device" in str(error)


def test_a_requeued_job_was_taken_from_us():
    error = cause_of(job(State.FAILED, exit_code=75, restarts=1), (), (), 143, "")
    assert str(error) == str(requeued(job(State.FAILED)))
    assert str(error).startswith("preempted: Slurm job 7 was requeued after it had begun")


def test_a_job_that_slurm_forgot_is_told_with_its_last_words():
    assert str(cause_of(None, (), (), None, "bye")).endswith(
        "Slurm knows nothing of the job any more; its last lines:\nbye"
    )


def test_a_signal_is_told_as_such():
    assert "with signal 9 before" in str(cause_of(job(State.FAILED, signal=9), (), (), None, ""))


def test_payloads_that_do_not_fit_are_told_as_such():
    error = cause_of(
        job(State.FAILED, exit_code=2), (), (), 2, "protocol_mismatch: the plan speaks protocol 9"
    )
    assert str(error).startswith("protocol_mismatch:")


def test_a_damaged_file_is_nobodys_result():
    assert str(damaged("the results file x was cut")).startswith(
        "channel_broken: the results file x was cut:"
    )


@pytest.mark.parametrize("reason", sorted(HOPELESS))
def test_reasons_that_no_waiting_ends_are_known_by_their_first_word(reason):
    assert hopeless(reason)
    assert hopeless(f"{reason}: more words")


@pytest.mark.parametrize(
    "reason", ["", "Priority", "Resources", "JobHeldUser", "ReqNodeNotAvail, UnavailableNodes:n1"]
)
def test_all_other_reasons_may_end(reason):
    assert not hopeless(reason)


def test_a_hopeless_job_is_said_to_be():
    error = never_scheduled(job(State.PENDING, reason="PartitionNodeLimit"), 30, 3600)
    assert str(error) == (
        "never_scheduled: job 7 is pending: PartitionNodeLimit; waiting does not help, so it was cancelled"
    )


def test_a_job_that_waited_too_long_names_reason_nodes_limit_and_what_to_do():
    waits = job(State.PENDING, reason="ReqNodeNotAvail, UnavailableNodes:node2")
    error = never_scheduled(waits, 61.2, 60, (Node("node2", "idle", frozenset({"drain"}), "fan"),))
    assert str(error) == (
        "never_scheduled: job 7 is pending: ReqNodeNotAvail, UnavailableNodes:node2 (node node2 is idle+drain: fan); "
        "cancelled after 61 s, the pending limit is 60 s (slurm: pending_limit); nodes that it must have do not serve: "
        "see nodelist, reservation, maintenance"
    )


def test_a_reason_that_is_not_given_or_not_known_is_told_as_it_is():
    assert "is pending: no reason given; cancelled" in str(never_scheduled(job(State.PENDING), 9, 8))
    assert hint_of("SomethingNew") == ""


@pytest.mark.parametrize(
    ("reason", "nodes"),
    [
        ("ReqNodeNotAvail, UnavailableNodes:node[1-2,4]", "node[1-2,4]"),
        ("(ReqNodeNotAvail, UnavailableNodes:node4)", "node4"),
        ("ReqNodeNotAvail, UnavailableNodes:", ""),
        ("Resources", ""),
    ],
)
def test_unavailable_nodes_are_read_from_the_reason(reason, nodes):
    assert unavailable(reason) == nodes


def test_a_run_seen_to_fail_on_a_dead_node_is_the_nodes_fault():
    assert amended("worker_exit", "rank 1 ended", (), (FINE, DOWN)) == (
        "node_failure",
        "node node2 is down+not_responding: Not responding; seen as worker_exit: rank 1 ended",
        ("node2",),
    )


def test_a_run_killed_by_a_memory_limit_is_out_of_memory():
    outcome, text, nodes = amended("worker_killed", "rank 1 was killed", (OOM,), (FINE,))
    assert (outcome, nodes) == ("out_of_memory", ())
    assert text == "step 0 ran out of memory on node2; seen as worker_killed: rank 1 was killed"


def test_a_run_that_failed_by_itself_stays_as_it_is():
    assert amended("worker_exit", "exit code 7", (), (FINE,)) == ("worker_exit", "exit code 7", ())
