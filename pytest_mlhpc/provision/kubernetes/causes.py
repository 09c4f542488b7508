"""Why a pod does not run: its state and cause, from conditions and waiting reasons, and how long a cause may last.

Open it to see which outcome a Kubernetes reason becomes. Objects are dicts as in JSON. The reasons are those of
pkg/kubelet/images/types.go, pkg/kubelet/kuberuntime, kubelet/events, k8s.io/api/core/v1 and pkg/kubelet/eviction.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from pytest_mlhpc.provision.kubernetes.objects import JsonObject, event_time

#: Names of our containers in every pod; a manifest may name the second one differently.
PROBE, WORKER = "probe", "worker"

#: The probe's exit code for an unfit node (``node/batch/probe.py``).
EXIT_UNFIT: Final = 10

#: Prefix of a kubelet's reasons to refuse a scheduled pod (pkg/kubelet/lifecycle/predicate.go): it still counts a pod
#: that has just ended, or does not know yet of an added device.
_NO_ROOM: Final = "OutOf"
#: A quota requires a resource that our pods do not name, so waiting does not help (k8s.io/apiserver, plugin/resourcequota).
MUST_SPECIFY: Final = "must specify"

#: All that may stop an allocation: who tells it; of whose container, "" of any, others' included; the reason as a pattern; the
#: outcome, and the patience that it is given. The first row that fits counts. Without an outcome somebody else tells more.
CAUSES: Final = (
    ("waiting", "", "ErrImagePull|ImagePullBackOff|ImageInspectError|RegistryUnavailable", "image_pull", "image"),
    ("waiting", "", "SignatureValidationFailed|ErrImageNeverPull|InvalidImageName", "image_pull", ""),
    ("waiting", "", "CreateContainerConfigError|CreateContainerError|PreCreateHookError", "container_config", "config"),
    ("waiting", "", "PreStartHookError|PostStartHookError|RunContainerError", "launch_failed", "config"),
    ("waiting", "", "CrashLoopBackOff", "crash_loop", "crash"),
    ("restart", "", ".*", "crash_loop", "crash"),
    # A container has ended: the reason, then the exit code.
    ("end", "", "OOMKilled", "out_of_memory", ""),
    ("end", "", "StartError|ContainerCannotRun", "launch_failed", ""),
    ("end", "", "DeadlineExceeded", "time_limit", ""),
    ("exit", "", "0", "", ""),
    ("exit", PROBE, str(EXIT_UNFIT), "unfit_nodes", ""),
    ("exit", WORKER, ".*", "channel_broken", ""),
    ("exit", "", ".*", "import_failed", ""),
    # A whole pod: its own reason, also of a kubelet that refuses it, and conditions.
    ("pod", "", "DeadlineExceeded", "time_limit", ""),
    ("pod", "", "Evicted", "evicted", ""),
    ("pod", "", "NodeLost|NodeShutdown|Shutdown|Terminated|UnexpectedAdmissionError", "node_failure", ""),
    ("pod", "", "Preempting", "preempted", ""),
    ("pod", "", f"NodeAffinity|TopologyAffinityError|{_NO_ROOM}.*", "rejected", ""),
    ("queue", "", "StoppedByKueue|WorkloadEvictedDueTo.*", "preempted", ""),  # pkg/controller/jobs/pod of Kueue
    ("disruption", "", "PreemptionByScheduler|PreemptionByKubeScheduler", "preempted", ""),
    ("disruption", "", "DeletionByTaintManager|DeletionByPodGC", "node_failure", ""),
    ("disruption", "", ".*", "evicted", ""),
    ("unready", "", ".*", "node_failure", "node"),
    ("unscheduled", "", "SchedulingGated", "never_scheduled", "admission"),
    ("unscheduled", "", ".*", "never_scheduled", "unschedulable"),
    # Events: a controller makes no pods, a kubelet does not start one.
    ("no pods", "", f".*{MUST_SPECIFY}.*", "quota_exceeded", "config"),
    ("no pods", "", ".*(exceeded quota|status unknown for quota).*", "quota_exceeded", "quota"),
    ("no pods", "", ".*(denied the request|violates PodSecurity|forbidden).*", "admission_denied", "config"),
    ("no pods", "", ".*", "rejected", "config"),
    ("no start", "", ".*", "container_config", "volume"),
    # A workload has failed: k8s.io/api/batch/v1 and operators that follow it; its pods tell more of most failures.
    ("workload", "", "DeadlineExceeded", "time_limit", ""),
    ("workload", "", "BackoffLimitExceeded|PodFailurePolicy|FailedJobs|PyTorchJobFailed|JobFailed", "", ""),
    ("workload", "", ".*", "rejected", ""),
)  # fmt: skip

#: Conditions of a pod that the cluster ends: Kubernetes' (1.25 and later), and Kueue's.
_DISRUPTION_CONDITIONS: Final = ("DisruptionTarget", "TerminationTarget")


class Stage(enum.IntEnum):
    """The progress of a pod."""

    UNSCHEDULED = 0
    PREPARING = 1  #: it has a node; images and volumes are being fetched
    VETTING = 2  #: the probe runs
    RUNNING = 3
    ENDED = 4


@dataclass(frozen=True)
class FailureCause:
    """Why a pod or workload does not go on: an outcome of ``store/record.py``, and the cluster's text.

    ``patience`` names the limit within which it may disappear; empty: it is final.
    """

    outcome: str
    text: str
    patience: str = ""
    node: str = ""

    @property
    def is_vague(self) -> bool:
        """Whether it describes an end without its reason: other causes take precedence."""
        return self.outcome in ("channel_broken", "cancelled_outside")


def find_cause(
    teller: str, reason: str, text: str, *, whose: str = "", node: str = ""
) -> FailureCause | None:
    """Return the cause that *reason* is in the table, with this *text*; None if it is none, or if somebody else tells more."""
    for source, container, pattern, outcome, patience in CAUSES:
        if source == teller and container in ("", whose) and re.fullmatch(pattern, reason):
            return FailureCause(outcome, text, patience, node) if outcome else None
    return None


@dataclass(frozen=True)
class PodView:
    """The state of a pod. ``exit`` is the worker container's exit code once it has ended."""

    name: str
    stage: Stage
    node: str = ""
    address: str = ""
    cause: FailureCause | None = None
    exit: int | None = None
    out_of_memory: bool = False  #: memory ran out in the worker container, whichever process was killed
    unfit: str = ""  #: the probe's text on an unfit node
    started: bool = False  #: the worker container has begun, so that it has a log
    times: tuple[str, str] = (
        "",
        "",
    )  #: when the worker container began and ended (RFC 3339), once it has ended
    deleting: bool = False  #: its deletion was requested
    crowded: bool = False  #: the kubelet had no room for it

    @property
    def explains_itself(self) -> bool:
        """Whether its exit code says all that is known of its end: no memory limit, deadline or lost node is named."""
        return self.cause is None or self.cause.outcome == "channel_broken"

    @property
    def node_is_lost(self) -> bool:
        """Whether its node is lost, so that its end may never be reported."""
        return self.cause is not None and self.cause.outcome == "node_failure"


