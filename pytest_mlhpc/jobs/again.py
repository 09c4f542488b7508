"""Whether a run is made once more, and where: pure functions of what became of it."""

from __future__ import annotations

from pytest_mlhpc.errors import MlhpcError, ProvisionError, RunFailure
from pytest_mlhpc.jobs.attempt import Attempt
from pytest_mlhpc.jobs.job import Job
from pytest_mlhpc.results.failures import Failure

#: Failures that say nothing of the run: it is run once more, on other nodes where nodes failed.
TAKEN = frozenset({"node_failure", "preempted", "not_begun"})


def seen_nodes(job: Job) -> set[str]:
    """Return the nodes to avoid for re-runs: those that ran it, as long as the partition has enough others."""
    nodes = {node for attempt in job.attempts for node in attempt.nodes}
    return nodes if len(nodes) + job.spec.nodes <= job.spec.target.partition.nodes.max else set()


def failed_nodes(job: Job, attempt: Attempt) -> set[str]:
    """Return the nodes whose fault the end of *attempt* was, to be avoided.

    A run of several nodes avoids none where the partition may not have enough others: it would wait for ever.
    """
    failure = attempt.failure
    if failure is None or (job.spec.nodes > 1 and not _others(job, failure)):
        return set()
    return set(failure.nodes)


def was_taken(job: Job, attempt: Attempt) -> bool:
    """Whether what became of *attempt* says nothing of the run: it may be run once more."""
    failure = attempt.failure
    if failure is None:
        return False
    if attempt.adopted and failure.outcome == "cancelled":
        return True  # an earlier session left it out, as its test did not want it
    if failure.outcome == "unfit_nodes":
        return not job.spec.node and _others(job, failure)
    on_one_node = bool(job.spec.node) and failure.outcome == "node_failure"
    return failure.outcome in TAKEN and not on_one_node


def _others(job: Job, failure: Failure) -> bool:
    """Whether the partition has enough nodes besides those that vetting has blamed, by name."""
    away = job.excluded.union(failure.nodes)
    return bool(failure.nodes) and len(away) + job.spec.nodes <= job.spec.target.partition.nodes.max


def error_of(attempt: Attempt, error: MlhpcError | None) -> MlhpcError | None:
    """Return what the end of an allocation means for *attempt*: what ended the others says nothing of a run that never began."""
    if attempt.shared and not attempt.heard and isinstance(error, RunFailure):
        return ProvisionError("not_begun", f"the job that it shared ended before it began: {error}")
    return error
