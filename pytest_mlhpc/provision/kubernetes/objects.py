"""Kubernetes objects as plain JSON: kinds, names and labels; merging, and fields that a server dropped.

Open it to see how our objects are named and found, or how ours are merged into a user's manifest.
Nothing here calls a server. Only :func:`set_at` and :func:`remove_at` change their arguments.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, Final
from urllib.parse import quote

from pytest_mlhpc.jobs.ledger_entry import job_name
from pytest_mlhpc.node.protocol.plan import Plan

#: An object as JSON: one that is sent, and one that is only read.
Manifest = dict[str, Any]
JsonObject = Mapping[str, Any]


@dataclass(frozen=True)
class Resource:
    """One kind as the server names it. ``group`` is empty for the core group; ``plural`` is used in paths."""

    group: str
    version: str
    kind: str
    plural: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """The value of a manifest's ``apiVersion``."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def __str__(self) -> str:
        """Return kubectl's name: ``pods``, ``jobs.batch``."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def path(self, namespace: str, name: str = "", subresource: str = "") -> str:
        """Return the path of the collection, one object, or a subresource like ``log``; each segment is quoted."""
        pieces = ["apis", self.group, self.version] if self.group else ["api", self.version]
        if self.namespaced:
            pieces += ["namespaces", namespace]
        pieces.append(self.plural)
        if name:
            pieces.append(name)
        if subresource:
            pieces.append(subresource)
        return "/" + "/".join(quote(piece, safe="") for piece in pieces)


POD = Resource("", "v1", "Pod", "pods")
JOB = Resource("batch", "v1", "Job", "jobs")
SECRET = Resource("", "v1", "Secret", "secrets")
SERVICE = Resource("", "v1", "Service", "services")
EVENT = Resource("", "v1", "Event", "events")
NODE = Resource("", "v1", "Node", "nodes", namespaced=False)


@dataclass(frozen=True)
class ObjectRef:
    """One object. ``uid`` distinguishes it from a later object of the same name; empty if unknown."""

    resource: Resource
    namespace: str
    name: str
    uid: str = ""

    def __str__(self) -> str:
        """Return ``jobs.batch NAMESPACE/NAME``."""
        place = f"{self.namespace}/" if self.resource.namespaced else ""
        return f"{self.resource} {place}{self.name}"


def object_ref(resource: Resource, manifest: JsonObject) -> ObjectRef:
    """Return the reference of an object that the server returned; missing fields are empty."""
    namespace, name, uid = (str(metadata_of(manifest).get(key) or "") for key in ("namespace", "name", "uid"))
    return ObjectRef(resource, namespace, name, uid)


def metadata_of(content: JsonObject) -> JsonObject:
    """Return an object's metadata; empty if there is none."""
    found = content.get("metadata")
    return found if isinstance(found, Mapping) else {}


def event_time(event: JsonObject) -> str:
    """Return an event's last time; RFC 3339 in UTC sorts as text."""
    created = metadata_of(event).get("creationTimestamp")
    return str(event.get("lastTimestamp") or event.get("eventTime") or created or "")


#: A recommended label of Kubernetes (kubernetes.io/docs, "Recommended Labels").
MANAGED_BY: Final = "app.kubernetes.io/managed-by"
MANAGER: Final = "pytest-mlhpc"
SESSION: Final = "pytest-mlhpc/session"
ALLOCATION: Final = "pytest-mlhpc/allocation"
RUN: Final = "pytest-mlhpc/run"
OWNER: Final = "pytest-mlhpc/owner"
RANK: Final = "pytest-mlhpc/rank"
#: Annotation by which rank 0's address reaches the other pods.
LEADER: Final = "pytest-mlhpc/leader"
#: Annotation of retained objects: until when, in seconds since 1970.
KEEP_UNTIL: Final = "pytest-mlhpc/keep-until"
#: Longest value of a label, and longest name of a pod's host (RFC 1123 label).
MAX_LABEL: Final = 63


@dataclass(frozen=True)
class Identity:
    """The owner of an allocation: the session's id and the user's name."""

    session: str
    owner: str


def label_safe(text: str) -> str:
    """Return *text* as a label value: other characters become ``-``, cut to 63 characters; may be empty."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text)[:MAX_LABEL].strip("._-")


def object_labels(plan: Plan, identity: Identity) -> Mapping[str, str]:
    """Return the labels of all objects of *plan*'s allocation, pods included."""
    return {
        MANAGED_BY: MANAGER,
        SESSION: label_safe(identity.session),
        ALLOCATION: plan.allocation_id,
        RUN: plan.runs[0].run_id if plan.runs else plan.allocation_id,
        OWNER: label_safe(identity.owner) or "unknown",
    }


