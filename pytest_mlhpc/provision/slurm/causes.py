"""Why an allocation or a run ended otherwise than planned: from Slurm's states to our names. No input or output."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pytest_mlhpc.errors import MlhpcError, NodeFault, ProtocolError, ProvisionError, RunFailure
from pytest_mlhpc.provision.slurm.client import Job, Node, State, Step

#: Exit codes that a job script ends with where the environment cannot be set up (``script.py``), and the batch itself
#: where it cannot write (EX_IOERR of sysexits.h).
BATCH_CANNOT_WRITE = 74

#: Pending reasons that no waiting ends: the request is beyond a limit, or nobody may grant it (squeue(1), "JOB REASON
#: CODES"; the words are the same from Slurm 22.05 to 26.05).
HOPELESS = frozenset(
    {
        "AccountNotAllowed", "AssocMaxCpuPerJobLimit", "AssocMaxNodePerJobLimit", "AssocMaxWallDurationPerJobLimit",
        "BadConstraints", "DependencyNeverSatisfied", "InvalidAccount", "InvalidQOS", "PartitionNodeLimit",
        "PartitionTimeLimit", "QOSMaxCpuPerJobLimit", "QOSMaxGRESPerJob", "QOSMaxNodePerJobLimit",
        "QOSMaxWallDurationPerJobLimit", "QOSNotAllowed", "ReservationDeleted",
    }
)  # fmt: skip

#: Failures of a run that a node or the kernel may have caused: worth asking Slurm before they are told.
DOUBTFUL = frozenset(
    {
        "worker_exit", "worker_killed", "no_result", "too_few_ranks", "time_limit", "launch_failed", "channel_broken",
    }
)  # fmt: skip


def hopeless(state: State, reason: str) -> bool:
    """Whether a pending job will never start: for its reason, or as its reservation was deleted under it."""
    return state is State.RESV_DEL_HOLD or reason.partition(":")[0].strip() in HOPELESS


#: What to do about pending reasons, where that is not plain from their names (squeue(1), "JOB REASON CODES").
HINTS = {
    "JobHeldUser": "somebody holds it: `scontrol release` lets it go, an option --hold under `sbatch:` has to go",
    "JobHeldAdmin": "an administrator holds it, who alone can release it",
    "Priority": "other jobs go first: give it more time (slurm: pending_limit), or another QoS or partition",
    "Resources": "no nodes are free: give it more time (slurm: pending_limit), or another QoS or partition",
    "PartitionDown": "its partition does not start jobs at present",
    "PartitionInactive": "its partition does not start jobs at present",
    "ReqNodeNotAvail": "nodes that it must have do not serve: see nodelist, reservation, maintenance",
    "Reservation": "its reservation has not begun, or has no nodes left",
    "Licenses": "licences that it needs are all in use",
}


def hint_of(reason: str) -> str:
    """Return what to do about a pending reason, empty if that is not known."""
    return HINTS.get(re.split(r"[,:( ]", reason, maxsplit=1)[0], "")


def unavailable(reason: str) -> str:
    """Return the host list of nodes that a pending reason names as unavailable, or an empty string."""
    return reason.partition("UnavailableNodes:")[2].rstrip(") ").strip()


def never_scheduled(job: Job, waited_s: float, limit_s: float, nodes: Sequence[Node] = ()) -> ProvisionError:
    """Return the error of a job that did not start within its pending limit, or never will.

    *nodes* are those that the reason names.
    """
    state = "pending" if job.state is State.PENDING else job.state.value
    why = f"job {job.id} is {state}: {job.reason or 'no reason given'}"
    if nodes:
        why += f" ({_described(nodes)})"
    if hopeless(job.state, job.reason):
        return ProvisionError("never_scheduled", f"{why}; waiting does not help, so it was cancelled")
    hint = hint_of(job.reason)
    return ProvisionError(
        "never_scheduled",
        f"{why}; cancelled after {waited_s:.0f} s, the pending limit is {limit_s:.0f} s (slurm: pending_limit)"
        + (f"; {hint}" if hint else ""),
    )


def damaged(text: str) -> ProtocolError:
    """Return the error of an allocation whose results file somebody or something has damaged, as *text* says."""
    return ProtocolError(
        "channel_broken",
        f"{text}: something else than its batch changed it, so that nothing in it can be trusted; the job was cancelled",
    )


def requeued(job: Job) -> ProvisionError:
    """Return the error of a job that somebody put back into the queue although it had begun."""
    return ProvisionError(
        "preempted",
        f"Slurm job {job.id} was requeued after it had begun (an administrator, or a node that failed); half a run is no "
        "result, so it is not begun again in the same job",
    )


def cause_of(
    job: Job | None, steps: Sequence[Step], nodes: Sequence[Node], batch_exit: int | None, words: str
) -> MlhpcError:
    """Return why an allocation ended before its runs had.

    Args:
        job: as Slurm last showed it; None where it knows nothing of it.
        steps: of that job, as far as known.
        nodes: the job's nodes as they are now.
        batch_exit: the batch's own exit code, None where it could not write it.
        words: the last lines of the job's output.
    """
    said = f"; its last lines:\n{words}" if words else ""
    if job is None:
        return ProtocolError("channel_broken", f"Slurm knows nothing of the job any more{said}")
    what = f"Slurm job {job.id} {job.state.value}" + (f" ({job.reason})" if job.reason else "")
    found = (
        _by_nodes(job, nodes, what)
        or _by_state(job, steps, f"{what}: ", said)
        or _by_batch(job, batch_exit, words, what, said)
    )
    if found is not None:
        return found
    if job.state is State.COMPLETED:
        text = f"{what}, but the results file lacks the end of its runs: it was cut, or the file system lost it{said}"
        return ProtocolError("channel_broken", text)
    code = f"signal {job.signal}" if job.signal else f"exit code {job.exit_code}"
    outcome = "launch_failed" if batch_exit is None else "channel_broken"
    if not said:
        said = (
            "; it printed nothing: look whether its nodes see the state directory (if not, set shared_directory under "
            f"slurm:), and into slurmd's log on {', '.join(job.nodes[:1]) or 'its first node'}"
        )
    return ProtocolError(outcome, f"{what} with {code} before its runs had ended{said}")


def _by_nodes(job: Job, nodes: Sequence[Node], what: str) -> MlhpcError | None:
    """Return the error where a node is to blame."""
    failed = _failed(nodes)
    if not failed and job.state not in {State.NODE_FAIL, State.BOOT_FAIL}:
        return None
    names = tuple(node.name for node in failed)
    return NodeFault("node_failure", _node_text(what, failed, job), names or job.nodes)


def _by_batch(job: Job, batch_exit: int | None, words: str, what: str, said: str) -> MlhpcError | None:
    """Return the error where the batch itself told it."""
    if BATCH_CANNOT_WRITE in {batch_exit, job.exit_code}:
        return ProvisionError("disk_full", f"{what}: the batch could not write its results{said}")
    if "protocol_mismatch" in words:
        return ProtocolError("protocol_mismatch", f"{what}{said}")
    return None


def _by_state(job: Job, steps: Sequence[Step], what: str, said: str) -> MlhpcError | None:
    """Return the error where the job's state says it all."""
    if job.state is State.PREEMPTED:
        return ProvisionError("preempted", f"{what}another job took its nodes")
    if job.restarts:
        return requeued(job)
    if job.state in {State.TIMEOUT, State.DEADLINE}:
        return RunFailure("time_limit", f"{what}the allocation reached its time limit{said}")
    if job.state is State.OUT_OF_MEMORY or any(step.state is State.OUT_OF_MEMORY for step in steps):
        return RunFailure("out_of_memory", f"{what}{_oom_text(steps)}{said}")
    if job.state is State.CANCELLED:
        return ProvisionError("cancelled_outside", f"{what}somebody else cancelled it{said}")
    return None


