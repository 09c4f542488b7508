"""Whether an allocation or a program without an agent has ended, and with which error; and the few requests that this needs.

Open it to see why an allocation was given up. Events, queue objects and nodes are read rarely, and only for
allocations that make no progress.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from pytest_mlhpc.errors import MlhpcError, NodeFault, ProtocolError, ProvisionError, RunFailure
from pytest_mlhpc.node.protocol.lines import Message
from pytest_mlhpc.node.protocol.plan import PROTOCOL
from pytest_mlhpc.provision.conversation import run_message
from pytest_mlhpc.provision.kubernetes.allocation import PodAllocation, PodRecord, WatchSilence
from pytest_mlhpc.provision.kubernetes.causes import (
    FailureCause,
    PodView,
    Stage,
    find_cause,
    latest_event,
    reason_text,
)
from pytest_mlhpc.provision.kubernetes.client import KubernetesClient
from pytest_mlhpc.provision.kubernetes.errors import (
    Forbidden,
    KubernetesError,
    NotFound,
    Unauthorized,
    Unavailable,
    provision_error,
)
from pytest_mlhpc.provision.kubernetes.log_parser import ContainerOutput, join_outputs
from pytest_mlhpc.provision.kubernetes.objects import NODE, ObjectRef
from pytest_mlhpc.provision.kubernetes.settings import QueueRule
from pytest_mlhpc.store.record import INFRASTRUCTURE

#: How long nothing may come of a log whose container has ended, in seconds: longer than ``log_follower.LAST_READ_S``.
LOG_LIMIT_S: Final = 120.0

#: How long a deletion by others may exceed the pod's grace before the end is reported, in seconds.
DELETION_LIMIT_S: Final = 60.0

#: How long a watch that worked may be refused, in seconds: a restarted server refuses calls until it has read its rules.
REFUSED_LIMIT_S: Final = 90.0

#: How long a server may be unavailable beyond all time limits of an allocation, in seconds.
SILENT_LIMIT_S: Final = 1800.0

_NODE_OUTCOMES: Final = ("node_failure", "evicted", "preempted")

#: When events are read first, and at which interval again, in seconds.
FIRST_EVENTS_S: Final = 5.0
EVENTS_INTERVAL_S: Final = 30.0

_NO_PODS_REASONS: Final = frozenset({"FailedCreate", "FailedCreatePod"})
_NO_START_REASONS: Final = frozenset(
    ("FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox", "FailedCreatePodContainer", "NetworkNotReady")
)  # fmt: skip

#: Events of progress: failures before them are over. Pulling an image may take hours.
_PROGRESS_REASONS: Final = frozenset({"Pulling", "Pulled", "Created", "Started"})


@dataclass(frozen=True)
class EndVerdict:
    """Whether an allocation has ended, its error, nodes that the probe found unfit, and whether a kubelet had no room."""

    ended: bool = False
    error: MlhpcError | None = None
    unfit_nodes: tuple[str, ...] = ()
    crowded: bool = False


def end_verdict(allocation: PodAllocation, now: float, silence: WatchSilence | None = None) -> EndVerdict:
    """Return the verdict on *allocation* at *now*. With *silence* its watches fail, so no cause is overdue."""
    if allocation.conversation.mismatch:
        return EndVerdict(
            ended=True, error=ProtocolError("protocol_mismatch", allocation.conversation.mismatch)
        )
    if allocation.conversation.complete and not allocation.deferred:
        return EndVerdict(ended=True)
    if error := watch_error(allocation, now, silence):
        return EndVerdict(ended=True, error=error)
    if found := _unfit_verdict(allocation) or _no_room_verdict(allocation, now):
        return found
    error = None
    if _deleted_by_others(allocation):
        error = _deletion_error(allocation, now) if _logs_read(allocation, now) else None
    elif cause := _final_cause(allocation, now, silence):
        error = allocation_error(cause, allocation, now)
    return EndVerdict(ended=error is not None, error=error)


def _unfit_verdict(allocation: PodAllocation) -> EndVerdict | None:
    """Return the verdict if a probe found its node unfit."""
    unfit = [pod.view for pod in allocation.pods.values() if pod.view.unfit]
    if not unfit:
        return None
    reasons = "; ".join(f"{view.node}: {view.unfit}" for view in unfit)
    rounds = f"{allocation.round + 1} times" if allocation.round else "once"
    before = f", before that {', '.join(allocation.excluded)}" if allocation.excluded else ""
    text = f"unfit nodes: {reasons}{before}; provisioned {rounds}, no more (kubernetes: reprovision)"
    nodes = tuple(view.node for view in unfit)
    # Without nodes to avoid in the error the run is not retried, as the allocation was provisioned as often as allowed.
    return EndVerdict(ended=True, error=NodeFault("unfit_nodes", text), unfit_nodes=nodes)


def _no_room_verdict(allocation: PodAllocation, now: float) -> EndVerdict | None:
    """Return the verdict if a kubelet had no room for a pod and no run has started."""
    refused_pods = [pod for pod in allocation.pods.values() if pod.view.crowded and not pod.deleted]
    if allocation.lines or not refused_pods or refused_pods[0].view.cause is None:
        return None
    cause = refused_pods[0].view.cause
    if allocation.round:
        text = f"{cause.text}; provisioned {allocation.round + 1} times, no more (kubernetes: reprovision)"
        cause = replace(cause, text=text)
    return EndVerdict(ended=True, error=allocation_error(cause, allocation, now), crowded=True)


def watch_error(allocation: PodAllocation, now: float, silence: WatchSilence | None) -> MlhpcError | None:
    """Return the error of failing watches or logs, if it lasts too long."""
    logs = [pod.log_error for pod in allocation.pods.values() if isinstance(pod.log_error, Forbidden)]
    if logs and logs[0] is not None:
        return provision_error(logs[0])
    if silence is None:
        return None
    waited, error = now - silence.since, silence.error
    if isinstance(error, Unavailable):
        longest = sum(run.time_limit_s for run in allocation.plan.runs) + SILENT_LIMIT_S
        if waited < longest:
            return None
        return ProtocolError("channel_broken", f"{error}; no answer for {waited:.0f} s")
    limit = REFUSED_LIMIT_S
    if isinstance(error, Unauthorized):  # the user may log in again
        limit = allocation.settings.patience["unknown"]
    if silence.listed and waited < limit:
        return None
    return _refusal_error(error, waited if silence.listed else 0.0)


def _refusal_error(error: KubernetesError, waited: float) -> ProvisionError:
    found = provision_error(error)
    text = str(found).removeprefix(f"{found.outcome}: ")
    return ProvisionError(found.outcome, text + (f"; for {waited:.0f} s" if waited else ""))


def _deleted_by_others(allocation: PodAllocation) -> bool:
    """Return whether others have deleted a part of the allocation that does not return."""
    return bool(allocation.deleted_object) or allocation.replaced or bool(_deleted_pods(allocation))


def _deleted_pods(allocation: PodAllocation) -> list[PodRecord]:
    """Return the pods that others have deleted and that have ended."""
    pods = allocation.pods.values()
    return [pod for pod in pods if pod.deleted or (pod.view.deleting and pod.view.stage is Stage.ENDED)]


def _logs_read(allocation: PodAllocation, now: float) -> bool:
    """Return whether the logs of the deleted pods were read, or cannot be."""
    if not allocation.deleted_at:
        allocation.deleted_at = now
    waited = now - allocation.deleted_at
    lost = _deleted_pods(allocation)
    if not lost and not allocation.deleted_object:
        # A replaced pod is still there: on a lost node, or with a long grace.
        grace = allocation.settings.grace_s + DELETION_LIMIT_S
        return waited >= grace or any(_lost_node(pod) for pod in allocation.pods.values())
    return all(pod.follower is None or _is_read(pod, allocation.deleted_at, now) for pod in lost)


def _is_read(pod: PodRecord, since: float, now: float) -> bool:
    """Return whether a pod's log was read to its end, or nothing of it has come for so long; *since* is the pod's own end."""
    return pod.log_ended or now - max(since, pod.line_at) >= LOG_LIMIT_S


def _final_cause(allocation: PodAllocation, now: float, silence: WatchSilence | None) -> FailureCause | None:
    """Return the cause of the end: an overdue one, or the end of its containers."""
    first = allocation.rank0
    alone = allocation.settings.agent or all(
        pod.view.stage is Stage.ENDED for pod in allocation.pods.values()
    )
    if first is not None and first.view.stage is Stage.ENDED and alone:
        return _cause_after_end(allocation, first, now)
    if silence is not None:
        return None
    causes = [cause for cause in allocation.causes().values() if not cause.patience]
    if causes:
        return min(causes, key=lambda cause: cause.is_vague)
    # A pod that is being deleted on a lost node will not return; others may.
    lost = [pod for pod in allocation.pods.values() if pod.view.deleting and _lost_node(pod)]
    if lost:
        return lost[0].view.cause
    return allocation.patience.overdue(now)


def _lost_node(pod: PodRecord) -> str:
    """Return the node that *pod* lost, or that evicted it; empty if none."""
    cause = pod.view.cause
    return pod.view.node if cause is not None and cause.outcome in _NODE_OUTCOMES else ""


def _cause_after_end(allocation: PodAllocation, first: PodRecord, now: float) -> FailureCause | None:
    """Return why rank 0's pod ended before it reported all runs, once its log was read."""
    if allocation.ended_at is None:
        allocation.ended_at = now
    read = [first] if allocation.settings.agent else allocation.pods.values()
    if any(pod.follower is not None and not _is_read(pod, allocation.ended_at, now) for pod in read):
        return None
    causes = sorted(allocation.causes().values(), key=lambda cause: (cause.is_vague, bool(cause.patience)))
    if causes:
        return causes[0]
    what = "was read to its end" if first.log_complete else "has a hole, or may have one: it was rotated"
    if first.log_error is not None:
        what = f"could not be read: {first.log_error}"
    elif not first.log_ended:
        what = f"could not be read to its end: nothing of it has come for {LOG_LIMIT_S:.0f} s"
    return FailureCause(
        "truncated_result", f"pod {first.ref.name} ended before all runs were reported; its log {what}"
    )


