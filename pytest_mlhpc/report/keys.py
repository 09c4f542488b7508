"""Benchmarks of reports: identity and definition together, what tells them apart, and labels short enough for a table. Pure."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from pytest_mlhpc.store import definition

#: Fields that say how large a run is; per device, runs that differ in these alone are set beside each other.
SCALE: Final = ("nodes", "devices")
#: How long a run is: what a preset sets, and no label names.
LENGTH: Final = ("steps", "warmup")
#: Fields that every workload has, and that no parameter of a model or a probe is called.
_UNIVERSAL: Final = frozenset({*SCALE, *LENGTH, "preset", "data", "cache"})
#: Stands among names of fields that vary; with a bracket, as no field is called like this.
_WORKLOAD: Final = "[workload]"

shown = definition.shown


class Benchmark(NamedTuple):
    """What is measured: the identity of its test, and the definition. Figures of equal ones are comparable."""

    name: str
    definition: str

    def holds(self, text: str) -> bool:
        """Whether *text* is a part of either."""
        return text in self.name or text in self.definition


class _Defined(Protocol):
    @property
    def benchmark(self) -> str: ...

    @property
    def definition(self) -> str: ...


def benchmark_of(one: _Defined) -> Benchmark:
    """Return the benchmark of a record or a night."""
    return Benchmark(one.benchmark, one.definition)


@dataclass(frozen=True)
class Key:
    """A benchmark's parts; values as they are written. ``identity`` are the workload's own fields."""

    name: str
    workload: str
    identity: Mapping[str, str]
    rest: Mapping[str, str]

    @property
    def fields(self) -> dict[str, str]:
        """All fields in one mapping."""
        return {**self.identity, **self.rest}


def parse(benchmark: Benchmark) -> Key | None:
    """Return the parts of *benchmark*, or None where its definition is none of ours."""
    found = definition.parse(benchmark.definition)
    if found is None:
        return None
    own = {name: value for name, value in found.fields.items() if name not in _UNIVERSAL}
    rest = {name: value for name, value in found.fields.items() if name in _UNIVERSAL}
    return Key(function_of(benchmark.name), found.workload, own, rest)


def function_of(name: str) -> str:
    """Return what a test is called without its file and parameters: ``test_cosmoflow``."""
    path, separator, names = name.partition("::")
    return names.rpartition("::")[2].partition("[")[0] if separator else path


def natural(text: str) -> list[tuple[int, int, str]]:
    """Return a text to sort by, with which 4 comes before 16."""
    parts = re.findall(r"[0-9]{1,15}|[^0-9]+", text)
    return [(0, int(part), "") if "0" <= part[0] <= "9" else (1, 0, part) for part in parts]


def order(benchmark: Benchmark) -> tuple[object, ...]:
    """Return what benchmarks are sorted by."""
    return natural(benchmark.name), natural(benchmark.definition)


def without_scale(benchmark: Benchmark) -> str:
    """Return what is left of a benchmark without nodes and devices, its batch counted per device."""
    key = parse(benchmark)
    if key is None:
        return json.dumps(benchmark)
    identity = dict(key.identity)
    batch, devices = identity.pop("global_batch", ""), key.rest.get("devices", "")
    if batch.isdigit() and devices.isdigit() and int(devices):
        identity["batch_per_device"] = f"{int(batch) / int(devices):g}"
    elif batch:
        identity["global_batch"] = batch
    rest = {name: value for name, value in key.rest.items() if name not in SCALE}
    return json.dumps([key.name, key.workload, sorted(identity.items()), sorted(rest.items())])


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


def labels(benchmarks: Sequence[Benchmark]) -> tuple[str, dict[Benchmark, str]]:
    """Return what all *benchmarks* share of scale, preset and data, and for each a label that no other has."""
    every = list(dict.fromkeys(benchmarks))
    keys = {one: key for one in every if (key := parse(one)) is not None}
    common: dict[str, str] = {}
    if len(keys) == len(every) and keys:
        first = next(iter(keys.values()))
        common = {
            name: value
            for name, value in first.rest.items()
            if name not in LENGTH and all(key.rest.get(name) == value for key in keys.values())
        }
    groups: dict[str, list[Key]] = {}
    for key in keys.values():
        groups.setdefault(key.name, []).append(key)
    varying = {name: _varying(group) for name, group in groups.items()}
    made = {
        one: _label(keys[one], varying[keys[one].name], common) if one in keys else one.name for one in every
    }
    times = Counter(made.values())
    names = Counter(one.name for one in every)
    unique = {
        one: label if times[label] == 1 else one.name if names[one.name] == 1 else " ".join(one)
        for one, label in made.items()
    }
    return _listed(common), unique


def _varying(group: Sequence[Key]) -> frozenset[str]:
    """Return the workload's fields that are not the same in all of *group*; and the word ``workload``, if so."""
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
    rest = {name: value for name, value in key.rest.items() if name not in LENGTH}
    values |= {name: value for name, value in rest.items() if common.get(name) != value}
    head = f"{key.name} ({key.workload})" if _WORKLOAD in varying else key.name
    return f"{head} {_listed(values)}".rstrip()


def _listed(values: Mapping[str, str]) -> str:
    return " ".join(f"{name}={shown(values[name])}" for name in sorted(values))
