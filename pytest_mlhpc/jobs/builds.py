"""What a program needs before it runs, declared as a fixture: a build (``build``), or a run that has ended (``prepare``)."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from pytest_mlhpc.config.build import DERIVED
from pytest_mlhpc.config.model import Target
from pytest_mlhpc.errors import Problem, SpecError, nearest
from pytest_mlhpc.jobs.programs import conditions_of, names_in
from pytest_mlhpc.jobs.software import SoftwareError, files_of, variables
from pytest_mlhpc.jobs.spec import as_list
from pytest_mlhpc.node.cores import ON_NODE
from pytest_mlhpc.node.protocol.plan import BuildPlan
from pytest_mlhpc.node.run_files import regular_files

if TYPE_CHECKING:
    from typing import Unpack

    from pytest_mlhpc.jobs.decorators import ProgramFields

#: Attribute of a fixture's function that holds its declaration.
DECLARED = "mlhpc_needed"


@dataclass(frozen=True)
class Build:
    """What :func:`build` was given, and the value of its fixture."""

    command: str | Sequence[Any]
    files: str | Sequence[str] = ()
    env: Mapping[str, Any] = field(default_factory=dict, repr=False)
    where: str = "node"


@dataclass(frozen=True)
class Preparation:
    """What :func:`prepare` was given."""

    command: str | Sequence[Any]
    fields: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Needed:
    """A fixture that a program takes, or that is named in the command of a run that it needs.

    ``folder`` is that of the file that declares it, ``node_id`` and ``identity`` are those of a test in its place, without
    the target; ``needs`` are the fixtures that its own command names.
    """

    declared: Build | Preparation
    folder: Path
    node_id: str = ""
    identity: str = ""
    needs: Mapping[str, Needed] = field(default_factory=dict)


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
        command: a list of arguments, or a text that is split as a POSIX shell splits it. It starts in the folder of the build.
            Values such as ``{last_level_cache}`` are put in as into commands of tests, here and in ``env``.
        files: files, folders and globs relative to the file that declares it, which it finds in that folder.
        env: variables over those of the environment. Those of the test are not there, so that tests that differ in them share it.
        where: ``node``: by the first run that needs it. ``login``: where pytest runs, before anything is submitted, with the
            modules of the environment; for sites whose nodes have no compiler, or no network.
    """
    return _fixture(Build(command, files, env or {}, where))


def prepare(command: str | Sequence[Any], **fields: Unpack[ProgramFields]) -> Any:
    """Return a fixture: a run that has ended before a test that takes it is submitted. ``{NAME}`` in their commands is its folder.

    It is made once for all tests of a session that take it, on each partition. The fixture has what it left: ``.output``,
    ``.errors``, ``.log``, ``.folder``, and its artifacts by ``.json("m.json")``, ``.text()``, ``.path()``. If it fails, that is an
    error of each test that takes it. Pods find its artifacts in ``{NAME}``, and nothing else of it.

    Args:
        command: a list of arguments, or a text that is split as a POSIX shell splits it. It may name builds and other such runs.
        fields: those of :func:`pytest_mlhpc.program`, but for those of a test: ``judge``, ``reference``, ``requires``, functions.
    """
    return _fixture(Preparation(command, dict(fields)))


def _fixture(declared: Build | Preparation) -> Any:
    def needed(request: pytest.FixtureRequest) -> Any:
        return request.getfixturevalue("run").needed(request.fixturename) or declared

    setattr(needed, DECLARED, declared)
    return pytest.fixture(needed)


def named_fixtures(command: str | Sequence[Any]) -> list[str]:
    """Return the names in braces in *command* that may be those of fixtures."""
    texts = [command] if isinstance(command, str) else [str(word) for word in command]
    return sorted(names_in(texts) - {*DERIVED, *ON_NODE})


#: Fields of a program that only a test can have.
_OF_TEST = ("judge", "reference", "requires")


def fields_of_run(where: str, name: str, declared: Preparation) -> dict[str, Any]:
    """Return the fields of a program by which the run *name* is declared.

    Raises:
        SpecError: it is called like a figure of the run, or has a field that only a test can have.
    """
    _check_name(where, name)
    sanity = declared.fields.get("sanity", ())
    functions = any(callable(one) for one in conditions_of(sanity))
    wrong = [*(one for one in _OF_TEST if one in declared.fields), *(["sanity"] if functions else [])]
    if wrong:
        text = (
            "only a test can have it"
            if wrong[0] != "sanity"
            else "only a test can have functions; give patterns"
        )
        raise SpecError([Problem(where, f"{name}: {wrong[0]}", text)])
    return {**declared.fields, "command": declared.command, "metrics": (), "judge": False}


def _check_name(where: str, name: str) -> None:
    if name in {*DERIVED, *ON_NODE}:
        text = f"{{{name}}} is a figure of the run; give the fixture another name"
        raise SpecError([Problem(where, name, text)])


def build_plan(where: str, name: str, declared: Build, folder: Path, target: Target) -> BuildPlan:
    """Return the plan of a build that *name* names, whose files lie below *folder*.

    Raises:
        SpecError: its command, files or variables cannot be.
    """
    _check_name(where, name)
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
    if before and (figures := names_in([*argv, *env.values()]) & set(ON_NODE)):
        text = f"where='login': {{{min(figures)}}} is known on the nodes alone; leave where out, or write the figure"
        raise SpecError([Problem(where, name, text)])
    return BuildPlan(name, _key(argv, files, env, target), argv, files, env, before)


def rebuilt(plan: BuildPlan, target: Target) -> BuildPlan:
    """Return *plan* as it is made on *target*: in another environment it is another build."""
    return replace(plan, key=_key(plan.argv, plan.files, plan.variables, target))


def _wrong_place(place: object, target: Target) -> str:
    """Return why a build cannot be made at *place*, or an empty string."""
    if place not in PLACES:
        near = nearest(str(place), PLACES)
        return f"where {place!r} is not one of {', '.join(PLACES)}" + (
            f" (did you mean {near!r}?)" if near else ""
        )
    if place == "node" or target.partition.scheduler == "local":
        return ""
    if target.partition.scheduler not in {"slurm", "commands"} or target.partition.apart:
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
