"""Why an allocation or a run ended: the scheduler's states become our outcomes and error texts. Pure functions.

Read here which states of jobs, steps and nodes lead to which outcome. ``poll.py`` makes the queries.
"""

from __future__ import annotations

import datetime as dt
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_mlhpc.errors import MlhpcError, NodeFault, ProtocolError, ProvisionError, RunFailure
from pytest_mlhpc.node.files import EXIT_UNSAFE, NO_ROOM, UNSAFE
from pytest_mlhpc.node.protocol.lines import Message
from pytest_mlhpc.provision.scheduler.client import JobStep, SchedulerJob, SchedulerNode, SchedulerState

#: Exit code of a batch that cannot write (EX_IOERR of sysexits.h). ``script.py`` has those of the set-up before it.
BATCH_CANNOT_WRITE = 74

#: Pending reasons that waiting does not end: the request is beyond a limit, or is not permitted (squeue(1), "JOB REASON
#: CODES"; the names are the same from Slurm 22.05 to 26.05).
NEVER_STARTING = frozenset(
    {
        "AccountNotAllowed", "AssocMaxCpuPerJobLimit", "AssocMaxNodePerJobLimit", "AssocMaxWallDurationPerJobLimit",
        "BadConstraints", "DependencyNeverSatisfied", "InvalidAccount", "InvalidQOS", "PartitionNodeLimit",
        "PartitionTimeLimit", "QOSMaxCpuPerJobLimit", "QOSMaxGRESPerJob", "QOSMaxNodePerJobLimit",
        "QOSMaxWallDurationPerJobLimit", "QOSNotAllowed", "ReservationDeleted",
    }
)  # fmt: skip

#: Failures of a run that a node or the kernel may have caused: Slurm is queried before they are reported.
DOUBTFUL = frozenset(
    {
        "worker_exit", "worker_killed", "no_result", "too_few_ranks", "time_limit", "launch_failed", "channel_broken",
    }
)  # fmt: skip


#: Pending reason -> what to do about it, where its name alone does not show that (squeue(1), "JOB REASON CODES").
HINTS = {
    "JobHeldUser": "it is held: `scontrol release` releases it; remove an option --hold under `sbatch:`",
    "JobHeldAdmin": "an administrator holds it, who alone can release it",
    "Priority": "other jobs go first: give it more time (slurm: pending_limit), or another QoS or partition",
    "Resources": "no nodes are free: give it more time (slurm: pending_limit), or another QoS or partition",
    "PartitionDown": "its partition does not start jobs at present",
    "PartitionInactive": "its partition does not start jobs at present",
    "ReqNodeNotAvail": "nodes that it requires are out of service: see nodelist, reservation, maintenance",
    "Reservation": "its reservation has not begun, or has no nodes left",
    "Licenses": "licences that it needs are all in use",
}


def never_starts(state: SchedulerState, reason: str) -> bool:
    """Return whether a pending job will never start: by its reason, or as its reservation was deleted."""
    return state is SchedulerState.RESV_DEL_HOLD or reason.partition(":")[0].strip() in NEVER_STARTING


def hint_for(reason: str) -> str:
    """Return what to do about a pending reason, empty if that is unknown."""
    return HINTS.get(re.split(r"[,:( ]", reason, maxsplit=1)[0], "")


def unavailable_hosts(reason: str) -> str:
    """Return the host list of nodes that a pending reason names as unavailable, or an empty string."""
    return reason.partition("UnavailableNodes:")[2].rstrip(") ").strip()


def never_scheduled_error(
    job: SchedulerJob,
    waited_s: float,
    limit_s: float,
    nodes: Sequence[SchedulerNode] = (),
    *,
    key: str = "slurm",
) -> ProvisionError:
    """Return the error of a job that did not start within its pending limit, or never will.

    *nodes* are those that the reason names, *key* is the mapping of systems.yaml that has the limit.
    """
    state = "pending" if job.state is SchedulerState.PENDING else job.state.value
    why = f"job {job.id} is {state}: {job.reason or 'no reason given'}"
    if nodes:
        why += f" ({_describe_nodes(nodes)})"
    if job.stuck or never_starts(job.state, job.reason):
        return ProvisionError("never_scheduled", f"{why}; waiting does not help, so it was cancelled")
    hint = hint_for(job.reason)
    return ProvisionError(
        "never_scheduled",
        f"{why}; cancelled after {waited_s:.0f} s, the pending limit is {limit_s:.0f} s ({key}: pending_limit)"
        + (f"; {hint}" if hint else ""),
    )


def damaged_error(text: str) -> ProtocolError:
    """Return the error of an allocation whose results file is damaged as *text* describes."""
    return ProtocolError(
        "channel_broken",
        f"{text}: something else than its batch changed it, so that nothing in it can be trusted; the job was cancelled",
    )


