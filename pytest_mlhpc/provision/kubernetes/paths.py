"""Ways into objects as JSON has them. Pure, but for :func:`put` and :func:`remove`, which change what they are given."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from pytest_mlhpc.provision.kubernetes.merge import Conflict

#: Keys of mappings; names, or numbers as text, of list items.
Path = tuple[str, ...]


def at(found: Any, path: Path) -> Any:
    """Return the value at *path*, or None where there is none."""
    for part in path:
        if isinstance(found, Mapping):
            found = found.get(part)
        elif isinstance(found, list):
            found = item_of(found, part)
        else:
            return None
    return found


def item_of(items: list[Any], part: str) -> Any:
    """Return the item of a list that *part* means: the one of this name, else of this number; None if there is none."""
    for one in items:
        if isinstance(one, Mapping) and one.get("name") == part:
            return one
    return items[int(part)] if part.isdigit() and int(part) < len(items) else None


def over(frame: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return *frame* with a copy of *more* in it, mapping by mapping."""
    for key, value in more.items():
        old = frame.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        frame[key] = over(dict(old), value) if both else deepcopy(value)  # type: ignore[arg-type]  # `both` says so
    return frame


def put(found: Any, path: Path, value: Any, conflicts: list[Conflict]) -> None:
    """Set the value at *path*, making mappings, and items of lists, on the way."""
    for index, part in enumerate(path):
        last = index == len(path) - 1
        if isinstance(found, list):
            inner = item_of(found, part)
            if last:
                _replace(found, inner, value)
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
                    conflicts.append(Conflict(".".join(path[: index + 1]), inner, None, "a mapping"))
                inner = found[part] = {}
        found = inner


def remove(found: Any, path: Path) -> None:
    """Take out what lies at *path*, if anything does."""
    holder = at(found, path[:-1])
    if path and isinstance(holder, dict):
        holder.pop(path[-1], None)
    elif path and isinstance(holder, list) and (found := item_of(holder, path[-1])) is not None:
        holder.remove(found)


def _replace(items: list[Any], old: Any, value: Any) -> None:
    if old is None:
        items.append(value)
    else:
        items[items.index(old)] = value
