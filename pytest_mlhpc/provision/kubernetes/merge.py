"""Ours into a copy of the caller's manifest. Pure: neither side is changed.

The caller's values win, but where ours is a :class:`Must`: then another value is a conflict, named by its path. Lists whose
items have names (containers, volumes, variables, mounts) are merged item by item, as Kubernetes' own patches are; of
other lists the caller's is followed by what only ours has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final

#: Lists whose items are told apart by one field (patchMergeKey of k8s.io/api/core/v1).
KEYS: Final[Mapping[str, str]] = {
    "containers": "name", "initContainers": "name", "ephemeralContainers": "name", "volumes": "name", "env": "name",
    "imagePullSecrets": "name", "volumeMounts": "mountPath", "volumeDevices": "devicePath", "ports": "containerPort",
    "hostAliases": "ip", "replicatedJobs": "name", "ownerReferences": "uid", "topologySpreadConstraints": "topologyKey",
}  # fmt: skip
#: Items of these say where one thing comes from: half of the one's source and half of the other's is neither.
_WHOLE: Final = frozenset({"env", "volumes", "volumeMounts"})


@dataclass(frozen=True)
class Must:
    """A value of ours that the caller may repeat but not change."""

    value: Any


@dataclass(frozen=True)
class Conflict:
    """Where the caller's manifest says something else than we must."""

    path: str
    theirs: Any
    ours: Any
    wanted: str = ""  #: what there should be, where it is of another form altogether

    def __str__(self) -> str:
        """Return one line for people."""
        if self.wanted:
            return f"{self.path}: the manifest says {self.theirs!r:.80}, which should be {self.wanted}"
        return f"{self.path}: the manifest says {self.theirs!r:.80}, but {self.ours!r:.80} is set for each run; leave it out"


def merge(theirs: Any, ours: Any, conflicts: list[Conflict], path: str = "") -> Any:
    """Return *ours* put into a copy of *theirs*; what cannot be goes to *conflicts*."""
    if isinstance(ours, Must):
        return _must(theirs, ours.value, conflicts, path)
    if theirs is None:
        return plain(ours)
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        merged = deepcopy(dict(theirs))
        for key, value in ours.items():
            merged[key] = merge(merged.get(key), value, conflicts, f"{path}.{key}" if path else key)
        return merged
    if isinstance(theirs, list) and isinstance(ours, list):
        return _lists(theirs, ours, conflicts, path)
    for form, wanted in ((Mapping, "a mapping"), (list, "a list")):
        if isinstance(ours, form):
            conflicts.append(Conflict(path, theirs, None, wanted))
            return plain(ours)
    return deepcopy(theirs)


def key_of(name: str, *lists: Sequence[Any]) -> str | None:
    """Return by which field items of the list called *name* are told apart; where all of *lists* have names, by them."""
    if name in KEYS:
        return KEYS[name]
    items = [one for some in lists for one in some]
    return "name" if items and all(isinstance(one, Mapping) and "name" in one for one in items) else None


def every_must(value: Any) -> Any:
    """Return *value* in which every leaf is a :class:`Must`, but for the names by which items of lists are found."""
    if isinstance(value, Mapping):
        return {key: every_must(one) for key, one in value.items()}
    if isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
        return [{k: one if k == "name" else every_must(one) for k, one in item.items()} for item in value]
    return Must(value)


def plain(value: Any) -> Any:
    """Return a copy of *value* without :class:`Must`."""
    if isinstance(value, Must):
        return plain(value.value)
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value


def _must(theirs: Any, ours: Any, conflicts: list[Conflict], path: str) -> Any:
    wanted = plain(ours)
    if isinstance(wanted, Mapping) and isinstance(theirs, Mapping):
        must = {key: Must(value) for key, value in wanted.items()}
        return merge(theirs, must, conflicts, path)
    if theirs is not None and theirs != wanted and str(theirs) != str(wanted):
        conflicts.append(Conflict(path, theirs, wanted))
    return wanted


def _lists(theirs: list[Any], ours: Sequence[Any], conflicts: list[Conflict], path: str) -> list[Any]:
    name = path.rpartition(".")[2]
    key = key_of(name, theirs, plain(ours))
    if key is None:
        return [*deepcopy(theirs), *(one for one in plain(ours) if one not in theirs)]
    merged = [deepcopy(one) for one in theirs if isinstance(one, Mapping)]
    conflicts += [
        Conflict(f"{path}[{index}]", one, None, "a mapping")
        for index, one in enumerate(theirs)
        if not isinstance(one, Mapping)
    ]
    for one in ours:
        value = plain(one)
        place = next((i for i, old in enumerate(merged) if _named(old, key, value.get(key))), None)
        if place is None:
            merged.append(value)
        elif isinstance(one, Must) and name in _WHOLE:
            if merged[place] != value:
                conflicts.append(Conflict(f"{path}[{value[key]}]", merged[place], value))
            merged[place] = value
        elif name not in _WHOLE:
            merged[place] = merge(merged[place], one, conflicts, f"{path}[{value[key]}]")
    return merged


def _named(item: Any, key: str, name: Any) -> bool:
    return isinstance(item, Mapping) and item.get(key) == name
