"""The command and the metrics of a program as a test may write them, made plain values."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_mlhpc.errors import Problem, SpecError
from pytest_mlhpc.jobs.metrics import wrong_metrics

if TYPE_CHECKING:
    from pytest_mlhpc.jobs.spec import JobSpec


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
    if "metrics" in asked:
        wrong = wrong_metrics(asked["metrics"])
        problems += [Problem(where, "metrics", text) for text in wrong]
        found["metrics"] = {} if wrong else {metric.name: metric.rule() for metric in asked["metrics"]}
    if problems:
        raise SpecError(problems)
    return found


def beside_test(spec: JobSpec) -> tuple[str, ...]:
    """Return the program and its arguments as nodes are told them.

    A program by a relative path, such as ``./bench``, is the file of that name beside the test, where there is one. A spec
    has it as it was typed: another checkout declares the same run.
    """
    name = next(iter(spec.argv), "")
    if spec.cwd is not None or not spec.folder or "/" not in name or name.startswith("/"):
        return spec.argv
    path = Path(os.path.normpath(Path(spec.folder).absolute() / name))
    return (str(path), *spec.argv[1:]) if path.is_file() else spec.argv


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