def allocation_error(cause: FailureCause, allocation: PodAllocation, now: float) -> MlhpcError:
    """Return *cause* as the error of an allocation, with its duration and advice."""
    text = cause.text + (f" (node {cause.node})" if cause.node and cause.node not in cause.text else "")
    if cause.outcome == "launch_failed" and not allocation.settings.agent:  # it is the test's own program
        cause = replace(cause, outcome="command_not_found")
    if cause.patience:
        waited = allocation.patience.waited(cause, now)
        limit = allocation.settings.patience.get(
            cause.patience, allocation.settings.patience.get("unknown", 0.0)
        )
        if waited >= limit:
            text += f"; given up after {waited:.0f} s, the limit is {limit:.0f} s (kubernetes: patience: {cause.patience})"
    if cause.outcome == "never_scheduled" and allocation.excluded:
        text += f"; without {', '.join(allocation.excluded)}, which its probe found unfit"
    if logs := allocation.last_lines():
        text += f"\n  last lines of its log: {logs}"
    if cause.node and cause.outcome in _NODE_OUTCOMES:
        return NodeFault(cause.outcome, text, (cause.node,))
    if cause.outcome == "channel_broken":
        return ProtocolError(cause.outcome, text)
    if cause.outcome in INFRASTRUCTURE:
        return ProvisionError(cause.outcome, text)
    return RunFailure(cause.outcome, text)


