"""Kinds of workload, as data: where their pod templates are, how ranks are found, what their status means.

Open it to see how one provisioner serves Jobs, bare pods and operators' kinds. ``kinds/*.yaml`` describe the shipped
ones, in the form of ``schema.CustomKind``. Objects are dicts as in JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any, Final

from pytest_mlhpc.errors import UsageError, did_you_mean
from pytest_mlhpc.provision.kubernetes.causes import FailureCause, find_cause, reason_text
from pytest_mlhpc.provision.kubernetes.objects import RANK, KeyPath, Resource, value_at
from pytest_mlhpc.provision.kubernetes.settings import KubernetesSettings

#: One file for each kind, in the form of ``custom:`` (``schema.CustomKind``).
_FOLDER: Final = resources.files(__package__) / "kinds"


@dataclass(frozen=True)
class TemplateRule:
    """Pods of one template. ``pods`` is their number, None: all that no other template has; ``count``: where it is written.

    ``remove`` is taken out of the object if this template has no pods.
    """

    path: KeyPath
    pods: int | None = None
    count: tuple[KeyPath, ...] = ()
    remove: KeyPath = ()


@dataclass(frozen=True)
class RankRule:
    """Where a pod's rank is found: an annotation, a label, or a variable that the kind's operator sets."""

    annotation: str = ""
    label: str = ""
    variable: str = ""

    @property
    def field_path(self) -> str:
        """The field of the pod that has it, where no variable does."""
        kind, name = ("annotations", self.annotation) if self.annotation else ("labels", self.label)
        return f"metadata.{kind}['{name}']"


@dataclass(frozen=True)
class StatusRule:
    """The meaning of condition types, or of values at ``phase``. Names are compared exactly."""

    conditions: KeyPath = ("status", "conditions")
    phase: KeyPath = ()
    succeeded: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    suspended: tuple[str, ...] = ()
    running: tuple[str, ...] = ()


@dataclass(frozen=True)
class QueueRule:
    """The object of a queueing system that says why a workload waits.

    Its *label* holds the workload's uid. ``admitted`` conditions have to become true; ``evicted`` ones are true once the
    queue has taken the nodes back.
    """

    resource: Resource
    label: str
    admitted: tuple[str, ...]
    evicted: tuple[str, ...] = ()

    def waiting_reason(self, found: Mapping[str, Any]) -> str:
        """Return why *found* is not admitted, or was evicted; empty if neither."""
        conditions = value_at(found, ("status", "conditions")) or ()
        for condition in conditions:
            if condition.get("type") in self.evicted and condition.get("status") == "True":
                return _condition_text(condition)
        for condition in conditions:
            if condition.get("type") in self.admitted and condition.get("status") == "False":
                return _condition_text(condition)
        return ""


@dataclass(frozen=True)
class WorkloadStatus:
    """The state of a workload: waiting, suspended, running, succeeded or failed, with the cluster's text.

    ``cause`` says why it does not go on, if its pods cannot tell.
    """

    state: str
    text: str = ""
    cause: FailureCause | None = None


@dataclass(frozen=True)
class WorkloadKind:
    """One kind of workload.

    ``each_pod``: each pod is an object of its own. ``manifest`` holds the kind's own fields; a user's manifest may not change
    those in ``must``, and ``several`` are more of these for several pods. ``most`` is the largest number of pods, 0: any.
    ``container`` runs our agent. ``deadline``, ``ttl``, ``suspend`` and ``devices`` are paths, empty if the kind has no such
    field. ``leader`` is rank 0's host name with ``{name}`` for the object's; ``own_service``: the operator makes it
    resolvable. ``queue_label`` names the queue and is required. ``limit_label`` holds the time limit in seconds.
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
    deadline: KeyPath = ()
    ttl: KeyPath = ()
    suspend: KeyPath = ()
    devices: KeyPath = ()
    leader: str = ""
    queue_label: str = ""
    queue: QueueRule | None = None
    limit_label: str = ""
    own_service: bool = False

    def status_of(self, found: Mapping[str, Any]) -> WorkloadStatus:
        """Return the status of the workload object *found*."""
        rule = self.status
        conditions = {
            state: _true_condition(found, rule, names) for state, names in _conditions_by_state(rule)
        }
        for state in ("failed", "succeeded"):
            if (condition := conditions[state]) is not None:
                text = _condition_text(condition)
                reason = str(condition.get("reason") or "")
                return WorkloadStatus(
                    state, text, find_cause("workload", reason, text) if state == "failed" else None
                )
        suspended = conditions["suspended"] or (
            {} if self.suspend and value_at(found, self.suspend) is True else None
        )
        if suspended is not None:
            text = (
                _condition_text(suspended)
                or f"{self.resource.kind} is suspended: its queue has not let it begin"
            )
            return WorkloadStatus("suspended", text, FailureCause("never_scheduled", text, "admission"))
        condition = conditions["running"]
        return WorkloadStatus(
            "running" if condition is not None else "waiting", _condition_text(condition or {})
        )

    def rank_of(self, pod: Mapping[str, Any]) -> int | None:
        """Return the rank of *pod* by our label, else by the kind's rule; None if it has none (yet)."""
        meta = pod.get("metadata") or {}
        labels, annotations = meta.get("labels") or {}, meta.get("annotations") or {}
        rank = labels.get(RANK)
        if rank is None and self.rank.annotation:
            rank = annotations.get(self.rank.annotation)
        if rank is None and self.rank.label:
            rank = labels.get(self.rank.label)
        if rank is None and self.rank.variable:
            rank = _variable_value(pod, self.rank.variable)
        return int(rank) if rank is not None and str(rank).isascii() and str(rank).isdigit() else None