def label_selector(**labels: str) -> str:
    """Return a label selector for our objects; ``label_selector(allocation=ID)``, ``session=``, ``owner=``, ``run=``."""
    ours = {f"pytest-mlhpc/{name}": label_safe(value) for name, value in labels.items()}
    return ",".join(f"{name}={value}" for name, value in {MANAGED_BY: MANAGER, **ours}.items())


def object_name(allocation_id: str, round_: int = 0) -> str:
    """Return the name of an allocation's objects, ``mlhpc-<id>``; names of pods have a suffix.

    *round_* counts how often the allocation was provisioned again.
    """
    return f"{job_name(allocation_id)}-r{round_}" if round_ else job_name(allocation_id)


#: List -> the field that identifies its items (patchMergeKey of k8s.io/api/core/v1).
LIST_KEYS: Final[Mapping[str, str]] = {
    "containers": "name", "initContainers": "name", "ephemeralContainers": "name", "volumes": "name", "env": "name",
    "imagePullSecrets": "name", "volumeMounts": "mountPath", "volumeDevices": "devicePath", "ports": "containerPort",
    "hostAliases": "ip", "replicatedJobs": "name", "ownerReferences": "uid", "topologySpreadConstraints": "topologyKey",
}  # fmt: skip
#: Items of these lists name one source, so they are replaced whole instead of merged.
_ATOMIC_ITEMS: Final = frozenset({"env", "volumes", "volumeMounts"})


@dataclass(frozen=True)
class FixedValue:
    """A value of ours that the user's manifest may repeat but not change."""

    value: Any


@dataclass(frozen=True)
class ManifestConflict:
    """A value of the user's manifest that contradicts a :class:`FixedValue`, or has the wrong type."""

    path: str
    theirs: Any
    ours: Any
    expected: str = ""  #: the expected type, if the value has another one

    def __str__(self) -> str:
        """Return one line for people."""
        if self.expected:
            return f"{self.path}: the manifest says {self.theirs!r:.80}, which should be {self.expected}"
        return f"{self.path}: the manifest says {self.theirs!r:.80}, but {self.ours!r:.80} is set for each run; leave it out"


def merge(theirs: Any, ours: Any, conflicts: list[ManifestConflict], path: str = "") -> Any:
    """Return *ours* merged into a copy of *theirs*; contradictions are appended to *conflicts*.

    The user's values win, except over a :class:`FixedValue`. Lists of named items (containers, volumes, variables, mounts)
    are merged item by item, as Kubernetes' own patches do. Other lists get ours appended.
    """
    if isinstance(ours, FixedValue):
        return _merge_must(theirs, ours.value, conflicts, path)
    if theirs is None:
        return without_must(ours)
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        merged = deepcopy(dict(theirs))
        for key, value in ours.items():
            merged[key] = merge(merged.get(key), value, conflicts, f"{path}.{key}" if path else key)
        return merged
    if isinstance(theirs, list) and isinstance(ours, list):
        return _merge_lists(theirs, ours, conflicts, path)
    for form, expected in ((Mapping, "a mapping"), (list, "a list")):
        if isinstance(ours, form):
            conflicts.append(ManifestConflict(path, theirs, None, expected))
            return without_must(ours)
    return deepcopy(theirs)


def list_key(name: str, *lists: Sequence[Any]) -> str | None:
    """Return the field that identifies items of the list *name*: from LIST_KEYS, else ``name`` if all items have one."""
    if name in LIST_KEYS:
        return LIST_KEYS[name]
    items = [one for some in lists for one in some]
    return "name" if items and all(isinstance(one, Mapping) and "name" in one for one in items) else None


def mark_must(value: Any) -> Any:
    """Return *value* with each leaf as a :class:`FixedValue`, except the names that identify list items."""
    if isinstance(value, Mapping):
        return {key: mark_must(one) for key, one in value.items()}
    if isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
        return [{k: one if k == "name" else mark_must(one) for k, one in item.items()} for item in value]
    return FixedValue(value)


