"""Has an allocation ended, and how? Decided from what is known of it; nothing is asked for here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from pytest_mlhpc.errors import MlhpcError, NodeFault, ProtocolError, ProvisionError, RunFailure
from pytest_mlhpc.provision.kubernetes.allocation import Allocation, PodRecord
from pytest_mlhpc.provision.kubernetes.causes import Cause, Stage
from pytest_mlhpc.provision.kubernetes.errors import Forbidden, KubernetesError, Unauthorized, Unavailable
from pytest_mlhpc.provision.kubernetes.intake import Silence
from pytest_mlhpc.provision.kubernetes.refusals import refused
from pytest_mlhpc.results.failures import INFRASTRUCTURE

#: How long a log may still be read after its container has ended or is gone, in seconds: longer than the last look of
#: one who follows it (``logs.LAST_LOOK_S``).
LOG_LIMIT_S: Final = 120.0

#: How long somebody else's deletion may take beyond the pod's grace before its end is told, in seconds.
DELETION_LIMIT_S: Final = 60.0

#: How long a refusal is borne that comes in the middle, in seconds: a server that has just been started may refuse what it
#: allows once it has read its rules; watches ask again after a minute.
REFUSED_LIMIT_S: Final = 90.0

#: How long a server may be silent beyond all time limits of an allocation, in seconds.
SILENT_LIMIT_S: Final = 1800.0

#: Outcomes that say what a container's end looked like, not why: any other cause goes first.
_VAGUE: Final = ("channel_broken", "cancelled_outside")
_NODES: Final = ("node_failure", "evicted", "preempted")


@dataclass(frozen=True)
class Verdict:
    """Whether it has ended, with which error, nodes that its probe found unfit, and whether a kubelet had no room for it."""

    ended: bool = False
    error: MlhpcError | None = None
    unfit_nodes: tuple[str, ...] = ()
    crowded: bool = False


def judge(allocation: Allocation, now: float, silence: Silence | None = None) -> Verdict:
    """Return what is to be said of *allocation* at *now*; *silence*: nothing is told of it, so nothing is overdue."""
    if allocation.conversation.mismatch:
        return Verdict(ended=True, error=ProtocolError("protocol_mismatch", allocation.conversation.mismatch))
    if allocation.conversation.complete and not allocation.held:
        return Verdict(ended=True)
    if error := refusal(allocation, now, silence):
        return Verdict(ended=True, error=error)
    if found := _unfit(allocation) or _crowded(allocation, now):
        return found
    error = None
    if _taken(allocation):
        error = _taken_error(allocation, now) if _all_said(allocation, now) else None
    elif cause := _final(allocation, now, silence):
        error = error_of(cause, allocation, now)
    return Verdict(ended=error is not None, error=error)


def _unfit(allocation: Allocation) -> Verdict | None:
    """Return what the probes say, if any found its node unfit."""
    unfit = [pod.view for pod in allocation.pods.values() if pod.view.unfit]
    if not unfit:
        return None
    said = "; ".join(f"{view.node}: {view.unfit}" for view in unfit)
    rounds = f"{allocation.round + 1} times" if allocation.round else "once"
    before = f", before that {', '.join(allocation.excluded)}" if allocation.excluded else ""
    text = f"unfit nodes: {said}{before}; provisioned {rounds}, no more (kubernetes: reprovision)"
    nodes = tuple(view.node for view in unfit)
    # The error names no nodes to go round: the allocation was made again as often as is allowed, so the run is not.
    return Verdict(ended=True, error=NodeFault("unfit_nodes", text), unfit_nodes=nodes)


def _crowded(allocation: Allocation, now: float) -> Verdict | None:
    """Return what kubelets say that had no room for a pod, as long as no run has begun."""
    refused_pods = [pod for pod in allocation.pods.values() if pod.view.crowded and not pod.gone]
    if allocation.lines or not refused_pods or refused_pods[0].view.cause is None:
        return None
    cause = refused_pods[0].view.cause
    if allocation.round:
        text = f"{cause.text}; provisioned {allocation.round + 1} times, no more (kubernetes: reprovision)"
        cause = replace(cause, text=text)
    return Verdict(ended=True, error=error_of(cause, allocation, now), crowded=True)


def refusal(allocation: Allocation, now: float, silence: Silence | None) -> MlhpcError | None:
    """Return why nothing can be seen of *allocation*, if that is not borne any longer."""
    logs = [pod.log_error for pod in allocation.pods.values() if isinstance(pod.log_error, Forbidden)]
    if logs and logs[0] is not None:
        return refused(logs[0])
    if silence is None:
        return None
    waited, error = now - silence.since, silence.error
    if isinstance(error, Unavailable):
        longest = sum(run.time_limit_s for run in allocation.plan.runs) + SILENT_LIMIT_S
        if waited < longest:
            return None
        return ProtocolError("channel_broken", f"{error}; nothing was heard for {waited:.0f} s")
    limit = REFUSED_LIMIT_S
    if isinstance(error, Unauthorized):  # somebody may log in again
        limit = allocation.settings.patience["unknown"]
    if silence.heard and waited < limit:
        return None
    return _told(error, waited if silence.heard else 0.0)


def _told(error: KubernetesError, waited: float) -> ProvisionError:
    found = refused(error)
    text = str(found).removeprefix(f"{found.outcome}: ")
    return ProvisionError(found.outcome, text + (f"; for {waited:.0f} s" if waited else ""))


def _taken(allocation: Allocation) -> bool:
    """Whether somebody else has deleted it, or a part of it that does not come back."""
    return bool(allocation.vanished) or allocation.replaced or bool(_lost(allocation))


def _lost(allocation: Allocation) -> list[PodRecord]:
    """Return the pods that have ended as somebody else has deleted them."""
    pods = allocation.pods.values()
    return [pod for pod in pods if pod.gone or (pod.view.deleting and pod.view.stage is Stage.ENDED)]


def _all_said(allocation: Allocation, now: float) -> bool:
    """Whether what the lost pods printed was read, or will not be."""
    if not allocation.vanished_at:
        allocation.vanished_at = now
    waited = now - allocation.vanished_at
    lost = _lost(allocation)
    if (
        not lost and not allocation.vanished
    ):  # replaced, though still there: on a node that does not answer, or with a long grace
        grace = allocation.settings.grace_s + DELETION_LIMIT_S
        return waited >= grace or any(_node_of(pod) for pod in allocation.pods.values())
    read = all(pod.follower is None or pod.log_ended for pod in lost)
    return read or waited >= LOG_LIMIT_S


def _final(allocation: Allocation, now: float, silence: Silence | None) -> Cause | None:
    """Return the cause by which it has ended: what waited too long, or what its containers ended with."""
    first = allocation.first
    if first is not None and first.view.stage is Stage.ENDED:
        return _after_the_end(allocation, first, now)
    if silence is not None:
        return None
    causes = [cause for cause in allocation.causes().values() if not cause.patience]
    if causes:
        return min(causes, key=lambda cause: cause.outcome in _VAGUE)
    # A pod that is being deleted on a node that is not heard of will not come back; others may.
    lost = [pod for pod in allocation.pods.values() if pod.view.deleting and _node_of(pod)]
    if lost:
        return lost[0].view.cause
    return allocation.patience.overdue(now)


def _node_of(pod: PodRecord) -> str:
    """Return the node that was lost under *pod*, or took it away; empty: none."""
    cause = pod.view.cause
    return pod.view.node if cause is not None and cause.outcome in _NODES else ""


def _after_the_end(allocation: Allocation, first: PodRecord, now: float) -> Cause | None:
    """Return why rank 0's pod ended without having told everything, once its log was read to the end."""
    if allocation.ended_at is None:
        allocation.ended_at = now
    if first.follower is not None and not first.log_ended and now - allocation.ended_at < LOG_LIMIT_S:
        return None
    causes = sorted(
        allocation.causes().values(), key=lambda cause: (cause.outcome in _VAGUE, bool(cause.patience))
    )
    if causes:
        return causes[0]
    what = "was read to its end" if first.whole else "has a hole, or may have one: it was rotated"
    if first.log_error is not None:
        what = f"could not be read: {first.log_error}"
    elif not first.log_ended:
        what = f"could not be read to its end within {LOG_LIMIT_S:.0f} s"
    return Cause(
        "truncated_result", f"pod {first.ref.name} ended before all runs were told of; its log {what}"
    )


