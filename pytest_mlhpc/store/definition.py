"""The definition of a run: canonical text of all that changes what is computed. How it is written, read and compared. Pure.

The text is the workload and its fields, sorted: ``cosmoflow devices=4 global_batch=32 nodes=1 preset=full steps=100``. A value is
plain or JSON. Figures of two definitions are never compared.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pytest_mlhpc.store.record import Epoch

#: Text that needs no quotes.
_PLAIN: Final = re.compile(r"[A-Za-z0-9_.+-]+")
_NAME: Final = re.compile(r" ([A-Za-z0-9_.+-]+)=")
#: Differences that are named, and letters of a value in them; the rest is counted.
_MOST: Final = 4
_LETTERS: Final = 60


@dataclass(frozen=True)
class Definition:
    """A definition's parts; values as they are written."""

    workload: str
    fields: Mapping[str, str]


def text_of(workload: str, fields: Mapping[str, Any]) -> str:
    """Return the canonical text."""
    return " ".join([workload, *(f"{name}={_written(fields[name])}" for name in sorted(fields))])


def parse(text: str) -> Definition | None:
    """Return the parts of *text*, or None where it is no definition."""
    workload = _PLAIN.match(text)
    if workload is None:
        return None
    at, fields = workload.end(), {}
    while match := _NAME.match(text, at):
        at = match.end()
        plain = _PLAIN.match(text, at)
        try:
            end = plain.end() if plain else json.JSONDecoder().raw_decode(text, at)[1]
        except (ValueError, RecursionError):
            return None
        fields[match[1]] = text[at:end]
        at = end
    return Definition(workload[0], fields) if at == len(text) else None


def shown(value: str) -> str:
    """Return a field's value as people read it: a quoted text without its quotes and escapes."""
    if not value.startswith('"'):
        return value
    try:
        return str(json.loads(value))
    except ValueError:
        return value


def difference(before: str, after: str) -> str:
    """Return what changed from one definition to another, as ``steps 100 -> 200``; empty where they are equal."""
    if before == after:
        return ""
    old, new = parse(before), parse(after)
    if old is None or new is None:
        return f"definition {before or '(none)'} -> {after or '(none)'}"
    found = [f"workload {old.workload} -> {new.workload}"] if old.workload != new.workload else []
    found += [
        f"{name} {_short(old.fields.get(name))} -> {_short(new.fields.get(name))}"
        for name in sorted({*old.fields, *new.fields})
        if old.fields.get(name) != new.fields.get(name)
    ]
    more = len(found) - _MOST
    return ", ".join([*found[:_MOST], *([f"and {more} more"] if more > 0 else [])])


def changed(before: Epoch, after: Epoch) -> str:
    """Return what changed between two epochs; empty where their figures are comparable.

    A device model that is not known is none that differs: programs report none.
    """
    found = [difference(before.definition, after.definition)]
    if before.device_model and after.device_model and before.device_model != after.device_model:
        found.append(f"device model {before.device_model} -> {after.device_model}")
    return ", ".join(filter(None, found))


def digest(text: str) -> str:
    """Return a short name of a definition, for places that take no long text."""
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:12] if text else ""


def _short(value: str | None) -> str:
    if value is None:
        return "(unset)"
    text = shown(value)
    return text if len(text) <= _LETTERS else f"{text[: _LETTERS - 3]}..."


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))  # 1.0 and 1 compute the same
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str) and _PLAIN.fullmatch(value):
        return value
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