def requeued_error(job: SchedulerJob, title: str = "Slurm") -> ProvisionError:
    """Return the error of a job that was requeued after it had begun."""
    return ProvisionError(
        "preempted",
        f"{title} job {job.id} was requeued after it had begun (an administrator, or a node that failed); half a run is no "
        "result, so it is not begun again in the same job",
    )


def silent_batch_error(job: SchedulerJob, silent_s: float, title: str) -> NodeFault:
    """Return the error of a job that its scheduler calls running, and whose batch shows no sign of life."""
    return NodeFault(
        "node_failure",
        f"{title} job {job.id} runs ({job.reason or job.state.value}), but its batch has had no heartbeat for {silent_s:.0f} s: its first "
        "node died, or does not reach the state directory any more; it was cancelled",
        job.nodes,
    )


def left_queue_error(job: SchedulerJob, title: str) -> ProvisionError:
    """Return the error of a job that left the queue before its batch began, and that no accounting knows."""
    return ProvisionError(
        "cancelled_outside",
        f"{title} job {job.id} left the queue while it waited ({job.reason or job.state.value}): it was cancelled from outside",
    )


def cause_of(
    job: SchedulerJob | None,
    steps: Sequence[JobStep],
    nodes: Sequence[SchedulerNode],
    batch_exit: int | None,
    log: str,
    *,
    title: str = "Slurm",
) -> MlhpcError:
    """Return why an allocation ended before its runs had.

    Args:
        job: the last answer of the scheduler about it; None where it does not know it.
        steps: of that job, as far as known.
        nodes: the job's nodes as they are now.
        batch_exit: the batch's own exit code, None where it wrote none.
        log: the last lines of the job's output.
        title: the scheduler's name.
    """
    quoted = f"; its last lines:\n{log}" if log else ""
    if job is None:
        return ProtocolError("channel_broken", f"{title} knows nothing of the job any more{quoted}")
    what = f"{title} job {job.id} {job.state.value}" + (f" ({job.reason})" if job.reason else "")
    found = (
        _by_nodes(job, nodes, what)
        or _by_state(job, steps, f"{what}: ", quoted)
        or _by_batch(job, batch_exit, log, what, quoted)
    )
    if found is not None:
        return found
    if job.state is SchedulerState.COMPLETED:
        text = f"{what}, but the results file lacks the end of its runs: it was cut, or the file system lost it{quoted}"
        return ProtocolError("channel_broken", text)
    code = f"signal {job.signal}" if job.signal else f"exit code {job.exit_code}"
    outcome = "launch_failed" if batch_exit is None else "channel_broken"
    if not quoted:
        quoted = (
            "; it printed nothing: look whether its nodes see the state directory (if not, set shared_directory in "
            f"systems.yaml), and into the log of {title} on {', '.join(job.nodes[:1]) or 'its first node'}"
        )
    return ProtocolError(outcome, f"{what} with {code} before its runs had ended{quoted}")


def _by_nodes(job: SchedulerJob, nodes: Sequence[SchedulerNode], what: str) -> MlhpcError | None:
    """Return the error that a node caused."""
    failed = _failed_nodes(nodes)
    if not failed and job.state not in {SchedulerState.NODE_FAIL, SchedulerState.BOOT_FAIL}:
        return None
    names = tuple(node.name for node in failed)
    return NodeFault("node_failure", _node_fault_text(what, failed, job), names or job.nodes)


def _by_batch(
    job: SchedulerJob, batch_exit: int | None, log: str, what: str, quoted: str
) -> MlhpcError | None:
    """Return the error that the batch itself reported."""
    if BATCH_CANNOT_WRITE in {batch_exit, job.exit_code}:
        full = not quoted or any(os.strerror(one) in quoted for one in NO_ROOM)
        outcome = "disk_full" if full else "not_writable"
        return ProvisionError(outcome, f"{what}: the batch could not write its results{quoted}")
    if EXIT_UNSAFE in {batch_exit, job.exit_code}:
        return ProvisionError(UNSAFE, f"{what}{quoted}")
    if "protocol_mismatch" in log:
        return ProtocolError("protocol_mismatch", f"{what}{quoted}")
    return None


def _by_state(job: SchedulerJob, steps: Sequence[JobStep], what: str, quoted: str) -> MlhpcError | None:
    """Return the error that the job's state alone proves."""
    if job.state is SchedulerState.PREEMPTED:
        return ProvisionError("preempted", f"{what}another job took its nodes")
    if job.restarts:
        return requeued_error(job)
    if job.state in {SchedulerState.TIMEOUT, SchedulerState.DEADLINE}:
        return RunFailure("time_limit", f"{what}the allocation reached its time limit{quoted}")
    if job.state is SchedulerState.OUT_OF_MEMORY or any(
        step.state is SchedulerState.OUT_OF_MEMORY for step in steps
    ):
        return RunFailure("out_of_memory", f"{what}{_oom_text(steps)}{quoted}")
    if job.state is SchedulerState.CANCELLED:
        return ProvisionError("cancelled_outside", f"{what}it was cancelled from outside{quoted}")
    return None


