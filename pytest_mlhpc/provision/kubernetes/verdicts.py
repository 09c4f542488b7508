"""Has an allocation ended, and how? Decided from what is known of it; nothing is asked for here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pytest_mlhpc.errors import MlhpcError, NodeFault, ProtocolError, ProvisionError, RunFailure
from pytest_mlhpc.provision.kubernetes.allocation import Allocation, PodRecord
from pytest_mlhpc.provision.kubernetes.causes import Cause, Stage
from pytest_mlhpc.results.failures import INFRASTRUCTURE

#: How long the end of a container may be told after its log has ended, and the other way round, in seconds.
LAG_S: Final = 20.0

#: Outcomes that say what a container's end looked like, not why: any other cause goes first.
_VAGUE: Final = ("channel_broken", "cancelled_outside")


@dataclass(frozen=True)
class Verdict:
    """Whether it has ended, with which error, and nodes that its probe found unfit."""

    ended: bool = False
    error: MlhpcError | None = None
    unfit_nodes: tuple[str, ...] = ()


def judge(allocation: Allocation, now: float, trouble: str = "") -> Verdict:
    """Return what is to be said of *allocation* at *now*; *trouble*: the server does not answer, so nothing is overdue."""
    if allocation.conversation.mismatch:
        return Verdict(ended=True, error=ProtocolError("protocol_mismatch", allocation.conversation.mismatch))
    if allocation.conversation.complete and not allocation.held:
        return Verdict(ended=True)
    if unfit := [pod.view for pod in allocation.pods.values() if pod.view.unfit]:
        said = "; ".join(f"{view.node}: {view.unfit}" for view in unfit)
        rounds = f"{allocation.round + 1} times" if allocation.round else "once"
        before = f", before that {', '.join(allocation.excluded)}" if allocation.excluded else ""
        text = f"unfit nodes: {said}{before}; provisioned {rounds}, no more (kubernetes: reprovision)"
        nodes = tuple(view.node for view in unfit)
        return Verdict(ended=True, error=NodeFault("unfit_nodes", text, nodes), unfit_nodes=nodes)
    if allocation.vanished:
        return Verdict(ended=True, error=_vanished(allocation))
    if cause := _final(allocation, now, trouble):
        return Verdict(ended=True, error=error_of(cause, allocation, now))
    return Verdict()


def _final(allocation: Allocation, now: float, trouble: str) -> Cause | None:
    """Return the cause by which it has ended: what waited too long, or what its containers ended with."""
    first = allocation.first
    ended = first is not None and first.view.stage is Stage.ENDED
    if ended and first is not None:
        return _after_the_end(allocation, first, now)
    causes = [cause for cause in allocation.causes().values() if not cause.patience]
    if causes and not trouble:
        return min(causes, key=lambda cause: cause.outcome in _VAGUE)
    return None if trouble else allocation.patience.overdue(now)


def _after_the_end(allocation: Allocation, first: PodRecord, now: float) -> Cause | None:
    """Return why rank 0's pod ended without having told everything, once its log was read to the end."""
    if allocation.ended_at is None:
        allocation.ended_at = now
    if first.follower is not None and not first.log_ended and now - allocation.ended_at < LAG_S:
        return None
    causes = sorted(
        allocation.causes().values(), key=lambda cause: (cause.outcome in _VAGUE, bool(cause.patience))
    )
    if causes:
        return causes[0]
    what = "was read to its end" if first.whole else "has a hole: the container runtime has rotated it away"
    return Cause(
        "truncated_result", f"pod {first.ref.name} ended before all runs were told of; its log {what}"
    )


def error_of(cause: Cause, allocation: Allocation, now: float) -> MlhpcError:
    """Return *cause* as the error of an allocation: what, for how long, what to do."""
    text = cause.text + (f" (node {cause.node})" if cause.node else "")
    if cause.patience:
        waited = allocation.patience.waited(cause, now)
        limit = allocation.settings.patience.get(cause.patience, 0.0)
        text += f"; given up after {waited:.0f} s, the limit is {limit:.0f} s (kubernetes: patience: {cause.patience})"
    if logs := allocation.last_words():
        text += f"\n  last lines of its log: {logs}"
    if cause.node and cause.outcome in ("node_failure", "evicted"):
        return NodeFault(cause.outcome, text, (cause.node,))
    if cause.outcome == "channel_broken":
        return ProtocolError(cause.outcome, text)
    if cause.outcome in INFRASTRUCTURE:
        return ProvisionError(cause.outcome, text)
    return RunFailure(cause.outcome, text)


def _vanished(allocation: Allocation) -> MlhpcError:
    lost = [pod.view for pod in allocation.pods.values() if pod.gone]
    for view in lost:
        if view.cause is not None and view.cause.outcome in ("node_failure", "evicted", "preempted"):
            return NodeFault(view.cause.outcome, view.cause.text, (view.node,))
    where = ", ".join(sorted({view.node for view in lost if view.node}))
    text = f"{allocation.vanished} was deleted while it ran, though not by this session" + (
        f"; it was on {where}" if where else ""
    )
    return ProvisionError("cancelled_outside", text)