def _conditions_by_state(rule: StatusRule) -> Iterable[tuple[str, tuple[str, ...]]]:
    return (
        ("failed", rule.failed), ("succeeded", rule.succeeded), ("suspended", rule.suspended), ("running", rule.running),
    )  # fmt: skip


def _true_condition(
    found: Mapping[str, Any], rule: StatusRule, names: tuple[str, ...]
) -> Mapping[str, Any] | None:
    """Return the true condition with one of *names*, or one made from the phase."""
    conditions = value_at(found, rule.conditions)
    for condition in conditions if isinstance(conditions, list) else ():
        if (
            isinstance(condition, Mapping)
            and condition.get("type") in names
            and condition.get("status") == "True"
        ):
            return condition
    phase = value_at(found, rule.phase) if rule.phase else None
    if isinstance(phase, str) and phase in names:
        status = found.get("status") or {}
        return {"reason": status.get("reason") or phase, "message": status.get("message")}
    return None


def _condition_text(condition: Mapping[str, Any]) -> str:
    return reason_text(condition.get("reason") or condition.get("type"), condition.get("message"))


def _variable_value(pod: Mapping[str, Any], name: str) -> str | None:
    for container in (pod.get("spec") or {}).get("containers") or ():
        for one in container.get("env") or ():
            if one.get("name") == name and "value" in one:
                return str(one["value"])
    return None


def builtin_kinds() -> tuple[str, ...]:
    """Return the names of the shipped kinds."""
    found = (file.name for file in _FOLDER.iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in found if name.endswith(".yaml")))


def unknown_kind(name: str) -> str:
    """Return the text for a kind that is not shipped."""
    did = did_you_mean(name, builtin_kinds()) or "; describe it under `custom`"
    return f"kind {name!r} is not one of {', '.join(builtin_kinds())}{did}"


def kind_of(settings: KubernetesSettings) -> WorkloadKind:
    """Return the kind that *settings* name: the site's own, else a shipped one.

    Raises:
        UsageError: there is no such kind.
    """
    if settings.custom:
        return _with_container(make_kind(settings.kind, settings.custom), settings.manifest)
    if settings.kind not in builtin_kinds():
        raise UsageError(unknown_kind(settings.kind))
    return _with_container(builtin_kind(settings.kind), settings.manifest)


def _with_container(kind: WorkloadKind, manifest: Mapping[str, Any]) -> WorkloadKind:
    """Return *kind* with the container of *manifest* that runs our agent: the kind's, ``worker``, or the first."""
    containers = value_at(manifest, (*kind.templates[0].path, "spec", "containers"))
    found = (
        [one.get("name") for one in containers if isinstance(one, Mapping)]
        if isinstance(containers, list)
        else []
    )
    names = [name for name in found if isinstance(name, str) and name]
    if not names or kind.container in names:
        return kind
    return replace(kind, container="worker" if "worker" in names else names[0])


@cache
def builtin_kind(name: str) -> WorkloadKind:
    """Return the kind of the file *name*.yaml."""
    import yaml

    text = _FOLDER.joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    return make_kind(name, yaml.safe_load(text))


#: Keys of :class:`schema.CustomKind` that are paths, and those that are parts of a kind.
_PATHS: Final = frozenset({"path", "remove", "conditions", "phase", "deadline", "ttl", "suspend", "devices"})
_PARTS: Final = {"resource": Resource, "rank": RankRule, "status": StatusRule, "queue": QueueRule}


def make_kind(name: str, given: Mapping[str, Any]) -> WorkloadKind:
    """Return the kind that a mapping describes, which ``schema.CustomKind`` has checked."""
    return WorkloadKind(name=name, **_fields(given))


def _fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a part of a kind; what is not given has its default."""
    found: dict[str, Any] = {}
    for key, value in given.items():
        if value is None:
            continue
        if key in _PARTS:
            found[key] = _PARTS[key](**_fields(value))
        elif key == "templates":
            found[key] = tuple(TemplateRule(**_fields(one)) for one in value)
        elif key == "count":
            found[key] = tuple(map(parse_path, value))
        elif key in _PATHS:
            found[key] = parse_path(value)
        else:
            found[key] = tuple(value) if isinstance(value, list) else value
    return found


def parse_path(text: str) -> KeyPath:
    """Return the segments of ``spec.template``; none of an empty text."""
    return tuple(text.split(".")) if text else ()