def pod_view(pod: JsonObject, worker: str = WORKER) -> PodView:
    """Return the state of *pod*; the container *worker* runs our agent."""
    meta, status = pod.get("metadata") or {}, pod.get("status") or {}
    node = (pod.get("spec") or {}).get("nodeName") or ""
    own = _container(status.get("containerStatuses"), worker)
    ended = {} if _is_restarted(pod, own) else _terminated(own)
    stage = _stage(pod, own, ended, node)
    return PodView(
        name=meta.get("name") or "",
        stage=stage,
        node=node,
        address=status.get("podIP") or "",
        cause=_cause(pod, worker, node),
        exit=int(ended.get("exitCode", 0)) if ended else None,
        out_of_memory=ended.get("reason") == "OOMKilled",
        unfit=_unfit(status),
        started=bool(ended) or "running" in _state(own),
        times=(str(ended.get("startedAt") or ""), str(ended.get("finishedAt") or "")),
        deleting=bool(meta.get("deletionTimestamp")),
        crowded=str(status.get("reason") or "").startswith(_NO_ROOM),
    )


def _is_restarted(pod: JsonObject, container: JsonObject) -> bool:
    """Return whether the kubelet restarts a failed container: operators of some kinds ask for that, we do not."""
    policy = (pod.get("spec") or {}).get("restartPolicy") or "Never"  # the API server always says it
    if policy == "Never" or (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
        return False
    return int(_terminated(container).get("exitCode", 0)) != 0


def _stage(pod: JsonObject, own: JsonObject, ended: JsonObject, node: str) -> Stage:
    status = pod.get("status") or {}
    if status.get("phase") in ("Succeeded", "Failed") or ended:
        return Stage.ENDED
    if "running" in _state(own):
        return Stage.RUNNING
    sidecars = _sidecars(pod)
    if any("running" in _state(one) for one in _init_statuses(status) if one.get("name") not in sidecars):
        return Stage.VETTING
    return Stage.PREPARING if node else Stage.UNSCHEDULED


def _cause(pod: JsonObject, worker: str, node: str) -> FailureCause | None:
    """Return the first cause that applies, final ones first."""
    status = pod.get("status") or {}
    found = _pod_cause(status, node) or _container_cause(pod, worker, node)
    return found or _scheduling_cause(status) or _not_ready_cause(status, node)


def _pod_cause(status: JsonObject, node: str) -> FailureCause | None:
    for condition in status.get("conditions") or ():
        if condition.get("type") in _DISRUPTION_CONDITIONS and condition.get("status") == "True":
            reason = condition.get("reason") or ""
            text = reason_text(reason, condition.get("message"))
            # What a queue takes back is no fault of the node.
            return find_cause("queue", reason, text) or find_cause("disruption", reason, text, node=node)
    reason = status.get("reason") or ""
    return find_cause("pod", reason, reason_text(reason, status.get("message")), node=node)


def _container_cause(pod: JsonObject, worker: str, node: str) -> FailureCause | None:
    """Return the cause of a container that decides; causes of other containers are appended to its text.

    The worker and the probe decide. Until the worker runs, init containers and sidecars do too.
    Containers that others added (a proxy, a log collector) may end or fail without effect.
    """
    status, sidecars = pod.get("status") or {}, _sidecars(pod)
    own = _container(status.get("containerStatuses"), worker)
    begun = bool(_terminated(own)) or "running" in _state(own)
    found: FailureCause | None = None
    others: list[str] = []
    statuses = [(one, True) for one in _init_statuses(status)]
    statuses += [(one, False) for one in status.get("containerStatuses") or ()]
    for container, first in statuses:
        name, ended = container.get("name") or "", _terminated(container)
        cause = _cause_of_one(pod, container, worker, node)
        awaited = first and not begun and not (ended and name in sidecars)
        if cause is not None and (awaited or name in (PROBE, worker)):
            found = found or cause
        elif cause is not None:
            others.append(cause.text)
    if found is None or not others:
        return found
    return replace(found, text=f"{found.text}; beside it, {'; '.join(others)}")


def _cause_of_one(pod: JsonObject, container: JsonObject, worker: str, node: str) -> FailureCause | None:
    """Return what is wrong with one container: it waits, it is started again and again, or it has ended badly."""
    name, ended = container.get("name") or "", _terminated(container)
    waiting = _state(container).get("waiting") or {}
    reason = waiting.get("reason") or ""
    text = f"container {name!r}: {reason_text(reason, waiting.get('message'))}"
    if cause := find_cause("waiting", reason, text, node=node):
        if cause.outcome == "image_pull" and (image := container.get("image")):
            text += f" (image {image})"
        if cause.outcome == "crash_loop" and (last := (container.get("lastState") or {}).get("terminated")):
            text += f"; it ended with {_exit_text(last)} last"
        return replace(cause, text=text)
    if not ended:
        return None
    text = f"container {name!r} ended with {_exit_text(ended)}"
    if _is_restarted(pod, container):
        return find_cause("restart", "", f"{text}, and is started again and again", node=node)
    whose = WORKER if name == worker else PROBE if name == PROBE else ""
    code = str(ended.get("exitCode", 0))
    found = find_cause("end", ended.get("reason") or "", text, node=node)
    return found or find_cause("exit", code, text, whose=whose, node=node)


def _init_statuses(status: JsonObject) -> Sequence[JsonObject]:
    found: Sequence[JsonObject] = status.get("initContainerStatuses") or ()
    return found


def _sidecars(pod: JsonObject) -> frozenset[str]:
    """Return the names of init containers that run to the end (Kubernetes 1.28 and later)."""
    found = (pod.get("spec") or {}).get("initContainers") or ()
    return frozenset(one.get("name") or "" for one in found if one.get("restartPolicy") == "Always")


def _exit_text(ended: JsonObject) -> str:
    """Return exit code, signal, reason and message of a terminated container."""
    code = int(ended.get("exitCode", 0))
    signal = ended.get("signal") or (code - 128 if 128 < code < 160 else 0)
    exit_text = f"exit code {code}" + (f" (signal {signal})" if signal else "")
    rest = reason_text(ended.get("reason") if ended.get("reason") != "Error" else "", ended.get("message"))
    return f"{exit_text}: {rest}" if rest else exit_text


def _scheduling_cause(status: JsonObject) -> FailureCause | None:
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            reason = condition.get("reason") or ""
            return find_cause("unscheduled", reason, reason_text(reason, condition.get("message")))
    return None


def _not_ready_cause(status: JsonObject, node: str) -> FailureCause | None:
    """Return the cause if the node is lost: only then is a pod not ready whose containers are."""
    conditions = {one.get("type"): one.get("status") for one in status.get("conditions") or ()}
    if conditions.get("ContainersReady") != "True" or conditions.get("Ready") in (None, "True"):
        return None
    return find_cause("unready", "", f"the node {node} is lost: it is marked as not ready", node=node)


def _unfit(status: JsonObject) -> str:
    ended = _terminated(_container(status.get("initContainerStatuses"), PROBE))
    if ended and int(ended.get("exitCode", 0)) == EXIT_UNFIT:
        return reason_text("", ended.get("message")) or f"the probe ended with exit code {EXIT_UNFIT}"
    return ""


def reason_text(reason: object, message: object) -> str:
    """Return a reason and its message on one line.

    A message from a container's log may contain lines of our own protocol (``node/batch/pod_stream.py``), which are left out.
    """
    text = re.sub(r"\x1e[^\n]*", "", str(message or ""))
    shown = [str(part).strip() for part in (reason, text) if part and str(part).strip()]
    return " ".join(": ".join(shown).split())[:2000]


def latest_event(
    events: Sequence[JsonObject], reasons: frozenset[str], *, before: frozenset[str] = frozenset()
) -> str:
    """Return the text of the latest event with one of *reasons*; empty if there is none.

    An event that is followed by one with a reason in *before* does not count.
    """
    # Times are whole seconds: of two events in one second, one in *before* counts as later.
    for event in sorted(events, key=lambda one: (event_time(one), one.get("reason") in before), reverse=True):
        if event.get("reason") in before:
            return ""
        if event.get("reason") in reasons:
            return reason_text(event.get("reason"), event.get("message"))
    return ""


def _container(statuses: Sequence[JsonObject] | None, name: str) -> JsonObject:
    return next((one for one in statuses or () if one.get("name") == name), {})


def _state(container: JsonObject) -> JsonObject:
    found: JsonObject = container.get("state") or {}
    return found


def _terminated(container: JsonObject) -> JsonObject:
    found: JsonObject = _state(container).get("terminated") or {}
    return found


@dataclass
class PatienceTracker:
    """Since when each cause of one allocation lasts. Times are of a monotonic clock, in seconds.

    Args:
        limits: name of a patience -> seconds; missing names use ``unknown``.
    """

    limits: Mapping[str, float]
    _since: dict[str, float] = field(default_factory=dict)
    _latest: dict[str, FailureCause] = field(default_factory=dict)

    def update(self, causes: Mapping[str, FailureCause], now: float) -> None:
        """Note the causes at *now*, by object's name. A cause that is missing starts anew when it returns.

        The clock continues while the outcome is the same: a failing image alternates between ErrImagePull and ImagePullBackOff.
        """
        self._latest = {f"{name} {cause.outcome}": cause for name, cause in causes.items()}
        self._since = {key: self._since.get(key, now) for key in self._latest}

    def overdue(self, now: float) -> FailureCause | None:
        """Return the cause that has exceeded its limit most, or None."""
        late = [
            (self._limit(cause) - (now - self._since[key]), key)
            for key, cause in self._latest.items()
            if now - self._since[key] >= self._limit(cause)
        ]
        return self._latest[min(late)[1]] if late else None

    def next_deadline(self) -> float | None:
        """Return when the next cause becomes overdue; None if there is no cause."""
        return min(
            (self._since[key] + self._limit(cause) for key, cause in self._latest.items()), default=None
        )

    def waited(self, cause: FailureCause, now: float) -> float:
        """Return how long *cause* has lasted, in seconds."""
        since = [self._since[key] for key, one in self._latest.items() if one == cause]
        return now - min(since, default=now)

    def _limit(self, cause: FailureCause) -> float:
        if not cause.patience:
            return 0.0
        return self.limits.get(cause.patience, self.limits.get("unknown", 0.0))
