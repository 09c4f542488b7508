"""From Slurm's states to our outcomes: what is reported, which node failed, what to do."""

from __future__ import annotations

import pytest

from pytest_mlhpc.errors import InfrastructureError, NodeFault, RunFailure
from pytest_mlhpc.provision.scheduler import causes
from pytest_mlhpc.provision.scheduler.client import JobStep, SchedulerJob, SchedulerNode, SchedulerState


def job(state=SchedulerState.FAILED, **changes):
    return SchedulerJob("7", "mlhpc-x", "root", state, **{"nodes": ("node1", "node2"), **changes})


DOWN = SchedulerNode("node2", "down", frozenset({"not_responding"}), "Not responding")
FINE = SchedulerNode("node1", "idle")
OOM = JobStep("0", "run-1", SchedulerState.OUT_OF_MEMORY, nodes=("node2",))


@pytest.mark.parametrize(
    ("state", "outcome", "text"),
    [
        (SchedulerState.PREEMPTED, "preempted", "another job took its nodes"),
        (SchedulerState.TIMEOUT, "time_limit", "the allocation reached its time limit"),
        (SchedulerState.DEADLINE, "time_limit", "the allocation reached its time limit"),
        (SchedulerState.OUT_OF_MEMORY, "out_of_memory", "a step ran out of memory"),
        (SchedulerState.CANCELLED, "cancelled_outside", "it was cancelled from outside"),
        (SchedulerState.NODE_FAIL, "node_failure", "on node1, node2, which respond again"),
        (SchedulerState.BOOT_FAIL, "node_failure", "on node1, node2, which respond again"),
        (SchedulerState.COMPLETED, "channel_broken", "the results file lacks the end of its runs"),
        (SchedulerState.FAILED, "launch_failed", "with exit code 0 before its runs had ended"),
        (SchedulerState.UNKNOWN, "launch_failed", "with exit code 0 before its runs had ended"),
    ],
)
def test_every_end_of_a_job_has_its_outcome_and_names_the_job_with_slurms_word(state, outcome, text):
    error = causes.cause_of(job(state), (), (FINE,), None, "")
    assert isinstance(error, (InfrastructureError, RunFailure))
    assert error.outcome == outcome
    assert f"Slurm job 7 {state.value}" in str(error)
    assert text in str(error)


@pytest.mark.parametrize("state", list(SchedulerState))
def test_no_state_is_without_an_error(state):
    assert str(causes.cause_of(job(state), (), (), None, ""))


def test_a_node_that_is_down_is_blamed_whatever_else_the_job_says():
    error = causes.cause_of(job(exit_code=1), (OOM,), (FINE, DOWN), 143, "")
    assert (type(error), error.nodes) == (NodeFault, ("node2",))
    assert str(error) == "node_failure: Slurm job 7 FAILED: node node2 is down+not_responding: Not responding"


FULL = "cannot write /x: No space left on device"


@pytest.mark.parametrize(
    ("ended", "known", "start", "more"),
    [
        pytest.param(
            job(exit_code=1), ((OOM,), 1, "Killed"), "out_of_memory: Slurm job 7 FAILED: step 0 ran out of memory on node2",
            "its last lines:\nKilled", id="a step out of memory, though the job only failed",
        ),
        pytest.param(
            job(), ((), 74, FULL), "disk_full: Slurm job 7 FAILED: the batch could not write its results", "No space left",
            id="a batch that could not write",
        ),
        pytest.param(
            job(exit_code=74), ((), None, FULL), "disk_full: Slurm job 7 FAILED: the batch could not write its results",
            "No space left on device", id="a batch that could not even write its exit code",
        ),
        pytest.param(
            job(exit_code=78), ((), None, "mlhpc: node1: /x.zip belongs to another user"),
            "unsafe_directory: Slurm job 7 FAILED", "belongs to another user", id="files of another user",
        ),
        pytest.param(
            job(), ((), 74, "cannot write /x: Permission denied"), "not_writable: Slurm job 7 FAILED: the batch could not write",
            "Permission denied", id="a batch that may not write",
        ),
        pytest.param(
            job(exit_code=75, restarts=1), ((), 143, ""), "preempted: Slurm job 7 was requeued after it had begun",
            str(causes.requeued_error(job())), id="a requeued job",
        ),
        pytest.param(
            None, ((), None, "bye"), "", "Slurm knows nothing of the job any more; its last lines:\nbye",
            id="a job that Slurm forgot",
        ),
        pytest.param(job(signal=9), ((), None, ""), "", "with signal 9 before", id="a signal"),
        pytest.param(
            job(exit_code=2), ((), 2, "protocol_mismatch: the plan speaks protocol 9"), "protocol_mismatch:", "",
            id="payloads that do not fit",
        ),
    ],
)  # fmt: skip
def test_what_else_is_known_of_an_end_decides(ended, known, start, more):
    steps, batch, words = known
    error = str(causes.cause_of(ended, steps, (), batch, words))
    assert error.startswith(start)
    assert more in error