def amended(
    outcome: str, text: str, steps: Sequence[Step], nodes: Sequence[Node]
) -> tuple[str, str, tuple[str, ...]]:
    """Return outcome, text and failed nodes of a run that failed, given its steps and nodes: what caused it comes first."""
    if failed := _failed(nodes):
        names = tuple(node.name for node in failed)
        return "node_failure", f"{_described(failed)}; seen as {outcome}: {text}", names
    if outcome != "out_of_memory" and any(step.state is State.OUT_OF_MEMORY for step in steps):
        return "out_of_memory", f"{_oom_text(steps)}; seen as {outcome}: {text}", ()
    return outcome, text, ()


def _failed(nodes: Sequence[Node]) -> tuple[Node, ...]:
    return tuple(node for node in nodes if node.failed)


def _node_text(what: str, failed: Sequence[Node], job: Job) -> str:
    if failed:
        return f"{what}: {_described(failed)}"
    return f"{what} on {', '.join(job.nodes) or 'unknown nodes'}, which respond again"


def _described(nodes: Sequence[Node]) -> str:
    told = []
    for node in nodes:
        state = "+".join([node.state, *sorted(node.flags)])
        told.append(f"node {node.name} is {state}" + (f": {node.reason}" if node.reason else ""))
    return ", ".join(told)


def _oom_text(steps: Sequence[Step]) -> str:
    killed = [step for step in steps if step.state is State.OUT_OF_MEMORY]
    where = sorted({node for step in killed for node in step.nodes})
    names = ", ".join(f"step {step.id}" for step in killed) or "a step"
    return f"{names} ran out of memory" + (f" on {', '.join(where)}" if where else "")
