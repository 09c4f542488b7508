"""The fields that every workload has, and whether a value can be that of a field, looked at alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pytest_mlhpc.config.quantities import parse_duration
from pytest_mlhpc.errors import nearest
from pytest_mlhpc.jobs.sizes import wrong_sizes
from pytest_mlhpc.node.worker.workloads.definitions import Field, Workload

#: Fields that every workload has. ``time_limit`` is in seconds.
UNIVERSAL: Mapping[str, Field] = {
    "nodes": Field(1, "nodes of the run", minimum=1),
    "devices_per_node": Field(
        1, "accelerators of each node; one rank owns each, on CPUs a share of the cores", minimum=1
    ),
    "steps": Field(20, "steps that are timed", minimum=0),
    "warmup": Field(3, "steps before the timed ones", minimum=0),
    "data": Field("memory", "memory, device, files, a data set of the system, or a path", "str"),
    "cache": Field("unknown", "state of the page cache", "str", ("unknown", "cold", "warm")),
    "exclusive": Field(None, "whether nothing else may run beside it on its devices", "bool"),
    "judge": Field(default=True, help="False, or the names of the metrics to judge", type="judge"),
    "name": Field("", "the test's identity, default: its node id without the target", "str"),
    "time_limit": Field(None, "30m, 1h30m, or seconds", "duration", minimum=0.001),
    "requires": Field(
        (), "features that the partition must have, with a minus must not: '+cuda -hip'", "words"
    ),
    "launcher": Field("", "launcher instead of the partition's", "str"),
    "kubernetes": Field(
        None, "options put over the partition's, where its scheduler is kubernetes", "mapping"
    ),
}

#: Fields that are called like a scheduler, and hold options of it.
SCHEDULERS = frozenset({"kubernetes"})

_TYPES: Mapping[str, tuple[type, ...]] = {
    "int": (int,), "float": (int, float), "str": (str,), "bool": (bool,), "list": (list, tuple),
    "mapping": (Mapping,), "judge": (bool, list, tuple), "duration": (int, float, str), "size": (int, str),
    "sizes": (list, tuple), "words": (str, list, tuple),
}  # fmt: skip
_KINDS = {"judge": "True, False or a list of metrics", "duration": "a time like '30m', or seconds",
          "words": "a text or a list of words", "size": "bytes, or a size like '64MiB'", "sizes": "a list of sizes like ['8B', '64MiB']"}  # fmt: skip


def field_names(workload: Workload | None) -> frozenset[str]:
    """Return the names that a test may set for *workload*."""
    return frozenset(UNIVERSAL) | frozenset(workload.fields if workload else ())


def wrong_value(field: Field, value: Any) -> str:
    """Return why *value* cannot be the value of *field*, or an empty string."""
    if value is None:
        return "" if field.default is None else "cannot be None"
    if not isinstance(value, _TYPES[field.type]) or (
        isinstance(value, bool) and field.type in {"int", "float", "duration"}
    ):
        kind = _KINDS.get(field.type, field.type)
        return f"expected {kind}, found {value!r}"
    names = value if field.type == "judge" and isinstance(value, (list, tuple)) else ()
    if not all(isinstance(name, str) for name in names):
        return f"expected {_KINDS['judge']}, found {value!r}"
    if field.type in {"duration", "size", "sizes"}:
        return _wrong_duration(value) if field.type == "duration" else wrong_sizes(value, field.minimum)
    if field.choices and value not in field.choices:
        return f"{value!r} is not one of {', '.join(map(repr, field.choices))}"
    return _out_of_range(field, value) if isinstance(value, (int, float)) else ""


def _out_of_range(field: Field, value: float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value} is not finite"
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return "does not fit into 64 bits"
    if value < field.minimum:
        return f"{value} is less than {field.minimum:g}"
    return f"{value} is more than {field.maximum:g}" if value > field.maximum else ""


def choice_like(field: Field, value: Any) -> str:
    """Return the choice of *field* that *value* may have meant, or an empty string."""
    return nearest(str(value), [str(choice) for choice in field.choices])


def _wrong_duration(value: Any) -> str:
    try:
        parse_duration(value)
    except ValueError as error:
        return str(error)
    return ""
