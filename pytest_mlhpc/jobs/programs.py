"""A declared program: its arguments, where it starts, its files, and what its metrics promise. Pure, but for reading which files exist."""

from __future__ import annotations

import math
import os
import re
import shlex
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_mlhpc.config.model import Partition
from pytest_mlhpc.errors import Problem, RunFailure, SpecError, nearest
from pytest_mlhpc.jobs.metrics import base_unit, wrong_function, wrong_metrics, wrong_pattern
from pytest_mlhpc.jobs.software import SoftwareError, check_artifacts, check_size, files_of, is_staged
from pytest_mlhpc.jobs.spec import JobSpec, as_list
from pytest_mlhpc.node.protocol.plan import FinishedRun
from pytest_mlhpc.node.run_files import ARCHIVE, artifacts_of, unpack


def with_plain_values(where: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return *asked*, the fields of a program, fit for a record: ``command`` is a list of texts, ``metrics`` hold rules.

    Raises:
        SpecError: names each word that is neither text nor number nor path, and each metric that cannot be.
    """
    found, problems = dict(asked), []
    if isinstance(command := asked.get("command"), str):
        try:
            found["command"] = shlex.split(command)
        except ValueError as error:
            problems.append(Problem(where, "command", f"{str(error).lower()} in {command!r}"))
    elif command is not None:
        problems += [Problem(where, "command", text) for text in _wrong(command)]
        found["command"] = [_text(value) for value in command] if not problems else []
    if conditions := conditions_of(asked.get("sanity") or ()):
        problems += [Problem(where, "sanity", text) for text in map(_wrong_condition, conditions) if text]
        found["sanity"] = [_named(one) for one in conditions]
    if "metrics" in asked:
        wrong = wrong_metrics(asked["metrics"])
        problems += [Problem(where, "metrics", text) for text in wrong]
        found["metrics"] = {} if wrong else {metric.name: metric.rule() for metric in asked["metrics"]}
    if problems:
        raise SpecError(problems)
    return found


def resolved_argv(spec: JobSpec) -> tuple[str, ...]:
    """Return the program and its arguments as nodes receive them.

    A program by a relative name is that of the run's files, where it is among them. By a relative path, such as ``./bench``, it
    is the file of that name beside the test, where there is one. A spec has it as it was typed: another checkout declares
    the same run.
    """
    name = next(iter(spec.argv), "")
    if not name or spec.cwd is not None or name.startswith("/"):
        return spec.argv
    if is_staged(name, spec.files):
        return (f"./{os.path.normpath(name)}", *spec.argv[1:])
    if not spec.folder or "/" not in name:
        return spec.argv
    path = os.path.normpath(Path(spec.folder).absolute() / name)
    return (path, *spec.argv[1:]) if os.path.isfile(path) else spec.argv  # noqa: PTH113 - Path's raises for a name too long


def folders_of(spec: JobSpec) -> dict[str, str]:
    """Return what ``{name}`` is of each run that *spec* needs: its folder; for nodes apart, that of its artifacts among the files."""
    apart = spec.target.partition.apart
    return {name: f"./{name}" if apart else one.folder for name, one in spec.needed.items()}


def with_needed(spec: JobSpec, needed: Mapping[str, FinishedRun]) -> JobSpec:
    """Return *spec* with what the runs that it needs have left. Nodes that see no folder of ours find the artifacts among their files.

    Raises:
        RunFailure: artifacts cannot be read, or are larger than what a pod gets.
    """
    found = replace(spec, needed=needed)
    if not spec.target.partition.apart:
        return found
    files = dict(spec.files)
    try:
        for name in names_in((*spec.argv, *spec.env.values())) & needed.keys():
            folder = Path(needed[name].folder)
            if (archive := folder / ARCHIVE).is_file():
                unpack(archive, folder, needed[name].artifacts)
            for inside in artifacts_of(folder, needed[name].artifacts):
                files[f"{name}/{inside}"] = str(folder / inside)
        check_size(files, spec.target.partition)
    except (OSError, tarfile.TarError, SoftwareError) as error:
        raise RunFailure("prepare_failed", f"artifacts of {', '.join(needed)}: {error}") from None
    return replace(found, files=files)


def names_in(texts: Iterable[str]) -> set[str]:
    """Return the names that stand in braces in *texts*."""
    return {name for text in texts for name in _BRACES.findall(text)}


_BRACES = re.compile(r"\{([A-Za-z_]\w*)\}")


def _text(value: Any) -> str:
    return str(os.fspath(value)) if isinstance(value, os.PathLike) else str(value)


def _wrong(command: Sequence[Any]) -> list[str]:
    """Return a text for each word that is no argument: ``str()`` of any object would start something unmeant."""
    return [
        f"word {index} is {value!r}, expected text, a number or a path"
        for index, value in enumerate(command)
        if isinstance(value, bool)
        or not isinstance(value, (str, int, float, os.PathLike))
        or (isinstance(value, os.PathLike) and not isinstance(os.fspath(value), str))
    ]


def references_of(
    where: str,
    partition: Partition,
    given: Mapping[str, Any] | None,
    metrics: Mapping[str, Mapping[str, Any]],
    judged: Sequence[str],
) -> dict[str, float]:
    """Return metric -> what it promises on this target, in base units.

    Raises:
        SpecError: a value is no positive number, or it is not clear of which metric it is.
    """
    nested = bool(given) and all(isinstance(value, Mapping) for value in (given or {}).values())
    named = dict(given or {}) if nested else {name: given for name in judged[:1] if given}
    problems = []
    if given and not nested and len(judged) != 1:
        example = f"{{{next(iter(metrics), 'rate')!r}: {{{partition.system!r}: 180}}}}"
        problems.append(f"does not say of which metric it is, as {len(judged)} are judged; write {example}")
    for name, values in named.items():
        if name not in judged:
            known = nearest(str(name), judged)
            problems.append(
                f"{name!r} is no judged metric" + (f" (did you mean {known!r}?)" if known else "")
            )
        rule = metrics.get(name, {})
        problems += [
            f"{place}: {text}" for place, value in values.items() if (text := _no_promise(name, value, rule))
        ]
    if problems:
        raise SpecError([Problem(where, "reference", text) for text in problems])
    found = {}
    for name, values in named.items():
        promise = _promise(_of_place(values, partition), metrics[name])
        if promise is not None:
            found[name] = promise
    return found


def _no_promise(name: str, value: Any, rule: Mapping[str, Any]) -> str:
    """Return why *value* cannot be promised of the metric *name*, or an empty string."""
    declared = rule.get("declared") or rule.get("unit", "")
    number = value[0] if isinstance(value, (tuple, list)) and value else value
    if isinstance(number, str) and (parts := _WITH_UNIT.fullmatch(number)):
        try:
            unit, _ = base_unit(parts[2])
        except ValueError as error:
            return str(error)
        if unit != rule.get("unit"):
            return f"{number!r} is in {parts[2]}, and {name} is declared in {declared}"
    if _promise(value, rule) is not None:
        return ""
    return (
        f"expected a positive number in the unit of {name} ({declared}), found {value!r}; or (number, low, high) with "
        "shares such as -0.05 and 0.1"
    )


def _of_place(values: Mapping[str, Any], partition: Partition) -> Any:
    """Return the value for *partition*: by its full name, its system's, or part of the name of its device model."""
    model = partition.nodes.device_model.lower()
    places = [place for place in (partition.id, partition.system) if place in values]
    places += [place for place in values if model and str(place).lower() in model]
    return values[places[0]] if places else None


#: A reference that says its unit.
_WITH_UNIT = re.compile(r"\s*([\d.]+(?:[eE][-+]?\d+)?)\s*([^\s\d.]\S*)\s*")


def _promise(value: Any, rule: Mapping[str, Any]) -> float | None:
    """Return the worst value that keeps a promise, in base units; None: it is none.

    It is a number, a text such as ``180 GB/s``, or the bound of ``(number, low, high)``.
    """
    low = high = None
    scale, better = rule.get("scale", 1.0), rule.get("better", "")
    if isinstance(value, (tuple, list)) and len(value) == 3:
        value, low, high = value
    if isinstance(value, str) and (parts := _WITH_UNIT.fullmatch(value)):
        try:
            value, (unit, scale) = float(parts[1]), base_unit(parts[2])
        except ValueError:
            return None
        if unit != rule.get("unit"):
            return None
    shares = [share for share in (low, high) if share is not None]
    if any(isinstance(one, bool) or not isinstance(one, (int, float)) for one in (value, *shares)):
        return None
    if (
        not 0 < value < math.inf
        or (low is not None and not -1 < low <= 0)
        or (high is not None and not 0 <= high < math.inf)
    ):
        return None
    return float(scale * value * (1 + ((high if better == "lower" else low) or 0.0)))


def working_directory(where: str, folder: Path, partition: Partition, given: str | None) -> str | None:
    """Return the folder that a program starts in: one that is not a whole path is relative to the test's file.

    Raises:
        SpecError: it is relative, and nodes do not have the folder of the test's file.
    """
    if given is None or given.startswith("/"):
        return given
    if partition.apart:
        text = f"{given!r} is relative to the test's file, which its nodes do not have; write the whole path of a folder there"
        raise SpecError([Problem(where, "cwd", text)])
    return os.path.normpath(folder / given)


def staged_files(where: str, folder: Path, partition: Partition, values: Mapping[str, Any]) -> dict[str, str]:
    """Return what is put into the run's folder.

    Raises:
        SpecError: a file is missing, or they are too large; an artifact is no path there.
    """
    try:
        check_artifacts(as_list(values["artifacts"]))
        given = as_list(values["files"])
        return files_of(given, folder.absolute(), partition) if given else {}
    except SoftwareError as error:
        raise SpecError([Problem(where, error.key, str(error))]) from None


def conditions_of(given: Any) -> tuple[Any, ...]:
    """Return the patterns and functions of ``sanity``: a text is one pattern, blanks and all."""
    return (given,) if isinstance(given, str) or callable(given) else tuple(given)


def _wrong_condition(condition: Any) -> str:
    if callable(condition):
        return wrong_function("sanity", condition)
    return wrong_pattern(condition, one_group=False)


def _named(condition: Any) -> str:
    """Return a pattern of ``sanity``, or for records the name of a function."""
    return f"{FUNCTION}{getattr(condition, '__qualname__', '')}" if callable(condition) else str(condition)


#: Before the name of a function among the patterns of ``sanity``: no pattern begins so.
FUNCTION = "(?function)"