def _deletion_error(allocation: PodAllocation, now: float) -> MlhpcError:
    """Return why pods are gone: their node, the workload's deadline, or a deletion by others."""
    if cause := next((pod.view.cause for pod in allocation.pods.values() if _lost_node(pod)), None):
        return allocation_error(cause, allocation, now)
    for cause in allocation.causes().values():
        if not cause.is_vague and not cause.patience:
            return allocation_error(cause, allocation, now)
    if allocation.suspended:
        return ProvisionError("preempted", allocation.preemption)
    lost = _deleted_pods(allocation) or list(allocation.pods.values())
    where = ", ".join(sorted({pod.view.node for pod in lost if pod.view.node}))
    what = allocation.deleted_object or f"Pod {lost[0].ref.name}"
    text = f"{what} was deleted while it ran, though not by this session" + (
        f"; it was on {where}" if where else ""
    )
    return ProvisionError("cancelled_outside", text)


def read_events(allocation: PodAllocation, now: float) -> None:
    """Set the cause that events name, if *allocation* waits without a cause and was not asked about lately."""
    pods = [pod for pod in allocation.pods.values() if not pod.deleted]
    stuck = [pod for pod in pods if pod.view.stage <= Stage.PREPARING and pod.view.cause is None]
    queue = allocation.kind.queue if allocation.suspended else None
    missing = len(pods) < allocation.plan.nodes and not allocation.status_text and queue is None
    if not stuck and not missing and queue is None:
        allocation.event_cause, allocation.events_at = None, 0.0
        return
    if not allocation.events_at:
        allocation.events_at = now + FIRST_EVENTS_S
    if now < allocation.events_at:
        return
    allocation.events_at = now + EVENTS_INTERVAL_S
    if queue is not None:
        text = why_queued(allocation, queue)
        allocation.event_cause = FailureCause("never_scheduled", text, "admission") if text else None
    elif missing:
        for ref in allocation.workloads.values():
            allocation.event_cause = why_no_pods(_events(allocation, ref), ref)
    else:
        allocation.event_cause = why_no_start(_events(allocation, stuck[0].ref), stuck[0].view)


