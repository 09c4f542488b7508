"""The ``#SBATCH`` lines of a job script as attributes of pyslurm.JobSubmitDescription. Pure functions.

pyslurm has a parser of its own, ``load_sbatch_options``; as of 25.11.2 it sets an attribute that does not exist for
``--partition``, and loses values with spaces or a second equals sign.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Mapping
from typing import Any

from pytest_mlhpc.provision.slurm.hostlist import HostlistError, expand
from pytest_mlhpc.provision.slurm.text import duration_s

#: Options whose value goes as it is to the attribute.
_TEXT = {
    "job-name": "name", "qos": "qos", "account": "account", "constraint": "constraints", "nodes": "nodes",
    "chdir": "working_directory", "output": "standard_output", "error": "standard_error",
    "input": "standard_in", "open-mode": "log_files_open_mode", "comment": "comment", "signal": "signal",
    "gpus-per-task": "gpus_per_task", "gpus": "gpus",
}  # fmt: skip

_LISTS = {"partition": "partitions", "reservation": "reservations", "licenses": "licenses"}

_NODES = {"nodelist": "required_nodes", "exclude": "excluded_nodes"}

_NUMBERS = {
    "ntasks": "ntasks", "ntasks-per-node": "ntasks_per_node", "cpus-per-task": "cpus_per_task",
    "threads-per-core": "threads_per_core", "priority": "priority",
}  # fmt: skip

_MEMORY = {"mem": "memory_per_node", "mem-per-cpu": "memory_per_cpu"}

_FLAGS: dict[str, tuple[str, Any]] = {
    "exclusive": ("resource_sharing", "no"), "requeue": ("is_requeueable", True), "no-requeue": ("is_requeueable", False),
    "hold": ("priority", 0),
}  # fmt: skip

_SHORT = {
    "J": "job-name", "p": "partition", "q": "qos", "A": "account", "C": "constraint", "N": "nodes", "n": "ntasks",
    "c": "cpus-per-task", "t": "time", "o": "output", "e": "error", "D": "chdir", "w": "nodelist", "x": "exclude",
    "L": "licenses", "H": "hold", "G": "gpus",
}  # fmt: skip


class CannotSayError(ValueError):
    """An option that pyslurm has no attribute for, or cannot be given this value; sbatch can."""


def attributes(script: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the attributes for the lines of *script*, the job's environment among them.

    Raises:
        CannotSayError: names the option that pyslurm cannot say.
    """
    found: dict[str, Any] = {"environment": _environment(environ)}
    gres: dict[str, int] = {}
    for option, value in _options(script):
        if option in {"gres", "gpus-per-node"}:
            gres |= _gres(option, value)
        else:
            found |= _attribute(option, value)
    return found | ({"gres_per_node": gres} if gres else {})


def _options(script: str) -> list[tuple[str, str | None]]:
    """Return long names and values, from the lines before the script's first command, as sbatch reads them."""
    options: list[tuple[str, str | None]] = []
    for line in script.splitlines():
        if line.strip() and not line.startswith("#"):
            break
        if line.startswith("#SBATCH"):
            words = shlex.split(line.removeprefix("#SBATCH"))
            while words:
                options.append(_option(words))
    return options


def _option(words: list[str]) -> tuple[str, str | None]:
    """Take one option off the front of *words*."""
    word = words.pop(0)
    if word.startswith("--"):
        name, equals, value = word[2:].partition("=")
        if equals:
            return name, value
    elif word.startswith("-") and word[1:2] in _SHORT:
        name, value = _SHORT[word[1]], word[2:]
        if value:
            return name, value
    else:
        raise CannotSayError(f"pyslurm cannot say {word!r}")
    if name in _FLAGS:
        return name, None
    if not words:
        raise CannotSayError(f"pyslurm cannot say {word!r} without a value")
    return name, words.pop(0)


def _attribute(option: str, value: str | None) -> dict[str, Any]:
    """Return the attribute of one option."""
    if value is None and option in _FLAGS:
        return dict([_FLAGS[option]])
    if value is not None and option in _TEXT:
        return {_TEXT[option]: value}
    if value is not None and option in _LISTS:
        return {_LISTS[option]: value.split(",")}
    if value is not None and option in _NODES:
        return {_NODES[option]: _names(option, value)}
    return _figure(option, value or "")


def _figure(option: str, value: str) -> dict[str, Any]:
    """Return the attribute of an option whose value is a number, a time, a size, or NONE."""
    if option in _NUMBERS and value.isdecimal():
        return {_NUMBERS[option]: int(value)}
    if option in _MEMORY and value.strip("0KMGT"):  # 0 means all memory, pyslurm takes it for nothing
        return {_MEMORY[option]: value}
    seconds = duration_s(value) if option == "time" else None
    if seconds is not None:
        return {
            "time_limit": math.ceil(seconds / 60)
        }  # whole minutes: text raises TypeError where it is digits
    if (option, value) == ("export", "NONE"):
        return {}  # see _environment
    raise CannotSayError(f"pyslurm cannot say --{option}={value}")


def _names(option: str, value: str) -> list[str]:
    try:
        return list(expand(value))
    except HostlistError as error:
        raise CannotSayError(f"pyslurm cannot say --{option}={value}: {error}") from error


def _gres(option: str, value: str | None) -> dict[str, int]:
    """Return ``gpu:h100`` -> 4 of ``gpu:h100:4``; one of what has no count."""
    found: dict[str, int] = {}
    for part in (value or "").split(","):
        words = part.split(":") if option == "gres" else ["gpu", *part.split(":")]
        count = int(words.pop()) if len(words) > 1 and words[-1].isdecimal() else 1
        if not 0 < len(words) < 3 or not all(words):
            raise CannotSayError(f"pyslurm cannot say --{option}={value}")
        found[":".join(words)] = count
    return found


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what ``--export=NONE`` gives a job: its user's own, loaded on the node. An empty one would mean all of ours."""
    return {"SLURM_GET_USER_ENV": "1", "PATH": environ.get("PATH", os.defpath)}