def without_must(value: Any) -> Any:
    """Return a copy of *value* without :class:`FixedValue`."""
    if isinstance(value, FixedValue):
        return without_must(value.value)
    if isinstance(value, Mapping):
        return {key: without_must(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_must(one) for one in value]
    return value


def _merge_must(theirs: Any, ours: Any, conflicts: list[ManifestConflict], path: str) -> Any:
    required = without_must(ours)
    if isinstance(required, Mapping) and isinstance(theirs, Mapping):
        return merge(theirs, {key: FixedValue(value) for key, value in required.items()}, conflicts, path)
    if theirs is not None and theirs != required and str(theirs) != str(required):
        conflicts.append(ManifestConflict(path, theirs, required))
    return required


def _merge_lists(
    theirs: list[Any], ours: Sequence[Any], conflicts: list[ManifestConflict], path: str
) -> list[Any]:
    name = path.rpartition(".")[2]
    key = list_key(name, theirs, without_must(ours))
    if key is None:
        return [*deepcopy(theirs), *(one for one in without_must(ours) if one not in theirs)]
    merged = [deepcopy(one) for one in theirs if isinstance(one, Mapping)]
    conflicts += [
        ManifestConflict(f"{path}[{index}]", one, None, "a mapping")
        for index, one in enumerate(theirs)
        if not isinstance(one, Mapping)
    ]
    for one in ours:
        value = without_must(one)
        place = next((i for i, old in enumerate(merged) if _has_key(old, key, value.get(key))), None)
        if place is None:
            merged.append(value)
        elif isinstance(one, FixedValue) and name in _ATOMIC_ITEMS:
            if merged[place] != value:
                conflicts.append(ManifestConflict(f"{path}[{value[key]}]", merged[place], value))
            merged[place] = value
        elif name not in _ATOMIC_ITEMS:
            merged[place] = merge(merged[place], one, conflicts, f"{path}[{value[key]}]")
    return merged


def _has_key(item: Any, key: str, name: Any) -> bool:
    return isinstance(item, Mapping) and item.get(key) == name


#: Keys of mappings; names, or numbers as text, of list items.
KeyPath = tuple[str, ...]


def value_at(found: Any, path: KeyPath) -> Any:
    """Return the value at *path*, or None."""
    for part in path:
        if isinstance(found, Mapping):
            found = found.get(part)
        elif isinstance(found, list):
            found = list_item(found, part)
        else:
            return None
    return found


def list_item(items: list[Any], part: str) -> Any:
    """Return the list item with the name *part*, else with that index; None if there is none."""
    for one in items:
        if isinstance(one, Mapping) and one.get("name") == part:
            return one
    return items[int(part)] if part.isdigit() and int(part) < len(items) else None


def overlay(frame: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return *frame* with a copy of *more* over it, mapping by mapping."""
    for key, value in more.items():
        old = frame.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        frame[key] = overlay(dict(old), value) if both else deepcopy(value)  # type: ignore[arg-type]  # `both` says so
    return frame


def set_at(found: Any, path: KeyPath, value: Any, conflicts: list[ManifestConflict]) -> None:
    """Set the value at *path*. Missing mappings and list items are created."""
    for index, part in enumerate(path):
        last = index == len(path) - 1
        if isinstance(found, list):
            inner = list_item(found, part)
            if last:
                _replace_item(found, inner, value)
                return
            if not isinstance(inner, (dict, list)):
                found.append(inner := {"name": part})
        elif last:
            found[part] = value
            return
        else:
            inner = found.get(part)
            if not isinstance(inner, (dict, list)):
                if inner is not None:
                    conflicts.append(ManifestConflict(".".join(path[: index + 1]), inner, None, "a mapping"))
                inner = found[part] = {}
        found = inner


def remove_at(found: Any, path: KeyPath) -> None:
    """Remove the value at *path*, if there is one."""
    holder = value_at(found, path[:-1])
    if path and isinstance(holder, dict):
        holder.pop(path[-1], None)
    elif path and isinstance(holder, list) and (found := list_item(holder, path[-1])) is not None:
        holder.remove(found)


def _replace_item(items: list[Any], old: Any, value: Any) -> None:
    if old is None:
        items.append(value)
    else:
        items[items.index(old)] = value


#: Fields that may be lost: texts for people, and hints to the server.
_HARMLESS: Final = frozenset({"metadata.creationTimestamp", "metadata.managedFields", "status"})

#: Last path segments of fields that no webhook may change, as that would change the run.
_EXACT: Final = (
    "completionMode", "completions", "parallelism", "backoffLimit", "restartPolicy", "command", "args", "replicas",
)  # fmt: skip

#: Factors of quantities (kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity).
_SUFFIXES: Final[Mapping[str, Decimal]] = {
    "": Decimal(1), "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "k": Decimal(10**3),
    "M": Decimal(10**6), "G": Decimal(10**9), "T": Decimal(10**12), "P": Decimal(10**15), "E": Decimal(10**18),
    "Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30), "Ti": Decimal(2**40), "Pi": Decimal(2**50),
    "Ei": Decimal(2**60),
}  # fmt: skip
_QUANTITY = re.compile(rf"([+-]?[0-9.]+(?:[eE][+-]?[0-9]{{1,3}})?)({'|'.join(_SUFFIXES)})\Z")


def dropped_fields(sent: Mapping[str, Any], stored: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the paths of fields that were *sent* and are not *stored*; old servers drop unknown fields silently.

    Defaults and additions of the server, other spellings of quantities, and empty values do not count.
    A changed value counts, with both values, if it would change the run (``_EXACT``).
    """
    return tuple(_compare(sent, stored, ""))


def same_quantity(one: Any, other: Any) -> bool:
    """Return whether two quantities are equal: ``1000m`` and 1, ``1Gi`` and 1073741824."""
    amount = quantity(one)
    return amount is not None and amount == quantity(other)


def quantity(value: Any) -> Decimal | None:
    """Return the amount of a Kubernetes quantity, or None."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return None
    match = _QUANTITY.match(str(value))
    try:
        return Decimal(match[1]) * _SUFFIXES[match[2]] if match else None
    except InvalidOperation:
        return None


def _compare(sent: Any, stored: Any, path: str) -> Iterator[str]:
    if path in _HARMLESS or _is_empty(sent):
        return
    if isinstance(sent, Mapping):
        if not isinstance(stored, Mapping):
            yield from [path] if list(_compare(sent, {}, path)) else []
            return
        for key, value in sent.items():
            yield from _compare(value, stored.get(key), f"{path}.{key}" if path else str(key))
    elif isinstance(sent, list):
        yield from _compare_lists(sent, stored, path)
    elif _is_empty(stored):
        # Go leaves out what is false, 0 or empty; where that is not the default, _EXACT finds it.
        if sent not in (False, 0):
            yield path
    elif _is_exact(path) and not _same_value(sent, stored):
        yield f"{path} ({sent!r} became {stored!r})"


def _compare_lists(sent: list[Any], stored: Any, path: str) -> Iterator[str]:
    if not isinstance(stored, list) or not stored:
        yield path
        return
    name = path.rpartition(".")[2]
    key = list_key(name, sent, stored)
    if key is not None:
        for one in sent:
            if not isinstance(one, Mapping):
                continue
            where = f"{path}[{one.get(key)}]"
            match = next(
                (other for other in stored if isinstance(other, Mapping) and other.get(key) == one.get(key)),
                None,
            )
            yield from [where] if match is None else _compare(one, match, where)
    elif _is_exact(path):
        if [str(one) for one in sent] != [str(one) for one in stored]:
            yield f"{path} ({sent!r} became {stored!r})"
    elif all(isinstance(one, Mapping) for one in sent):
        for index, one in enumerate(sent):
            # Some webhooks add items in front: it is enough that one has all of ours.
            if not any(not list(_compare(one, other, "")) and _scalars_agree(one, other) for other in stored):
                other = stored[index] if index < len(stored) else None
                yield from list(_compare(one, other, f"{path}[{index}]")) or [f"{path}[{index}]"]
    else:
        yield from (f"{path}[{index}]" for index, one in enumerate(sent) if one not in stored)


def _scalars_agree(sent: Any, stored: Any) -> bool:
    """Return whether all scalars that both have are equal."""
    if isinstance(sent, Mapping) and isinstance(stored, Mapping):
        return all(_scalars_agree(value, stored[key]) for key, value in sent.items() if key in stored)
    if isinstance(sent, (Mapping, list)) or isinstance(stored, (Mapping, list)):
        return True
    return _same_value(sent, stored)


def _is_exact(path: str) -> bool:
    return path.rpartition(".")[2] in _EXACT or path.endswith(".suspend")


def _same_value(sent: Any, stored: Any) -> bool:
    return sent == stored or str(sent) == str(stored) or same_quantity(sent, stored)


def _is_empty(value: Any) -> bool:
    """Return whether *value* is null, or holds only nulls."""
    if isinstance(value, Mapping):
        return all(_is_empty(one) for one in value.values())
    if isinstance(value, list):
        return all(_is_empty(one) for one in value)
    return value is None or value == ""