def why_queued(allocation: PodAllocation, queue: QueueRule) -> str:
    """Return what the queue says of a suspended workload; empty if nothing, or if it cannot be read."""
    for ref in allocation.workloads.values():
        for found in _queue_objects(allocation, queue, ref):
            if text := queue.waiting_reason(found):
                return f"{queue.resource.kind} {found['metadata']['name']}: {text}"
    return ""


def _queue_objects(allocation: PodAllocation, queue: QueueRule, ref: ObjectRef) -> Sequence[Any]:
    """Return the queue's objects for a workload, in the API version that the server has."""

    def listed(version: str) -> Sequence[Any]:
        resource = replace(queue.resource, version=version)
        return allocation.api.list(resource, labels=f"{queue.label}={ref.uid}", namespace=ref.namespace).items

    try:
        try:
            return listed(queue.resource.version)
        except NotFound:
            return listed(allocation.api.versions(queue.resource.group)[0])
    except (KubernetesError, IndexError):
        return ()  # no such queue, or no right to read it: the workload's own text stays


def _events(allocation: PodAllocation, ref: ObjectRef) -> Sequence[Any] | None:
    """Return the events of an object; None if they cannot be read."""
    try:
        return allocation.api.events(ref.uid)
    except KubernetesError:
        return None


def why_no_pods(events: Sequence[Any] | None, ref: ObjectRef) -> FailureCause | None:
    """Return why a controller does not create the pods of *ref*; *events* is None if unreadable."""
    event = latest_event(events or (), _NO_PODS_REASONS)
    if not event:
        why = "its events cannot be read" if events is None else "no event says why"
        text = f"{ref} lacks pods, and {why}: does the controller run that makes them?"
        return FailureCause("never_scheduled", text, "unknown")
    return find_cause("no pods", event, event)


def why_no_start(events: Sequence[Any] | None, pod: PodView) -> FailureCause | None:
    """Return what keeps a pod from starting; *events* is None if unreadable."""
    if pod.stage is Stage.UNSCHEDULED:
        text = f"{pod.name}: no scheduler has tried to place it yet"
        return FailureCause("never_scheduled", text, "unknown")
    if events is None:
        return None  # its image may be being pulled, perhaps for hours
    event = latest_event(events, _NO_START_REASONS, before=_PROGRESS_REASONS)
    if event:
        return find_cause("no start", event, event, node=pod.node)
    if latest_event(events, _PROGRESS_REASONS):
        return None
    text = f"{pod.name}: the kubelet of {pod.node} reports nothing about it"
    return FailureCause("node_failure", text, "unknown", pod.node)


