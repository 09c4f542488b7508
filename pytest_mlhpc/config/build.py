"""One partition of the tree: variables put in, validated, checked for sense, and made into the frozen model."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from pytest_mlhpc.config.model import Environment, Maintenance, NodeType, Partition, Vet
from pytest_mlhpc.config.schema import (
    EnvironmentModel,
    MaintenanceModel,
    PartitionModel,
    VetModel,
)
from pytest_mlhpc.config.systems_files import scheduler_of
from pytest_mlhpc.config.yaml import YamlNode, holds_variable, validate
from pytest_mlhpc.errors import Problem, UsageError, nearest

#: Schedulers with which ranks are forked unless the partition says otherwise.
WARM: Final = frozenset({"local", "kubernetes"})

#: What ``{name}`` may be, and what it becomes.
DERIVED: Final[Mapping[str, str]] = {
    "cores": "cores of a node",
    "cores_per_rank": "cores that one rank may use, at least 1",
    "devices": "accelerators of a node, 0 where there are none",
    "memory_per_node": "bytes of memory of a node",
    "memory_per_rank": "bytes of memory of a node over its ranks",
    "nodes": "nodes of the run",
    "ranks": "processes of the run",
    "ranks_per_node": "processes on each node",
}

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_PLAIN = re.compile(rf"\$\$\{{|\$\{{(?P<env>{_NAME})\}}|(?P<bad_env>\$\{{[^}}]*\}}?)", re.DOTALL)
_TEMPLATE = re.compile(
    rf"{_PLAIN.pattern}|\{{\{{|\}}\}}|\{{(?P<derived>{_NAME})\}}|(?P<bad_brace>\{{[^}}]*\}}?)", re.DOTALL
)
#: One word in braces, as a command may have it: other braces are the program's own.
_NAMED = re.compile(rf"\{{({_NAME})\}}")
_FILL = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|\{")


class SecretText(str):
    """A text that may hold a secret: its repr, which tracebacks show of arguments and locals, does not tell it."""

    __slots__ = ()

    def __repr__(self) -> str:
        """Return what stands for it."""
        return "'***'"


def resolve(
    text: str,
    environ: Mapping[str, str],
    *,
    missing: Callable[[str], None],
    complain: Callable[[str, str], None],
    template: bool = False,
) -> str:
    """Put variables of *environ* into *text*; a template keeps its ``{name}`` for :func:`fill`.

    ``missing(name)`` is called for each variable that is not set, ``complain(message, suggestion)`` for each mistake;
    both stay in the text as they were written. A variable's value is never looked at again: braces in it are text.
    """

    def put(match: re.Match[str]) -> str:
        found = match.group()
        groups = match.groupdict()
        if groups["env"] is not None:
            value = environ.get(groups["env"])
            if value is None:
                missing(groups["env"])
                return found
            return value.replace("{", "{{").replace("}", "}}") if template else value
        if groups["bad_env"] is not None:
            complain(
                f"{found[:40]!r} names no variable; write ${{NAME}}, or $${{ for the two characters themselves",
                "",
            )
        elif groups.get("bad_brace") is not None:
            complain(f"{found[:40]!r} is no derived value; write {{{{ for a brace itself", "")
        elif groups.get("derived") is not None and groups["derived"] not in DERIVED:
            name = groups["derived"]
            complain(f"{{{name}}} is not one of {', '.join(DERIVED)}", nearest(name, DERIVED))
        elif found == "$${":
            return "${{" if template else "${"
        return found

    return (_TEMPLATE if template else _PLAIN).sub(put, text)


def fill(text: str, values: Mapping[str, object]) -> SecretText:
    """Put *values* of one run (see :func:`derived_values`) into a template that :func:`resolve` returned.

    Raises:
        UsageError: a ``{name}`` has no value.
    """

    def put(match: re.Match[str]) -> str:
        found = match.group()
        if found in {"{{", "}}"}:
            return found[0]
        if match[1] not in values:
            raise UsageError(f"{text!r}: {found} has no value here; known are {', '.join(sorted(values))}")
        return str(values[match[1]])

    return SecretText(_FILL.sub(put, text))


def with_values(word: str, values: Mapping[str, object]) -> str:
    """Return *word* of a command with each ``{name}`` of *values* replaced; all other braces are the program's own."""
    return _NAMED.sub(lambda found: str(values.get(found[1], found[0])), word)


