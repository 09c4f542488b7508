"""`build(...)`: what a program needs to be built, declared as a fixture; from its declaration to the plan of the build."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from pytest_mlhpc.config.build import DERIVED
from pytest_mlhpc.config.model import Target
from pytest_mlhpc.errors import Problem, SpecError, nearest
from pytest_mlhpc.jobs.software import SoftwareError, files_of, variables
from pytest_mlhpc.jobs.spec import as_list
from pytest_mlhpc.node.cores import ON_NODE
from pytest_mlhpc.node.protocol.plan import BuildPlan
from pytest_mlhpc.node.run_files import regular_files

#: Attribute of a fixture's function that holds its declaration.
DECLARED = "mlhpc_build"


@dataclass(frozen=True)
class Build:
    """What :func:`build` was given, and the value of its fixture."""

    command: str | Sequence[Any]
    files: str | Sequence[str] = ()
    env: Mapping[str, Any] = field(default_factory=dict, repr=False)
    where: str = "node"


#: Where a build can be made.
PLACES = ("node", "login")


def build(
    command: str | Sequence[Any],
    *,
    files: str | Sequence[str] = (),
    env: Mapping[str, Any] | None = None,
    where: Literal["node", "login"] = "node",
) -> Any:
    """Return a fixture: what tests that take it need to be built. ``{NAME}`` in their commands is the folder of the build.

    It is built before the first run that needs it, on the nodes of that run and in its environment, and found ready by all later
    runs, until the command, its files, the environment or the partition change. A build that fails is an error of each test that
    needs it.

    Args:
        command: a list of words, or a text that is split as a POSIX shell splits words. It starts in the folder of the build.
        files: files, folders and globs relative to the file that declares it, which it finds in that folder.
        env: variables over those of the test.
        where: ``node``: by the first run that needs it. ``login``: where pytest runs, before anything is submitted, with the
            modules of the environment; for sites whose nodes have no compiler, or no network.
    """
    declared = Build(command, files, env or {}, where)

    def built() -> Build:
        return declared

    setattr(built, DECLARED, declared)
    return pytest.fixture(scope="session")(built)


def build_plan(where: str, name: str, declared: Build, folder: Path, target: Target) -> BuildPlan:
    """Return the plan of a build that *name* names, whose files lie below *folder*.

    Raises:
        SpecError: its command, files or variables cannot be.
    """
    if name in {*DERIVED, *ON_NODE}:
        raise SpecError(
            [Problem(where, name, f"{{{name}}} is a figure of the run; give the build another name")]
        )
    try:
        given = declared.command
        argv = tuple(shlex.split(given) if isinstance(given, str) else map(str, given))
    except ValueError as error:
        raise SpecError([Problem(where, name, f"{str(error).lower()} in {declared.command!r}")]) from None
    if not argv or not argv[0]:
        raise SpecError([Problem(where, name, "the build names no program; write build('make bench')")])
    if text := _wrong_place(declared.where, target):
        raise SpecError([Problem(where, name, text)])
    try:
        files = files_of(as_list(declared.files), folder, target.partition) if declared.files else {}
        env = variables(declared.env)
    except SoftwareError as error:
        raise SpecError([Problem(where, f"{name}: {error.key}", str(error))]) from None
    before = declared.where == "login" and target.partition.scheduler != "local"
    return BuildPlan(name, _key(argv, files, env, target), argv, files, env, before)


def _wrong_place(place: object, target: Target) -> str:
    """Return why a build cannot be made at *place*, or an empty string."""
    if place not in PLACES:
        near = nearest(str(place), PLACES)
        return f"where {place!r} is not one of {', '.join(PLACES)}" + (
            f" (did you mean {near!r}?)" if near else ""
        )
    if place == "node" or target.partition.scheduler == "local":
        return ""
    if target.partition.scheduler != "slurm":
        return f"where='login': nodes of {target.partition.id} see no folder of this machine; leave where out"
    if inside := [name for name in ("container", "uenv") if target.environment.extra.get(name)]:
        return f"where='login': the {inside[0]} of environment {target.environment.name} is on nodes; leave where out"
    return ""


def _key(argv: Sequence[str], files: Mapping[str, str], env: Mapping[str, str], target: Target) -> str:
    """Return a digest of all that the build depends on: another key is another folder."""
    environment = target.environment
    software = [
        environment.name,
        environment.python,
        environment.modules,
        environment.extra,
        environment.variables,
    ]
    place = [target.partition.id, target.partition.nodes.device_model, target.fingerprint]
    digest = hashlib.sha256(
        json.dumps([list(argv), env, software, place], sort_keys=True, default=str).encode(
            "utf-8", "surrogateescape"
        )
    )
    for name, source in sorted(files.items()):
        for path, inside in regular_files(Path(source)):
            content = path.read_bytes()
            digest.update(
                f"{name}/{inside} {path.stat().st_mode & 0o111} {len(content)}\n".encode(
                    "utf-8", "surrogateescape"
                )
            )
            digest.update(content)
    return digest.hexdigest()[:16]
