"""A site's own bounds, a TOML file with a closed schema, and what ``expect:`` may say of a node. All problems are listed at once."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_mlhpc.config.quantities import parse_memory
from pytest_mlhpc.errors import ConfigError, Problem, nearest
from pytest_mlhpc.node.vet.checks.host import EXPECTABLE, OF_DEVICES
from pytest_mlhpc.node.vet.policy import Bound, Policy, built_in

#: A larger file is none of these.
MOST_BYTES = 1 << 20

_STAGES = ("warn", "fail")
_FIELDS = (*_STAGES, "source", "date")
#: Fields of our own entries that are facts about the quantity, not opinions about its bound.
_FIXED = ("meaning", "unit", "better", "key")


def read_policy(path: Path, policy: Policy | None = None) -> tuple[Bound, ...]:
    """Return the bounds that a file changes, whole: what it does not say stays as in *policy* (None: our own).

    Raises:
        ConfigError: the file cannot be read, or says anything that is not in the schema; all problems with their keys.
    """
    ours = built_in() if policy is None else policy
    data = _parsed(path)
    problems = [
        Problem(str(path), key, "there is no such table; [bounds] alone is", nearest(key, ["bounds"]))
        for key in data
        if key != "bounds"
    ]
    tables = data.get("bounds", {})
    if not isinstance(tables, dict):
        problems.append(
            Problem(str(path), "bounds", 'expected tables, written like [bounds."nvidia.dram_corrected"]')
        )
        tables = {}
    found: list[Bound] = []
    for key, entry in _entries(tables, ours.bounds):
        where = f"bounds.{key}" if "." not in key else f'bounds."{key}"'
        bound = ours.bounds.get(key)
        if bound is None:
            problems.append(Problem(str(path), where, "there is no such bound", nearest(key, ours.bounds)))
            continue
        troubles = [
            Problem(str(path), dotted, what, hint) for dotted, what, hint in _wrong(where, entry, bound)
        ]
        problems += troubles
        if not troubles:
            found.append(_changed(bound, entry))
    if problems:
        raise ConfigError(problems)
    return tuple(found)


def _parsed(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError([Problem(str(path), "", f"cannot be read: {error.strerror}")]) from error
    if len(data) > MOST_BYTES:
        raise ConfigError([Problem(str(path), "", f"has more than {MOST_BYTES} bytes, which no policy has")])
    import tomllib

    try:
        return tomllib.loads(data.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError([Problem(str(path), "", f"is no TOML: {error}")]) from error


def _entries(
    tables: Mapping[str, Any], ours: Mapping[str, Bound], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield key and content of each entry. ``[bounds.nvidia.x]`` without quotes, which TOML nests, means the same."""
    for name, content in tables.items():
        key = f"{prefix}{name}"
        nested = (
            isinstance(content, dict) and content and all(isinstance(one, dict) for one in content.values())
        )
        if nested and key not in ours:
            yield from _entries(content, ours, f"{key}.")
        else:
            yield key, content


def _wrong(where: str, entry: Any, bound: Bound) -> Iterator[tuple[str, str, str]]:
    """Yield key, message and nearest valid word of each thing that is wrong in one entry."""
    if not isinstance(entry, dict):
        yield where, "expected a table with warn or fail, source and date", ""
        return
    yield from _wrong_names(where, entry, bound)
    if not any(stage in entry for stage in _STAGES):
        yield where, "says neither warn nor fail: nothing would change", ""
    stages = [name for name in _STAGES if name in entry and not _is_stage(entry[name])]
    for name in stages:
        yield f"{where}.{name}", f'{entry[name]!r:.60} is neither a finite number nor "off"', ""
    source, date = entry.get("source"), entry.get("date")
    if not isinstance(source, str) or not source.strip():
        yield f"{where}.source", "is missing: say in a text why this bound and no other", ""
    if not _is_date(date):
        yield f"{where}.date", "is missing, or no date like 2026-11-21: say when that was known", ""
    if not stages:
        changed = _stages(bound, entry)
        warn, fail = changed["warn"], changed["fail"]
        if (
            warn is not None
            and fail is not None
            and (warn > fail if bound.better == "lower" else warn < fail)
        ):
            side = "above" if bound.better == "lower" else "below"
            yield where, f"warn ({warn:g}) lies {side} fail ({fail:g}), so that it would never warn", ""


def _wrong_names(where: str, entry: Mapping[str, Any], bound: Bound) -> Iterator[tuple[str, str, str]]:
    for name in entry:
        if name in _FIXED:
            yield f"{where}.{name}", f"cannot be changed: it is {getattr(bound, name)!r}", ""
        elif name not in _FIELDS:
            yield (
                f"{where}.{name}",
                f"there is no such field; there are {', '.join(_FIELDS)}",
                nearest(name, _FIELDS),
            )


def _is_stage(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    return value == "off" or (isinstance(value, int | float) and math.isfinite(value))


def _is_date(value: Any) -> bool:
    if isinstance(value, str):
        try:
            dt.date.fromisoformat(value)
        except ValueError:
            return False
        return True
    return isinstance(value, dt.date) and not isinstance(value, dt.datetime)


def _stages(bound: Bound, entry: Mapping[str, Any]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for name in _STAGES:
        said = entry.get(name, getattr(bound, name))
        found[name] = None if said is None or said == "off" else float(said)
    return found


def _changed(bound: Bound, entry: Mapping[str, Any]) -> Bound:
    stages = _stages(bound, entry)
    source, date = str(entry["source"]), str(entry["date"])
    return replace(bound, warn=stages["warn"], fail=stages["fail"], source=source, date=date)


#: Properties that a check of ours compares, by name.
PROPERTIES = tuple(sorted({*EXPECTABLE, *OF_DEVICES}))

#: What a systems file says under ``nodes:``, by its name in ``--expect``.
OF_NODES = {"cores": "cores", "memory": "memory", "model": "device_model"}

#: Names whose value is a whole number, and those whose value is a text.
_WHOLE = ("cores", "numa", "hugepages")
_WORDS = {"ecc": ("on", "off", "any"), "mig": ("on", "off", "any")}


def trouble(name: str, value: str, known: Collection[str] = PROPERTIES) -> tuple[str, str]:
    """Return what is wrong with an expectation and the nearest right word; both are empty where nothing is.

    Args:
        name: the property, which must be one of *known*.
        value: what each node should have, as text.
        known: names that may be used here.
    """
    if name not in known and name in OF_NODES:
        return f"write it under `nodes:`, as `{OF_NODES[name]}`", ""
    if name not in known:
        return f"no check reads {name!r}; there are {', '.join(known)}", nearest(name, known)
    if name in _WHOLE and not _is_count(value, least=int(name == "cores")):
        return f"{value} is no number of {name}", ""
    allowed = _WORDS.get(name)
    if allowed and value.lower() not in allowed:
        return f"{value!r} is none of {', '.join(allowed)}", nearest(value.lower(), allowed)
    if name == "memory":
        try:
            parse_memory(value)
        except ValueError as error:
            return str(error), ""
    return "", ""


def _is_count(text: str, least: int) -> bool:
    return text.isascii() and text.isdigit() and least <= int(text) < 10**6