def derived_values(*, cores: int, memory: int, devices: int, nodes: int, ranks: int) -> dict[str, int]:
    """Return a value for every name in :data:`DERIVED`: *cores*, *memory* and *devices* of a node, the run's totals."""
    ranks_per_node = max(1, ranks // max(1, nodes))
    return {
        "cores": cores,
        "cores_per_rank": max(1, cores // ranks_per_node),
        "devices": devices,
        "memory_per_node": memory,
        "memory_per_rank": memory // ranks_per_node,
        "nodes": nodes,
        "ranks": ranks,
        "ranks_per_node": ranks_per_node,
    }


LOCAL: Final = "local"


@dataclass(frozen=True)
class InstalledTypes:
    """What installed packages serve: schedulers with the model of their options, and launchers (None: unknown)."""

    schedulers: Mapping[str, type[Any] | None]
    launchers: Collection[str] | None = None


@dataclass
class Findings:
    """What is wrong, and the variables that are not set, where they are used."""

    problems: list[Problem] = field(default_factory=list)
    missing: list[Problem] = field(default_factory=list)

    def all(self) -> list[Problem]:
        """Return both, each once, in the order of their lines."""
        return sorted_problems([*self.problems, *self.missing])


def sorted_problems(problems: Collection[Problem]) -> list[Problem]:
    """Return *problems* in the order of file and line, each once."""

    def place(problem: Problem) -> tuple[str, int]:
        name, _, line = problem.where.rpartition(":")
        return (name, int(line)) if line.isdigit() else (problem.where, 0)

    return sorted(dict.fromkeys(problems), key=place)


def put_variables(
    node: YamlNode,
    environ: Mapping[str, str],
    findings: Findings,
    *,
    secrets: bool = True,
    trail: tuple[str, ...] = (),
) -> YamlNode:
    """Return *node* with ``${ENV}`` put in everywhere; values of an environment's ``variables`` are templates.

    Without *secrets* those stay as they were written: what is shown holds no token. *trail* is the last three keys.
    """
    if isinstance(node.value, dict):
        children = {
            key: put_variables(child, environ, findings, secrets=secrets, trail=_next(trail, key))
            for key, child in node.value.items()
        }
        return replace(node, value=children)
    if isinstance(node.value, list):
        items = [
            put_variables(child, environ, findings, secrets=secrets, trail=trail) for child in node.value
        ]
        return replace(node, value=items)
    if not isinstance(node.value, str) or trail == _VERBATIM:
        return node

    def missing(name: str) -> None:
        message = f"the environment variable {name} is not set"
        findings.missing.append(Problem(node.where, node.key, message, nearest(name, environ)))

    def complain(message: str, suggestion: str) -> None:
        findings.problems.append(Problem(node.where, node.key, message, suggestion))

    template = trail == _TEMPLATES
    text = resolve(node.value, environ, missing=missing, complain=complain, template=template)
    if text == node.value or (template and not secrets):
        return node
    return replace(node, value=text, written=node.value)


#: Below these keys (the middle one is any environment's name) ``{derived}`` values are filled in for each run.
_TEMPLATES: Final = ("environments", "", "variables")
#: Shell of the site's own, in which ``${HOME}`` is for the node's bash.
_VERBATIM: Final = ("environments", "", "setup")


def _next(trail: tuple[str, ...], key: str) -> tuple[str, ...]:
    if trail == _TEMPLATES:
        return trail
    if trail[-1:] == ("environments",):
        key = ""
    return (*trail[-2:], key)


def split_options(partition: YamlNode, types: InstalledTypes) -> tuple[YamlNode, dict[str, YamlNode]]:
    """Return *partition* without the options of schedulers, and those."""
    if not isinstance(partition.value, dict):
        return partition, {}
    # A scheduler called `nodes` changes nothing.
    names = {*types.schedulers, scheduler_of(partition)} - set(PartitionModel.model_fields)
    options = {key: child for key, child in partition.items() if key in names}
    rest = {key: child for key, child in partition.items() if key not in names}
    return YamlNode(rest, partition.where, partition.key, partition.size), options


def check_partition(
    node: YamlNode,
    types: InstalledTypes,
    findings: Findings,
    *,
    archived: bool = False,
    lenient: bool = False,
) -> tuple[PartitionModel | None, Mapping[str, Any]]:
    """Validate a partition whose variables are put in; *lenient*: values with a ``${`` left count only where they are valid.

    Returns the validated partition and its scheduler's validated options; None for the partition if either is wrong, or needs
    variables that are not set.
    """
    rest, options = split_options(node, types)
    found, problems = validate(PartitionModel, rest, extra_keys=types.schedulers, lenient=lenient)
    findings.problems.extend(problems)
    name = scheduler_of(node)
    checked: Mapping[str, Any] | None = {}
    model = None
    if name and not holds_variable(name):
        checked, model = _check_options(
            name, node, options, types, findings, archived=archived, lenient=lenient
        )
    if isinstance(found, PartitionModel):
        findings.problems.extend(_contradictions(node, found, types, model))
    return (found, checked) if isinstance(found, PartitionModel) and checked is not None else (None, {})


def _check_options(
    name: str,
    node: YamlNode,
    options: Mapping[str, YamlNode],
    types: InstalledTypes,
    findings: Findings,
    *,
    archived: bool,
    lenient: bool,
) -> tuple[Mapping[str, Any] | None, Any]:
    """Return the options as they were checked, None if they are not valid, and the model's instance that has done so."""

    def problem(child: YamlNode | None, message: str, suggestion: str = "") -> None:
        place = child or node
        findings.problems.append(Problem(place.where, place.key, message, suggestion))

    for other, child in options.items():
        if other != name:
            problem(child, f"these are options of {other}, but the scheduler is {name}")
    own = options.get(name)
    if name not in types.schedulers:
        if not archived:
            known = ", ".join(sorted(types.schedulers))
            suggestion = nearest(name, types.schedulers)
            problem(
                node.get("scheduler"),
                f"no installed package serves scheduler {name!r}; known: {known}",
                suggestion,
            )
        elif own is not None and not isinstance(own.value, dict):
            problem(own, "should be a mapping")
        return (own.plain() if own is not None and isinstance(own.value, dict) else {}), None
    model = types.schedulers[name]
    if model is None:
        if own is not None:
            problem(own, f"scheduler {name} takes no options")
        return {}, None
    own = own or YamlNode({}, node.where, f"{node.key}.{name}")
    found, problems = validate(model, own, lenient=lenient, leave_out=True)
    findings.problems.extend(problems)
    if found is not None:
        return dict(found.model_dump()), found
    return None, None


def _contradictions(
    node: YamlNode, found: PartitionModel, types: InstalledTypes, options: Any = None
) -> list[Problem]:
    """Return what is well-formed but cannot be; *options* are those of the scheduler, which may have a say in it."""
    problems: list[Problem] = []

    def problem(path: str, message: str, suggestion: str = "") -> None:
        place = node
        for part in path.split("."):
            place = place.get(part) or place
        problems.append(Problem(place.where, f"{node.key}.{path}", message, suggestion))

    if found.environments is not None and not found.environments:
        problem("environments", "names no environment")
    if "all" in (found.environments or {}):
        problem(
            "environments.all", "`all` means every environment after --mlhpc-environment; choose another name"
        )
    if types.launchers is not None and found.launcher not in {None, "auto", *types.launchers}:
        known = ", ".join(sorted(types.launchers))
        text = f"no installed package has a launcher {found.launcher!r}; known: {known}"
        problem("launcher", text, nearest(str(found.launcher), types.launchers))
    devices = found.nodes.devices if found.nodes is not None else None
    accelerators = {"auto", "cpu"} if found.scheduler != LOCAL else {"auto", "cpu", "cuda", "rocm", "xpu"}
    if found.accelerator not in accelerators and not devices:
        problem("nodes.devices", f"is missing: how many {found.accelerator} devices does a node have?")
    if found.nodes is not None and 0 < (found.nodes.memory or 0) < (found.nodes.cores or 1) << 20:
        problem("nodes.memory", f"is less than 1 MiB for each of {found.nodes.cores or 1} cores")
    _check_times(found, options, problem)
    _check_transport(found, options, problem)
    (_check_local if found.scheduler == LOCAL else _check_remote)(found, problem)
    for name, message, suggestion in _wrong_expectations(found):
        problem(f"vet.expect.{name}", message, suggestion)
    for path, text in options.contradictions(found) if hasattr(options, "contradictions") else ():
        problem(path, text)
    return problems


def _check_times(found: PartitionModel, options: Any, problem: Callable[..., None]) -> None:
    longest = getattr(options, "max_time", None)
    if longest is not None and found.time_limit > longest:
        text = f"is {longest:g} s, and time_limit of its runs {found.time_limit:g} s: no run would fit"
        problem(f"{found.scheduler}.max_time", text)


def _check_transport(found: PartitionModel, options: Any, problem: Callable[[str, str], None]) -> None:
    """Complain about a scheduler that cannot be reached by ssh, and about what that needs."""
    if found.transport is None:
        return
    if found.scheduler != "slurm":
        problem("transport", f"only Slurm's commands are run by ssh, and the scheduler is {found.scheduler}")
        return
    if options is None:
        return
    if getattr(options, "shared_directory", None) is None:
        problem(
            "slurm.shared_directory",
            "is missing: with `transport` it is an absolute folder of that cluster which its nodes see",
        )
    if getattr(options, "client", "") == "pyslurm":
        problem("slurm.client", "pyslurm cannot be used by ssh; leave `client` out")


def _wrong_expectations(found: PartitionModel) -> Iterator[tuple[str, str, str]]:
    """Yield name, message and nearest word of each expectation that no node can meet."""
    if not found.vet.expect:
        return
    from pytest_mlhpc.config.policy import PROPERTIES, trouble

    for name, value in found.vet.expect.items():
        message, suggestion = trouble(name, value)
        if message and not (name in PROPERTIES and holds_variable(value)):
            yield name, message, suggestion


def _check_local(found: PartitionModel, problem: Callable[[str, str], None]) -> None:
    """Complain about what this machine cannot have."""
    if found.nodes is not None and found.nodes.max > 1:
        problem("nodes.max", "scheduler local has one node: this machine")
    for name, environment in (found.environments or {}).items():
        if environment.setup is not None:
            problem(f"environments.{name}.setup", "scheduler local has no job script; use `variables`")


def _check_remote(found: PartitionModel, problem: Callable[[str, str], None]) -> None:
    """Complain about what only scheduler local may leave out."""
    if found.environments is None:
        problem("environments", "is missing; each names a software set-up, with its `python`")
    if found.accelerator == "auto":
        problem("accelerator", "auto works only with scheduler local; say which it is")
    for name, environment in (found.environments or {}).items():
        for key in ("python", "venv", "conda"):
            if str(getattr(environment, key) or "").startswith("~"):
                problem(f"environments.{name}.{key}", "no shell expands ~ there; write ${HOME}")
        if found.scheduler == "slurm" and environment.container and environment.container.runtime == "docker":
            text = "docker has no place in a Slurm job; apptainer and podman read the same images"
            problem(f"environments.{name}.container.runtime", text)
    if found.nodes is None:
        problem("nodes", "is missing; only scheduler local reads what a node has by itself")
        return
    for name in ("cores", "memory"):
        if getattr(found.nodes, name) is None:
            problem(f"nodes.{name}", "is missing")


def make_partition(
    system: str,
    name: str,
    found: PartitionModel,
    options: Mapping[str, Any],
    *,
    nodes: NodeType,
    accelerator: str,
    source: Path,
) -> Partition:
    """Return the frozen partition of the validated one."""
    local = found.scheduler == LOCAL
    environments = found.environments or {"default": EnvironmentModel.model_validate({})}
    return Partition(
        system=system,
        name=name,
        scheduler=found.scheduler,
        launcher=found.launcher or "auto",
        accelerator=accelerator,
        nodes=nodes,
        environments=tuple(
            _environment(key, value, source if local else None) for key, value in environments.items()
        ),
        features=frozenset(found.features),
        max_jobs=found.max_jobs,
        preset=found.preset,
        preset_is_default="preset" not in found.model_fields_set,
        vet=_vet(found.vet, source),
        time_limit_s=found.time_limit,
        budget=found.budget or "",
        owner=found.owner or "",
        maintenance=maintenance_of(found.maintenance),
        matters=found.matters,
        warm=found.scheduler in WARM if found.warm is None else found.warm,
        scheduler_options=options,
        ssh=found.transport.ssh if found.transport else "",
    )


def maintenance_of(found: Iterable[MaintenanceModel]) -> tuple[Maintenance, ...]:
    """Return the frozen maintenances of the validated ones."""
    return tuple(Maintenance(one.from_, one.until, one.reason) for one in found)


def _vet(found: VetModel, source: Path) -> Vet:
    """*source* is the file, relative to which a path is."""
    return Vet(
        level=found.level,
        unknown=found.unknown,
        budget_s=found.budget or 0.0,
        exclude_for_s=found.exclude_for,
        expect=dict(found.expect),
        policy=str(source.resolve().parent / Path(found.policy).expanduser()) if found.policy else "",
    )


def _environment(name: str, found: EnvironmentModel, source: Path | None) -> Environment:
    """*source* is the file if the partition is this machine: there, a path may be relative to the file."""
    python = found.python or (sys.executable if source is not None else "python3")
    if source is not None and "/" in python and not python.startswith("/"):
        python = str(source.resolve().parent / Path(python).expanduser())
    extra = {
        key: value.model_dump(exclude_none=True) if hasattr(value, "model_dump") else value
        for key in ("setup", "venv", "conda", "container", "uenv")
        if (value := getattr(found, key)) is not None
    }
    variables = {key: SecretText(value) for key, value in found.variables.items()}
    return Environment(name, python, tuple(found.modules), variables, extra)