def check_nodes(allocation: PodAllocation) -> None:
    """Set the cause of pods that were deleted with their node; old servers do not say why. Each node is read once."""
    for pod in allocation.pods.values():
        node, going = pod.view.node, pod.deleted or pod.view.deleting
        if going and node and pod.view.explains_itself and not pod.node_checked:
            pod.node_checked = True
            if text := _node_problem(allocation.api, node):
                pod.node_cause = FailureCause("node_failure", text, node=node)
                pod.update(pod.view)


def _node_problem(api: KubernetesClient, node: str) -> str:
    """Return what is wrong with *node*; empty if nothing is known."""
    try:
        found = api.get(ObjectRef(NODE, "", node))
    except NotFound:
        return f"the node {node} is no longer in the cluster"
    except KubernetesError:
        return ""
    for condition in (found.get("status") or {}).get("conditions") or ():
        if condition.get("type") == "Ready" and condition.get("status") != "True":
            text = reason_text(condition.get("reason"), condition.get("message"))
            return f"the node {node} is not ready: {text}"
    return ""


def container_messages(allocation: PodAllocation, now: float) -> list[Message]:
    """Return what an agent would say of a program that is its container's command: that it has started, and how it ended.

    The cluster's status says both, and the log has the output. An end with another cause than the program's own is left to
    the verdict on the allocation.
    """
    run, pods = allocation.plan.runs[0], sorted(allocation.pods.values(), key=lambda pod: pod.rank or 0)
    if allocation.conversation.complete or len(pods) < allocation.plan.nodes:
        return []
    messages = []
    if allocation.began_at is None:
        if not all(pod.view.started for pod in pods):
            return []
        allocation.began_at = now
        body = {"protocol": PROTOCOL, "payload_sha256": allocation.plan.payload_sha256}
        messages.append(run_message(run, "started", body))
    ended = [pod for pod in pods if pod.view.exit is not None]
    failed = any(pod.view.exit for pod in ended)
    late = now - allocation.began_at >= run.time_limit_s and len(ended) < len(pods)
    if late:
        text = f"the program did not end within {run.time_limit_s:g} s"
        messages.append(run_message(run, "failed", {"outcome": "time_limit", "text": text, "log": ""}))
    elif (len(ended) < len(pods) and not failed) or not all(pod.view.explains_itself for pod in ended):
        return messages
    elif allocation.ended_at is None:
        allocation.ended_at = now
    read = all(_is_read(pod, allocation.ended_at or now, now) for pod in ended)
    if not read and not late:
        return messages
    problem = "" if late else _lacking_output(ended)
    if problem:
        body = {"outcome": "truncated_result", "text": problem, "log": ""}
        messages.append(run_message(run, "failed", body))
    times = [one for one in (_nanoseconds(pod.view.times) for pod in ended) if one is not None]
    end: dict[str, object] = {
        "exit": [exit_code(pod.view.exit or 0) for pod in ended],
        "host": pods[0].view.node,
    }
    if times:
        end |= {"started_ns": min(first for first, _ in times), "ended_ns": max(last for _, last in times)}
    return [*messages, run_message(run, "end", end)]


def _lacking_output(ended: Sequence[PodRecord]) -> str:
    """Join the outputs of all pods; return what is missing of them, or an empty string."""
    outputs = [pod.stream for pod in ended if isinstance(pod.stream, ContainerOutput)]
    try:
        join_outputs(outputs)
    except OSError as error:
        return f"cannot write {error.filename}: {error.strerror}"
    for pod, output in zip(ended, outputs, strict=True):
        if output.problem:
            return output.problem
        if not pod.log_ended or not pod.log_complete:
            why = str(pod.log_error or "it was rotated, or may have been")
            return f"the log of pod {pod.ref.name} is incomplete: {why}; see containerLogMaxSize of the kubelet, or print less"
    return ""


def exit_code(code: int) -> int:
    """Return a container's exit code as a process has it: minus the signal's number where one killed it."""
    return 128 - code if 128 < code < 160 else code


def _nanoseconds(times: tuple[str, str]) -> tuple[int, int] | None:
    """Return a container's times in ns UTC; None: the cluster did not tell."""
    try:
        began, ended = (datetime.fromisoformat(text).timestamp() for text in times)
    except ValueError:
        return None
    return round(began * 1e9), round(ended * 1e9)