def test_a_damaged_file_is_nobodys_result():
    text = "channel_broken: the results file x was cut:"
    assert str(causes.damaged_error("the results file x was cut")).startswith(text)


@pytest.mark.parametrize("reason", sorted(causes.NEVER_STARTING))
def test_reasons_that_no_waiting_ends_are_known_by_their_first_word(reason):
    assert causes.never_starts(SchedulerState.PENDING, reason)
    assert causes.never_starts(SchedulerState.PENDING, f"{reason}: more words")


def test_a_job_whose_reservation_was_deleted_never_starts_whatever_its_reason():
    assert causes.never_starts(SchedulerState.RESV_DEL_HOLD, "None")


@pytest.mark.parametrize(
    "reason", ["", "Priority", "Resources", "JobHeldUser", "ReqNodeNotAvail, UnavailableNodes:n1"]
)
def test_all_other_reasons_may_end(reason):
    assert not causes.never_starts(SchedulerState.PENDING, reason)


@pytest.mark.parametrize(
    ("reason", "waited_s", "limit_s", "nodes", "text"),
    [
        pytest.param(
            "PartitionNodeLimit", 30, 3600, (),
            "never_scheduled: job 7 is pending: PartitionNodeLimit; waiting does not help, so it was cancelled",
            id="a hopeless job",
        ),
        pytest.param(
            "ReqNodeNotAvail, UnavailableNodes:node2", 61.2, 60, (SchedulerNode("node2", "idle", frozenset({"drain"}), "fan"),),
            "never_scheduled: job 7 is pending: ReqNodeNotAvail, UnavailableNodes:node2 (node node2 is idle+drain: fan); "
            "cancelled after 61 s, the pending limit is 60 s (slurm: pending_limit); nodes that it requires are out of service: "
            "see nodelist, reservation, maintenance",
            id="one that waited too long, with its nodes and what to do",
        ),
        pytest.param(
            "", 9, 8, (),
            "never_scheduled: job 7 is pending: no reason given; cancelled after 9 s, the pending limit is 8 s "
            "(slurm: pending_limit)",
            id="one without a reason",
        ),
    ],
)  # fmt: skip
def test_a_job_that_never_began_says_why(reason, waited_s, limit_s, nodes, text):
    assert (
        str(
            causes.never_scheduled_error(job(SchedulerState.PENDING, reason=reason), waited_s, limit_s, nodes)
        )
        == text
    )


def test_a_reason_that_is_not_known_has_no_hint():
    assert causes.hint_for("SomethingNew") == ""


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
    assert causes.unavailable_hosts(reason) == nodes


@pytest.mark.parametrize(
    ("outcome", "text", "steps", "nodes", "amendment"),
    [
        pytest.param(
            "worker_exit", "rank 1 ended", (), (FINE, DOWN),
            ("node_failure", "node node2 is down+not_responding: Not responding; seen as worker_exit: rank 1 ended", ("node2",)),
            id="a failure on a dead node is the node's",
        ),
        pytest.param(
            "worker_killed", "rank 1 was killed", (OOM,), (FINE,),
            ("out_of_memory", "step 0 ran out of memory on node2; seen as worker_killed: rank 1 was killed", ()),
            id="killed by a memory limit is out of memory",
        ),
        pytest.param(
            "worker_exit", "exit code 7", (), (FINE,), ("worker_exit", "exit code 7", ()),
            id="a failure of its own stays as it is",
        ),
    ],
)  # fmt: skip
def test_the_failure_of_a_run_is_amended_by_what_slurm_knows(outcome, text, steps, nodes, amendment):
    assert causes.amend_failure(outcome, text, steps, nodes) == amendment
