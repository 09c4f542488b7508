"""What Kubernetes says of a pod, as our states and causes: conditions and waiting reasons, not the phase alone.

Pure functions on objects as JSON has them. Reasons are those of Kubernetes' own sources: pkg/kubelet/images/types.go (images),
pkg/kubelet/kuberuntime and kubelet/events (containers), k8s.io/api/core/v1 (conditions), pkg/kubelet/eviction.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

#: Names of the containers in every pod of ours; a manifest may call the second one otherwise.
PROBE, WORKER = "probe", "worker"

#: Exit code by which the probe says that not the set-up but the node is unfit (``batch/probe.py``).
EXIT_UNFIT: Final = 10

Object = Mapping[str, Any]

#: Waiting reasons of a container -> outcome and the patience that it is given.
_WAITING: Final = {
    "ErrImagePull": ("image_pull", "image"),
    "ImagePullBackOff": ("image_pull", "image"),
    "ImageInspectError": ("image_pull", "image"),
    "RegistryUnavailable": ("image_pull", "image"),
    "SignatureValidationFailed": ("image_pull", ""),
    "ErrImageNeverPull": ("image_pull", ""),
    "InvalidImageName": ("image_pull", ""),
    "CreateContainerConfigError": ("container_config", "config"),
    "CreateContainerError": ("container_config", "config"),
    "PreCreateHookError": ("container_config", "config"),
    "PreStartHookError": ("launch_failed", "config"),
    "PostStartHookError": ("launch_failed", "config"),
    "RunContainerError": ("launch_failed", "config"),
    "CrashLoopBackOff": ("crash_loop", "crash"),
}

#: How reasons begin by which a kubelet refuses a pod that the scheduler gave it (pkg/kubelet/lifecycle/predicate.go): it still
#: counts a pod that has just ended, or does not know yet of a device that was added.
_CROWDED: Final = "OutOf"

#: Reasons of a whole pod -> outcome. What the kubelet refuses at admission begins with "OutOf" or is listed.
_POD: Final = {
    "DeadlineExceeded": "time_limit",
    "Evicted": "evicted",
    "NodeLost": "node_failure",
    "NodeShutdown": "node_failure",
    "Shutdown": "node_failure",
    "Terminated": "node_failure",
    "Preempting": "preempted",
    "NodeAffinity": "rejected",
    "UnexpectedAdmissionError": "node_failure",
    "TopologyAffinityError": "rejected",
}

#: Conditions of a pod that the cluster ends: Kubernetes' own (1.25 and later), and Kueue's (its pkg/controller/jobs/pod).
_DISRUPTED: Final = ("DisruptionTarget", "TerminationTarget")
#: Their reasons; Kueue's others begin with WorkloadEvictedDueTo. One that is not known is an eviction.
_DISRUPTION: Final = {
    "PreemptionByScheduler": "preempted",
    "PreemptionByKubeScheduler": "preempted",
    "DeletionByTaintManager": "node_failure",
    "DeletionByPodGC": "node_failure",
    "TerminationByKubelet": "evicted",
    "EvictionByEvictionAPI": "evicted",
}


class Stage(enum.IntEnum):
    """How far a pod is."""

    UNSCHEDULED = 0
    PREPARING = 1  #: it has a node; images and volumes are being fetched
    VETTING = 2  #: the probe runs
    RUNNING = 3
    ENDED = 4


@dataclass(frozen=True)
class Cause:
    """Why a pod does not do what it should: an outcome of ``results/failures.py``, and the cluster's own words.

    ``patience`` names the time limit within which it may heal by itself; empty: it never will.
    """

    outcome: str
    text: str
    patience: str = ""
    node: str = ""


@dataclass(frozen=True)
class PodView:
    """What we want to know of a pod. ``exit`` is the worker container's exit code once it has ended."""

    name: str
    uid: str
    stage: Stage
    node: str = ""
    address: str = ""
    cause: Cause | None = None
    exit: int | None = None
    out_of_memory: bool = False  #: memory ran out in the worker container, whatever process paid for it
    unfit: str = ""  #: what the probe said of the node
    started: bool = False  #: the worker container has begun, so that it has a log
    deleting: bool = False  #: somebody has asked for its end
    crowded: bool = False  #: the kubelet had no room for it, whatever the scheduler knew


