"""What only others tell: why a controller makes no pods, why a pod with a node does not start, what a queue waits for.

Asked rarely.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from pytest_mlhpc.provision.kubernetes.allocation import Allocation
from pytest_mlhpc.provision.kubernetes.causes import Cause, PodView, Stage, latest_event
from pytest_mlhpc.provision.kubernetes.errors import KubernetesError, NotFound
from pytest_mlhpc.provision.kubernetes.kinds.model import QueueRule
from pytest_mlhpc.provision.kubernetes.resources import ObjectRef

#: When events are asked for first, and how often again, in seconds.
FIRST_S: Final = 5.0
AGAIN_S: Final = 30.0

_NO_PODS: Final = frozenset({"FailedCreate", "FailedCreatePod"})
_NO_START: Final = frozenset(
    {
        "FailedMount",
        "FailedAttachVolume",
        "FailedCreatePodSandBox",
        "FailedCreatePodContainer",
        "NetworkNotReady",
    }
)


#: Events by which a pod goes on: what failed before them has healed. Fetching an image may take hours.
_GOES_ON: Final = frozenset({"Pulling", "Pulled", "Created", "Started"})

#: A quota that wants every pod to name a resource which ours do not: no waiting helps (k8s.io/apiserver, plugin/resourcequota).
MUST_SPECIFY: Final = "must specify"


class Inquirer:
    """Asks for the events of what does not come on.

    Args:
        now: the provisioner's clock, in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now

    def ask(self, allocation: Allocation) -> None:
        """Note what events say of *allocation*, if it hangs without a word and was not asked about lately."""
        now = self._now()
        pods = [pod for pod in allocation.pods.values() if not pod.gone]
        stuck = [pod for pod in pods if pod.view.stage <= Stage.PREPARING and pod.view.cause is None]
        queue = allocation.kind.queue if allocation.suspended else None
        missing = len(pods) < allocation.plan.nodes and not allocation.status_words and queue is None
        if not stuck and not missing and queue is None:
            allocation.said, allocation.ask_at = None, 0.0
            return
        if not allocation.ask_at:
            allocation.ask_at = now + FIRST_S
        if now < allocation.ask_at:
            return
        allocation.ask_at = now + AGAIN_S
        if queue is not None:
            text = why_queued(allocation, queue)
            allocation.said = Cause("never_scheduled", text, "admission") if text else None
        elif missing:
            for ref in allocation.workloads.values():
                allocation.said = why_no_pods(_events(allocation, ref), ref)
        else:
            allocation.said = why_no_start(_events(allocation, stuck[0].ref), stuck[0].view)


def why_queued(allocation: Allocation, queue: QueueRule) -> str:
    """Return what the queue says of a suspended workload; empty where it says nothing, or may not be asked."""
    for ref in allocation.workloads.values():
        for found in _of_queue(allocation, queue, ref):
            if text := queue.waits_for(found):
                return f"{queue.resource.kind} {found['metadata']['name']}: {text}"
    return ""


def _of_queue(allocation: Allocation, queue: QueueRule, ref: ObjectRef) -> Sequence[Any]:
    """Return the queue's objects for a workload, in whichever version of its API the server has."""

    def listed(version: str) -> Sequence[Any]:
        resource = replace(queue.resource, version=version)
        return allocation.api.list(resource, labels=f"{queue.label}={ref.uid}", namespace=ref.namespace).items

    try:
        try:
            return listed(queue.resource.version)
        except NotFound:
            return listed(allocation.api.versions(queue.resource.group)[0])
    except (KubernetesError, IndexError):
        return ()  # no such queue here, or no right to read it: the workload's own words stay


def _events(allocation: Allocation, ref: ObjectRef) -> Sequence[Any] | None:
    """Return the events of an object; None where they are not told: the account lacks the right, or nobody answers."""
    try:
        return allocation.api.events(ref.uid)
    except KubernetesError:
        return None


def why_no_pods(events: Sequence[Any] | None, ref: ObjectRef) -> Cause:
    """Return why a controller does not make the pods of *ref*; *events* None: they are not told."""
    said = latest_event(events or (), _NO_PODS)
    if not said:
        why = "its events cannot be read" if events is None else "no event says why"
        text = f"{ref} lacks pods, and {why}: does the controller run that makes them?"
        return Cause("never_scheduled", text, "unknown")
    if MUST_SPECIFY in said:
        return Cause("quota_exceeded", said, "config")
    if "exceeded quota" in said:
        return Cause("quota_exceeded", said, "quota")
    if "denied the request" in said or "violates PodSecurity" in said or "forbidden" in said:
        return Cause("admission_denied", said, "config")
    return Cause("rejected", said, "config")


def why_no_start(events: Sequence[Any] | None, pod: PodView) -> Cause | None:
    """Return what keeps a pod from starting; *events* None: they are not told."""
    if pod.stage is Stage.UNSCHEDULED:
        text = f"{pod.name}: no scheduler has looked at it yet"
        return Cause("never_scheduled", text, "unknown")
    if events is None:
        return None  # its image may be on its way, for hours if need be
    said = latest_event(events, _NO_START, before=_GOES_ON)
    if said:
        return Cause("container_config", said, "volume", pod.node)
    if latest_event(events, _GOES_ON):
        return None
    text = f"{pod.name}: nothing is heard of it from the kubelet of {pod.node}"
    return Cause("node_failure", text, "unknown", pod.node)
