"""What is known of one kind of workload, and what its objects tell. Pure; objects are dicts as JSON has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pytest_mlhpc.provision.kubernetes.causes import Cause, words
from pytest_mlhpc.provision.kubernetes.labels import RANK
from pytest_mlhpc.provision.kubernetes.paths import Path, at
from pytest_mlhpc.provision.kubernetes.resources import Resource

#: Reasons of a workload's failure -> outcome. Kubernetes' k8s.io/api/batch/v1, and what operators have taken over.
_REASONS: Final = {"DeadlineExceeded": "time_limit"}
#: The failed pod says more than these do, so that they are no cause of their own.
_SECOND_HAND: Final = frozenset(
    {"BackoffLimitExceeded", "PodFailurePolicy", "FailedJobs", "PyTorchJobFailed", "JobFailed"}
)


@dataclass(frozen=True)
class TemplateRule:
    """Pods of one template. ``pods``: how many, None: all that no other template has. ``count``: where that is written.

    ``remove``: what is taken out of the object where this template has no pods.
    """

    path: Path
    pods: int | None = None
    count: tuple[Path, ...] = ()
    remove: Path = ()


@dataclass(frozen=True)
class RankRule:
    """What holds the rank of a pod: an annotation or a label of it, or a variable that the kind's operator sets."""

    annotation: str = ""
    label: str = ""
    variable: str = ""


@dataclass(frozen=True)
class StatusRule:
    """Which condition types (or values at ``phase``) mean what. Names are compared exactly."""

    conditions: Path = ("status", "conditions")
    phase: Path = ()
    succeeded: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    suspended: tuple[str, ...] = ()
    running: tuple[str, ...] = ()


@dataclass(frozen=True)
class QueueRule:
    """The object of a queueing system that says why a workload waits.

    It carries the workload's uid as its *label*; ``admitted`` are the conditions that have to become true, ``evicted`` those
    that are true once it has taken the nodes back.
    """

    resource: Resource
    label: str
    admitted: tuple[str, ...]
    evicted: tuple[str, ...] = ()

    def waits_for(self, found: Mapping[str, Any]) -> str:
        """Return what the queue says of the object *found* that is not admitted yet or was evicted, or an empty string."""
        conditions = at(found, ("status", "conditions")) or ()
        for condition in conditions:
            if condition.get("type") in self.evicted and condition.get("status") == "True":
                return _words(condition)
        for condition in conditions:
            if condition.get("type") in self.admitted and condition.get("status") == "False":
                return _words(condition)
        return ""


@dataclass(frozen=True)
class WorkloadStatus:
    """Where a workload stands: waiting, suspended, running, succeeded or failed, in the cluster's own words.

    ``cause``: why it does not go on, where its pods would not say that themselves.
    """

    state: str
    words: str = ""
    cause: Cause | None = None

    @property
    def over(self) -> bool:
        """Whether nothing more will happen."""
        return self.state in {"succeeded", "failed"}


@dataclass(frozen=True)
class Kind:
    """One kind of workload.

    ``each_pod``: an object is made for each pod, and is that pod. ``manifest`` are the kind's own fields beside pods,
    ``must`` those that a caller's manifest may not change, ``several`` more of these for several pods; ``most``: the most pods that it can have, 0: any number. ``container`` is the
    name of the container that runs our agent. ``deadline``, ``ttl``, ``suspend`` and ``devices`` say where these values are
    written, empty where the kind has no such field. ``leader`` is the host name of rank 0 as other pods see it, in which
    ``{name}`` is the object's; ``own_service``: its operator sees to that name. ``queue_label`` names the queue, and has to be given. ``limit_label`` holds the time limit in
    seconds.
    """

    name: str
    resource: Resource
    templates: tuple[TemplateRule, ...]
    rank: RankRule = RankRule()
    status: StatusRule = StatusRule()
    each_pod: bool = False
    most: int = 0
    container: str = "worker"
    manifest: Mapping[str, Any] = field(default_factory=dict)
    must: Mapping[str, Any] = field(default_factory=dict)
    several: Mapping[str, Any] = field(default_factory=dict)
    deadline: Path = ()
    ttl: Path = ()
    suspend: Path = ()
    devices: Path = ()
    leader: str = ""
    queue_label: str = ""
    queue: QueueRule | None = None
    limit_label: str = ""
    own_service: bool = False

    def progress(self, found: Mapping[str, Any]) -> WorkloadStatus:
        """Return what the workload object *found* says of itself."""
        rule = self.status
        told = {state: _first(found, rule, names) for state, names in _states(rule)}
        for state in ("failed", "succeeded"):
            if (condition := told[state]) is not None:
                text = _words(condition)
                return WorkloadStatus(state, text, _cause(condition, text) if state == "failed" else None)
        held = told["suspended"] or ({} if self.suspend and at(found, self.suspend) is True else None)
        if held is not None:
            text = _words(held) or f"{self.resource.kind} is suspended: its queue has not let it begin"
            return WorkloadStatus("suspended", text, Cause("never_scheduled", text, "admission"))
        condition = told["running"]
        return WorkloadStatus("running" if condition is not None else "waiting", _words(condition or {}))

    def rank_of(self, pod: Mapping[str, Any]) -> int | None:
        """Return the rank of *pod* by our own label, else by the kind's rule; None: it has none (yet)."""
        meta = pod.get("metadata") or {}
        labels, annotations = meta.get("labels") or {}, meta.get("annotations") or {}
        said = labels.get(RANK)
        if said is None and self.rank.annotation:
            said = annotations.get(self.rank.annotation)
        if said is None and self.rank.label:
            said = labels.get(self.rank.label)
        if said is None and self.rank.variable:
            said = _variable(pod, self.rank.variable)
        return int(said) if said is not None and str(said).isascii() and str(said).isdigit() else None


def _states(rule: StatusRule) -> Iterable[tuple[str, tuple[str, ...]]]:
    return (
        ("failed", rule.failed), ("succeeded", rule.succeeded), ("suspended", rule.suspended), ("running", rule.running),
    )  # fmt: skip


def _first(found: Mapping[str, Any], rule: StatusRule, names: tuple[str, ...]) -> Mapping[str, Any] | None:
    """Return the true condition of one of these *names*, or one made of the phase."""
    conditions = at(found, rule.conditions)
    for condition in conditions if isinstance(conditions, list) else ():
        if (
            isinstance(condition, Mapping)
            and condition.get("type") in names
            and condition.get("status") == "True"
        ):
            return condition
    phase = at(found, rule.phase) if rule.phase else None
    if isinstance(phase, str) and phase in names:
        status = found.get("status") or {}
        return {"reason": status.get("reason") or phase, "message": status.get("message")}
    return None


def _words(condition: Mapping[str, Any]) -> str:
    return words(condition.get("reason") or condition.get("type"), condition.get("message"))


def _cause(condition: Mapping[str, Any], text: str) -> Cause | None:
    reason = str(condition.get("reason") or "")
    return None if reason in _SECOND_HAND else Cause(_REASONS.get(reason, "rejected"), text)


def _variable(pod: Mapping[str, Any], name: str) -> str | None:
    for container in (pod.get("spec") or {}).get("containers") or ():
        for one in container.get("env") or ():
            if one.get("name") == name and "value" in one:
                return str(one["value"])
    return None