def view(pod: Object, worker: str = WORKER) -> PodView:
    """Return what *pod* tells; *worker* is the name of the container that runs our agent."""
    meta, status = pod.get("metadata") or {}, pod.get("status") or {}
    node = (pod.get("spec") or {}).get("nodeName") or ""
    own = _container(status.get("containerStatuses"), worker)
    ended = {} if _comes_again(pod, own) else _terminated(own)
    stage = _stage(pod, own, ended, node)
    return PodView(
        name=meta.get("name") or "",
        uid=meta.get("uid") or "",
        stage=stage,
        node=node,
        address=status.get("podIP") or "",
        cause=_cause(pod, worker, node),
        exit=int(ended.get("exitCode", 0)) if ended else None,
        out_of_memory=ended.get("reason") == "OOMKilled",
        unfit=_unfit(status),
        started=bool(ended) or "running" in _state(own),
        deleting=bool(meta.get("deletionTimestamp")),
        crowded=str(status.get("reason") or "").startswith(_CROWDED),
    )


def _comes_again(pod: Object, container: Object) -> bool:
    """Whether the kubelet starts a container anew that has failed: operators of some kinds want that, we never do."""
    policy = (pod.get("spec") or {}).get("restartPolicy") or "Never"  # the API server always says it
    if policy == "Never" or (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
        return False
    return int(_terminated(container).get("exitCode", 0)) != 0


def _stage(pod: Object, own: Object, ended: Object, node: str) -> Stage:
    status = pod.get("status") or {}
    if status.get("phase") in ("Succeeded", "Failed") or ended:
        return Stage.ENDED
    if "running" in _state(own):
        return Stage.RUNNING
    sidecars = _sidecars(pod)
    if any("running" in _state(one) for one in _init(status) if one.get("name") not in sidecars):
        return Stage.VETTING
    return Stage.PREPARING if node else Stage.UNSCHEDULED


def _cause(pod: Object, worker: str, node: str) -> Cause | None:
    """Return the first cause that applies, what is final before what may heal."""
    status = pod.get("status") or {}
    found = _of_pod(status, node) or _of_containers(pod, worker, node)
    return found or _of_schedule(status) or _of_silence(status, node)


def _of_pod(status: Object, node: str) -> Cause | None:
    for condition in status.get("conditions") or ():
        if condition.get("type") in _DISRUPTED and condition.get("status") == "True":
            reason = condition.get("reason") or ""
            by_queue = reason == "StoppedByKueue" or reason.startswith("WorkloadEvictedDueTo")
            outcome = "preempted" if by_queue else _DISRUPTION.get(reason, "evicted")
            said = words(reason, condition.get("message"))
            return Cause(outcome, said, node="" if by_queue else node)  # no fault of the node
    reason = status.get("reason") or ""
    outcome = _POD.get(reason) or ("rejected" if reason.startswith(_CROWDED) else "")
    return Cause(outcome, words(reason, status.get("message")), node=node) if outcome else None


def _of_containers(pod: Object, worker: str, node: str) -> Cause | None:
    """Return what is wrong with a container that decides, and beside it what others do.

    Ours decide, and before the worker has begun all that it waits for: init containers, and sidecars that do not start.
    Containers that others have put into the pod (a proxy, a collector of logs) may end, restart or fail beside it.
    """
    status, sidecars = pod.get("status") or {}, _sidecars(pod)
    own = _container(status.get("containerStatuses"), worker)
    begun = bool(_terminated(own)) or "running" in _state(own)
    found: Cause | None = None
    others: list[str] = []
    statuses = [(one, True) for one in _init(status)]
    statuses += [(one, False) for one in status.get("containerStatuses") or ()]
    for container, first in statuses:
        name, ended = container.get("name") or "", _terminated(container)
        cause = _of_waiting(name, _state(container).get("waiting") or {}, container, node)
        cause = cause or (_of_ended(pod, container, worker, node) if ended else None)
        awaited = first and not begun and not (ended and name in sidecars)
        if cause is not None and (awaited or name in (PROBE, worker)):
            found = found or cause
        elif cause is not None:
            others.append(cause.text)
    if found is None or not others:
        return found
    return replace(found, text=f"{found.text}; beside it, {'; '.join(others)}")


def _of_ended(pod: Object, container: Object, worker: str, node: str) -> Cause | None:
    name, ended = container.get("name") or "", _terminated(container)
    if _comes_again(pod, container):
        said = f"container {name!r} ended with {_exit_words(ended)}, and is started again and again"
        return Cause("crash_loop", said, "crash", node)
    return _of_end(name, ended, worker, node)


def _init(status: Object) -> Sequence[Object]:
    found: Sequence[Object] = status.get("initContainerStatuses") or ()
    return found


def _sidecars(pod: Object) -> frozenset[str]:
    """Return the names of init containers that run beside the others to the end (Kubernetes 1.28 and later)."""
    found = (pod.get("spec") or {}).get("initContainers") or ()
    return frozenset(one.get("name") or "" for one in found if one.get("restartPolicy") == "Always")


def _of_waiting(name: str, waiting: Object, container: Object, node: str) -> Cause | None:
    reason = waiting.get("reason") or ""
    if reason not in _WAITING:
        return None
    outcome, patience = _WAITING[reason]
    text = f"container {name!r}: {words(reason, waiting.get('message'))}"
    if outcome == "image_pull" and (image := container.get("image")):
        text += f" (image {image})"
    if reason == "CrashLoopBackOff" and (last := (container.get("lastState") or {}).get("terminated")):
        text += f"; it ended with {_exit_words(last)} last"
    return Cause(outcome, text, patience, node)


def _of_end(name: str, ended: Object, worker: str, node: str) -> Cause | None:
    reason, code = ended.get("reason") or "", int(ended.get("exitCode", 0))
    said = f"container {name!r} ended with {_exit_words(ended)}"
    if reason == "OOMKilled":
        return Cause("out_of_memory", said, node=node)
    if reason in ("StartError", "ContainerCannotRun"):
        return Cause("launch_failed", said, node=node)
    if reason == "DeadlineExceeded":
        return Cause("time_limit", said, node=node)
    if code == 0:
        return None
    if name != worker:
        outcome = "unfit_nodes" if name == PROBE and code == EXIT_UNFIT else "import_failed"
        return Cause(outcome, said, node=node)
    return Cause("channel_broken", said, node=node)


def _exit_words(ended: Object) -> str:
    """Return exit code, signal, reason and message of a terminated container."""
    code = int(ended.get("exitCode", 0))
    signal = ended.get("signal") or (code - 128 if 128 < code < 160 else 0)
    said = f"exit code {code}" + (f" (signal {signal})" if signal else "")
    rest = words(ended.get("reason") if ended.get("reason") != "Error" else "", ended.get("message"))
    return f"{said}: {rest}" if rest else said


def _of_schedule(status: Object) -> Cause | None:
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            reason = condition.get("reason") or ""
            patience = "admission" if reason == "SchedulingGated" else "unschedulable"
            return Cause("never_scheduled", words(reason, condition.get("message")), patience)
    return None


def _of_silence(status: Object, node: str) -> Cause | None:
    """Return that the node is not heard of: then alone a pod is marked as not ready whose containers are."""
    told = {one.get("type"): one.get("status") for one in status.get("conditions") or ()}
    if told.get("ContainersReady") != "True" or told.get("Ready") in (None, "True"):
        return None
    return Cause(
        "node_failure", f"the node {node} is not heard of any more: it is marked as not ready", "node", node
    )


def _unfit(status: Object) -> str:
    ended = _terminated(_container(status.get("initContainerStatuses"), PROBE))
    if ended and int(ended.get("exitCode", 0)) == EXIT_UNFIT:
        return words("", ended.get("message")) or f"the probe ended with exit code {EXIT_UNFIT}"
    return ""


def words(reason: object, message: object) -> str:
    """Return Kubernetes' own words in one line: reason, and its message if there is one.

    Where the end of a container's log is the message, our own protocol lines (``batch/pod_text.py``) in it are left out.
    """
    said = re.sub(r"\x1e[^\n]*", "", str(message or ""))
    shown = [str(part).strip() for part in (reason, said) if part and str(part).strip()]
    return " ".join(": ".join(shown).split())[:2000]


def latest_event(
    events: Sequence[Object], reasons: frozenset[str], *, before: frozenset[str] = frozenset()
) -> str:
    """Return the words of the latest event whose reason is one of *reasons*; empty if there is none.

    One that is followed by an event whose reason is in *before* does not count.
    """
    # Times have whole seconds: of two in one second, the one that says that all is well counts.
    for event in sorted(events, key=lambda one: (_when(one), one.get("reason") in before), reverse=True):
        if event.get("reason") in before:
            return ""
        if event.get("reason") in reasons:
            return words(event.get("reason"), event.get("message"))
    return ""


def _when(event: Object) -> str:
    meta = event.get("metadata") or {}
    return str(
        event.get("lastTimestamp") or event.get("eventTime") or meta.get("creationTimestamp") or ""
    )  # RFC 3339 in UTC sorts as text


def _container(statuses: Sequence[Object] | None, name: str) -> Object:
    return next((one for one in statuses or () if one.get("name") == name), {})


def _state(container: Object) -> Object:
    found: Object = container.get("state") or {}
    return found


def _terminated(container: Object) -> Object:
    found: Object = _state(container).get("terminated") or {}
    return found