def amend_failure(
    outcome: str, text: str, steps: Sequence[JobStep], nodes: Sequence[SchedulerNode]
) -> tuple[str, str, tuple[str, ...]]:
    """Return outcome, text and failed nodes of a run that failed, given its steps and nodes: the cause comes first."""
    if failed := _failed_nodes(nodes):
        names = tuple(node.name for node in failed)
        return "node_failure", f"{_describe_nodes(failed)}; seen as {outcome}: {text}", names
    if outcome != "out_of_memory" and any(step.state is SchedulerState.OUT_OF_MEMORY for step in steps):
        return "out_of_memory", f"{_oom_text(steps)}; seen as {outcome}: {text}", ()
    return outcome, text, ()


def _failed_nodes(nodes: Sequence[SchedulerNode]) -> tuple[SchedulerNode, ...]:
    return tuple(node for node in nodes if node.failed)


def _node_fault_text(what: str, failed: Sequence[SchedulerNode], job: SchedulerJob) -> str:
    if failed:
        return f"{what}: {_describe_nodes(failed)}"
    return f"{what} on {', '.join(job.nodes) or 'unknown nodes'}, which respond again"


def _describe_nodes(nodes: Sequence[SchedulerNode]) -> str:
    texts = []
    for node in nodes:
        state = "+".join([node.state, *sorted(node.flags)])
        texts.append(f"node {node.name} is {state}" + (f": {node.reason}" if node.reason else ""))
    return ", ".join(texts)


def _oom_text(steps: Sequence[JobStep]) -> str:
    killed = [step for step in steps if step.state is SchedulerState.OUT_OF_MEMORY]
    where = sorted({node for step in killed for node in step.nodes})
    names = ", ".join(f"step {step.id}" for step in killed) or "a step"
    return f"{names} ran out of memory" + (f" on {', '.join(where)}" if where else "")


@dataclass(frozen=True)
class JobEvidence:
    """What the scheduler knows of one job, its steps and its nodes, after :class:`poll.Diagnosis` queried it."""

    job: SchedulerJob | None
    steps: tuple[JobStep, ...] = ()
    nodes: tuple[SchedulerNode, ...] = ()
    title: str = "Slurm"

    def cause(self, batch_exit: int | None, log: str) -> MlhpcError:
        """Return why the allocation ended before its runs had."""
        return cause_of(self.job, self.steps, self.nodes, batch_exit, log, title=self.title)

    def amend(self, messages: Sequence[Message]) -> list[Message]:
        """Return *messages*: failures with their cause first, ends with their energy."""
        amended = []
        for message in messages:
            if message.kind == "end" and (steps := self._named_steps(message.run_id)):
                joules = [step.energy_j for step in steps if step.energy_j is not None]
                energy = {"step": steps[-1].id, "energy_j": sum(joules) if joules else None}
                amended.append(Message(message.run_id, message.nonce, "end", {**message.body, **energy}))
                continue
            if message.kind != "failed":
                amended.append(message)
                continue
            body = dict(message.body)
            body["outcome"], body["text"], nodes = amend_failure(
                str(body["outcome"]), str(body["text"]), self._run_steps(message.run_id), self.nodes
            )
            if nodes:
                body["nodes"] = list(nodes)
            amended.append(Message(message.run_id, message.nonce, message.kind, body))
        return amended

    def has_energy(self, messages: Sequence[Message]) -> bool:
        """Return whether the accounting has ended steps for every end among *messages*: it lags about a second."""
        ends = [message.run_id for message in messages if message.kind == "end"]
        return all(any(step.state.ended for step in self._named_steps(run_id)) for run_id in ends)

    def _named_steps(self, run_id: str) -> tuple[JobStep, ...]:
        return tuple(step for step in self.steps if step.name == run_id)

    def _run_steps(self, run_id: str) -> tuple[JobStep, ...]:
        """Return the steps that are named by the id of their run; in a job without such names all."""
        return self._named_steps(run_id) or tuple(step for step in self.steps if step.id != "extern")


def waiting_text(job: SchedulerJob, ahead: int | None) -> str:
    """Return what a pending job waits for, by Slurm's reason, when it may start, and how many jobs go first."""
    texts = [job.reason or "waiting"]
    if job.state not in {SchedulerState.PENDING, SchedulerState.CONFIGURING}:
        texts.insert(0, job.state.value)
    if job.start_ns:
        start = dt.datetime.fromtimestamp(job.start_ns / 1e9).astimezone()
        texts.append(f"expected to start {start:%a %H:%M}")
    if ahead:
        texts.append("1 job goes first" if ahead == 1 else f"{ahead} jobs go first")
    return f"job {job.id}: " + ", ".join(texts)
