"""What only events tell: why a controller makes no pods, why a pod with a node does not start. Asked rarely."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from pytest_mlhpc.provision.kubernetes.allocation import Allocation
from pytest_mlhpc.provision.kubernetes.causes import Cause, Stage, first_event
from pytest_mlhpc.provision.kubernetes.errors import KubernetesError

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
        stuck = [pod for pod in pods if pod.view.stage is Stage.PREPARING and pod.view.cause is None]
        missing = len(pods) < allocation.plan.nodes and not allocation.status_words
        if not stuck and not missing:
            allocation.said, allocation.ask_at = None, 0.0
            return
        if not allocation.ask_at:
            allocation.ask_at = now + FIRST_S
        if now < allocation.ask_at:
            return
        allocation.ask_at = now + AGAIN_S
        try:
            if missing:
                for ref in allocation.workloads.values():
                    allocation.said = why_no_pods(allocation.api.events(ref.uid))
            else:
                allocation.said = why_no_start(allocation.api.events(stuck[0].ref.uid), stuck[0].view.node)
        except KubernetesError:
            return  # a right that is missing, or no answer: the pod's own conditions still count


def why_no_pods(events: Sequence[Any]) -> Cause | None:
    """Return why a controller does not make its pods, from its *events*."""
    said = first_event(events, _NO_PODS)
    if not said:
        return None
    if MUST_SPECIFY in said:
        return Cause("quota_exceeded", said, "config")
    if "exceeded quota" in said:
        return Cause("quota_exceeded", said, "quota")
    if "denied the request" in said or "violates PodSecurity" in said or "forbidden" in said:
        return Cause("admission_denied", said, "config")
    return Cause("rejected", said, "config")


def why_no_start(events: Sequence[Any], node: str) -> Cause | None:
    """Return what keeps a pod from starting on its *node*."""
    said = first_event(events, _NO_START)
    return Cause("container_config", said, "volume", node) if said else None
