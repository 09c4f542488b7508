"""A benchmark's key read again: its fields, what tells keys apart, and labels short enough for a table. Pure.

Keys are written by ``jobs/key.py``: ``workload[k=v ...] k=v ...``, values plain or JSON.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

_NAME: Final = re.compile(r" ?([A-Za-z0-9_.+-]+)=")
_PLAIN: Final = re.compile(r"[A-Za-z0-9_.+-]+")
#: Fields that say how large a run is; per device, runs that differ in these alone are set beside each other.
SCALE: Final = ("nodes", "devices")
#: Stands among names of fields that vary; with a bracket, as no field is called like this.
_WORKLOAD: Final = "[workload]"


@dataclass(frozen=True)
class Key:
    """A key's parts; values as they are written. ``identity`` stood in the brackets."""

    workload: str
    identity: Mapping[str, str]
    rest: Mapping[str, str]

    @property
    def name(self) -> str:
        """What the test is called."""
        return shown(self.rest.get("name", ""))

    @property
    def fields(self) -> dict[str, str]:
        """All fields in one mapping."""
        return {**self.identity, **self.rest}


def parse(text: str) -> Key | None:
    """Return the parts of *text*, or None where it is no key of ours."""
    workload, bracket, tail = text.partition("[")
    inner = _pairs(tail, 0)
    if not bracket or not workload or inner is None or tail[inner[1] : inner[1] + 1] != "]":
        return None
    start = inner[1] + 1
    outer = _pairs(tail, start)
    if outer is None or outer[1] != len(tail):
        return None
    return Key(workload, inner[0], outer[0])


def _pairs(text: str, at: int) -> tuple[dict[str, str], int] | None:
    found: dict[str, str] = {}
    while match := _NAME.match(text, at):
        at = match.end()
        plain = _PLAIN.match(text, at)
        try:
            end = plain.end() if plain else json.JSONDecoder().raw_decode(text, at)[1]
        except (ValueError, RecursionError):
            return None
        found[match[1]] = text[at:end]
        at = end
    return found, at


def shown(value: str) -> str:
    """Return a field's value as people read it: a quoted text without its quotes and escapes."""
    if not value.startswith('"'):
        return value
    try:
        return str(json.loads(value))
    except ValueError:
        return value


def natural(text: str) -> list[tuple[int, int, str]]:
    """Return a key to sort by, with which 4 comes before 16."""
    parts = re.findall(r"[0-9]{1,15}|[^0-9]+", text)
    return [(0, int(part), "") if "0" <= part[0] <= "9" else (1, 0, part) for part in parts]


def without_scale(text: str) -> str:
    """Return what is left of a key without nodes and devices, its batch counted per device; *text* if it is no key."""
    key = parse(text)
    if key is None:
        return text
    identity = dict(key.identity)
    batch, devices = identity.pop("global_batch", ""), key.rest.get("devices", "")
    if batch.isdigit() and devices.isdigit() and int(devices):
        identity["batch_per_device"] = f"{int(batch) / int(devices):g}"
    elif batch:
        identity["global_batch"] = batch
    rest = {name: value for name, value in key.rest.items() if name not in SCALE}
    return json.dumps([key.workload, sorted(identity.items()), sorted(rest.items())])


def differences(wanted: Key, other: Key) -> list[str]:
    """Return what *other* has that *wanted* has not, such as ``devices=4 (not 1)``."""
    mine, theirs = wanted.fields, other.fields
    found = []
    for name in sorted({*mine, *theirs}):
        if mine.get(name) == theirs.get(name):
            continue
        if name not in theirs:
            found.append(f"no {name} (not {shown(mine[name])})")
        else:
            found.append(f"{name}={shown(theirs[name])} (not {shown(mine.get(name, 'without'))})")
    return found


def labels(benchmarks: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return what all *benchmarks* share of scale, preset and data, and for each a label that no other has."""
    texts = list(dict.fromkeys(benchmarks))
    keys = {text: key for text in texts if (key := parse(text)) is not None}
    common: dict[str, str] = {}
    if len(keys) == len(texts) and keys:
        first = next(iter(keys.values()))
        common = {
            name: value
            for name, value in first.rest.items()
            if name != "name" and all(key.rest.get(name) == value for key in keys.values())
        }
    groups: dict[str, list[Key]] = {}
    for key in keys.values():
        groups.setdefault(key.name, []).append(key)
    varying = {name: _varying(group) for name, group in groups.items()}
    made = {
        text: _label(keys[text], varying[keys[text].name], common) if text in keys else text for text in texts
    }
    times = Counter(made.values())
    unique = {text: label if times[label] == 1 else text for text, label in made.items()}
    return _words(common), unique


def _varying(group: Sequence[Key]) -> frozenset[str]:
    """Return the fields between the brackets that are not the same in all of *group*; and the word ``workload``, if so."""
    first = group[0]
    found = {
        name
        for key in group
        for name in {*key.identity, *first.identity}
        if key.identity.get(name) != first.identity.get(name)
    }
    return frozenset(found | ({_WORKLOAD} if any(key.workload != first.workload for key in group) else set()))


def _label(key: Key, varying: frozenset[str], common: Mapping[str, str]) -> str:
    """Return the test's name, and all by which it differs from others of that name, or in scale, preset and data."""
    values = {name: value for name, value in key.identity.items() if name in varying}
    values |= {
        name: value for name, value in key.rest.items() if name != "name" and common.get(name) != value
    }
    head = key.name or key.workload
    if _WORKLOAD in varying:
        head = f"{head} ({key.workload})"
    return f"{head} {_words(values)}".rstrip()


def _words(values: Mapping[str, str]) -> str:
    return " ".join(f"{name}={shown(values[name])}" for name in sorted(values))