def error_of(cause: Cause, allocation: Allocation, now: float) -> MlhpcError:
    """Return *cause* as the error of an allocation: what, for how long, what to do."""
    text = cause.text + (f" (node {cause.node})" if cause.node and cause.node not in cause.text else "")
    if cause.patience:
        waited = allocation.patience.waited(cause, now)
        limit = allocation.settings.patience.get(
            cause.patience, allocation.settings.patience.get("unknown", 0.0)
        )
        if waited >= limit:
            text += f"; given up after {waited:.0f} s, the limit is {limit:.0f} s (kubernetes: patience: {cause.patience})"
    if cause.outcome == "never_scheduled" and allocation.excluded:
        text += f"; without {', '.join(allocation.excluded)}, which its probe found unfit"
    if logs := allocation.last_words():
        text += f"\n  last lines of its log: {logs}"
    if cause.node and cause.outcome in _NODES:
        return NodeFault(cause.outcome, text, (cause.node,))
    if cause.outcome == "channel_broken":
        return ProtocolError(cause.outcome, text)
    if cause.outcome in INFRASTRUCTURE:
        return ProvisionError(cause.outcome, text)
    return RunFailure(cause.outcome, text)


def _taken_error(allocation: Allocation, now: float) -> MlhpcError:
    """Return why pods are gone: the node, the workload's own deadline, else somebody's wish."""
    if cause := next((pod.view.cause for pod in allocation.pods.values() if _node_of(pod)), None):
        return error_of(cause, allocation, now)
    for cause in allocation.causes().values():
        if cause.outcome not in _VAGUE and not cause.patience:
            return error_of(cause, allocation, now)
    if allocation.suspended:
        return ProvisionError("preempted", allocation.preemption)
    lost = _lost(allocation) or list(allocation.pods.values())
    where = ", ".join(sorted({pod.view.node for pod in lost if pod.view.node}))
    what = allocation.vanished or f"Pod {lost[0].ref.name}"
    text = f"{what} was deleted while it ran, though not by this session" + (
        f"; it was on {where}" if where else ""
    )
    return ProvisionError("cancelled_outside", text)
