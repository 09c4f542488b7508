"""What describes a scheduler as data: the file of a definition, ``commands:`` of a partition, and how templates are filled in.

A template holds ``{name}`` and nothing else; a pattern is a regular expression of Python with named groups. Nothing is evaluated,
and no command goes through a shell.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    model_validator,
)

from pytest_mlhpc.config.schema import Duration, EnvName, Line, Name, PartitionModel, Text
from pytest_mlhpc.config.yaml import YamlNode, read_file, validate
from pytest_mlhpc.errors import ConfigError, Problem, nearest

#: A job that waits longer than a day for its nodes is given up, unless the partition says otherwise.
PENDING_LIMIT_S: Final = 86400.0

#: The definitions that are shipped.
SHIPPED: Final = Path(__file__).with_name("definitions")

#: What a template of a job's request may say, and what it becomes.
JOB_NAMES: Final[Mapping[str, str]] = {
    "name": "the job's unique name",
    "nodes": "how many nodes",
    "cores": "cores of a node",
    "cores_in_all": "cores of all its nodes",
    "devices": "accelerators of a node",
    "memory_mib": "memory of a node in MiB",
    "time_limit_s": "time limit in seconds",
    "time_limit_min": "time limit in minutes, rounded up",
    "time_limit": "time limit as HH:MM:SS",
    "directory": "folder of the job",
    "output": "file of the job's own output",
    "user": "the user's name",
}

#: A name in braces, a lone brace, or a variable that is shown and not put in.
_TEMPLATE = re.compile(r"\$\{\w+\}|\{([^{}]*)\}|[{}]")

#: Groups that patterns must have, by their place in a definition.
_GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    "submit.id": ("id",),
    "query.job": ("id", "name", "state"),
    "result.name": ("name",),
    "result.exit": ("exit",),
    "hosts.host": ("host",),
}

#: What templates may say, by their place in a definition; elsewhere a job's request.
_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "query.argv": ("user",),
    "result.argv": ("id", "user"),
    "cancel.argv": ("id",),
    "start": ("host",),
}


def _pattern(value: str) -> str:
    try:
        re.compile(value)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{value!r:.80} is no regular expression: {error}") from None
    return value


Pattern = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_pattern)]
Arguments = Annotated[list[Text], Field(min_length=1, max_length=100)]


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DirectivesModel(_Closed):
    """`directives:` lines of the job script that the scheduler reads, each with a prefix."""

    prefix: Text
    arguments: list[Arguments] = []


class SubmitModel(_Closed):
    """`submit:` the command that takes a job script. Any failure that `refused` does not match counts as no answer."""

    argv: Arguments
    script_on_stdin: bool = False
    id: Pattern
    refused: Pattern | None = None


class JobStates(_Closed):
    """`states:` the scheduler's states of jobs; stuck: the job waits for what does not come."""

    pending: list[Text] = []
    running: list[Text] = []
    ended: list[Text] = []
    stuck: list[Text] = []


class QueryModel(_Closed):
    """`query:` the command that lists this user's jobs."""

    argv: Arguments
    job: Pattern
    none: Pattern | None = Field(None, description="what it prints where there is no job")
    states: JobStates


class ResultStates(_Closed):
    """`states:` patterns of why a job ended, tried in this order; without a match its exit code tells."""

    timeout: Pattern | None = None
    out_of_memory: Pattern | None = None
    node_fail: Pattern | None = None
    preempted: Pattern | None = None
    cancelled: Pattern | None = None


class ResultModel(_Closed):
    """`result:` the command that tells of a job that has left the queue."""

    argv: Arguments
    entry: Pattern | None = Field(None, description="begins each entry; the last one counts")
    name: Pattern
    exit: Pattern
    states: ResultStates = ResultStates()
    unknown: Pattern = Field(description="what it prints where it knows no such job, or not yet")


class CancelModel(_Closed):
    """`cancel:` the command that ends a job; `gone`: what it prints of one that has ended."""

    argv: Arguments
    gone: Pattern


class HostsModel(_Closed):
    """`hosts:` variables of a job: with its id, and with its hosts or the name of a file that has them."""

    id: EnvName
    file: EnvName | None = None
    variable: EnvName | None = None
    host: Pattern

    @model_validator(mode="after")
    def _one(self) -> HostsModel:
        if (self.file is None) == (self.variable is None):
            raise ValueError("say one of `file` and `variable`: where the hosts of a job are found")
        return self


class SchedulerDefinition(_Closed):
    """A scheduler as data."""

    title: Text
    tested: Line
    values: dict[Name, Text] = Field({}, description="for templates, where systems.yaml has no other")
    directives: DirectivesModel
    submit: SubmitModel
    query: QueryModel
    result: ResultModel | None = None
    cancel: CancelModel
    hosts: HostsModel
    start: list[Text] = Field(
        [], description="what stands before a program to start it on another node of the job"
    )


def shipped() -> list[str]:
    """Return the names of the definitions that are shipped."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def read_definition(path: Path, values: Mapping[str, str]) -> SchedulerDefinition:
    """Return the definition in *path*, whose templates may also use *values* of systems.yaml.

    Raises:
        ConfigError: it cannot be read or is wrong; each problem with its file and line.
    """
    node = read_file(path, top="")
    found, problems = validate(SchedulerDefinition, node)
    if isinstance(found, SchedulerDefinition):
        problems = [*_missing_groups(node), *_wrong_templates(node, {*values, *found.values})]
    if problems or not isinstance(found, SchedulerDefinition):
        raise ConfigError(problems)
    return found


def _at(node: YamlNode, place: str) -> YamlNode | None:
    found: YamlNode | None = node
    for key in place.split("."):
        found = found.get(key) if found is not None else None
    return found


def _missing_groups(node: YamlNode) -> Iterator[Problem]:
    for place, groups in _GROUPS.items():
        written = _at(node, place)
        if written is None:
            continue
        there = re.compile(written.value).groupindex
        for group in groups:
            if group not in there:
                yield Problem(written.where, place, f"the pattern has no group (?P<{group}>...)")


def _wrong_templates(node: YamlNode, values: set[str]) -> Iterator[Problem]:
    """Yield what is wrong with templates: a brace that begins no name, a name that nothing gives."""
    for place in (
        "values",
        "directives.arguments",
        "submit.argv",
        "query.argv",
        "result.argv",
        "cancel.argv",
        "start",
    ):
        written = _at(node, place)
        names = {*_NAMES.get(place, JOB_NAMES), *(values if place != "values" else ())}
        if place == "submit.argv":
            names.add("script")
        for text in _texts(written) if written is not None else ():
            for match in _TEMPLATE.finditer(text.value):
                if match[1] is None:
                    yield Problem(
                        text.where, place, f"{text.value!r:.80} has a brace that is none of a {{name}}"
                    )
                elif match[1] not in names:
                    known = ", ".join(sorted(names))
                    hint = nearest(match[1], names)
                    yield Problem(
                        text.where, place, f"nothing gives {match.group()!r:.60}; known: {known}", hint
                    )


def _texts(node: YamlNode) -> Iterator[YamlNode]:
    if isinstance(node.value, list):
        for one in node.value:
            yield from _texts(one)
    elif isinstance(node.value, dict):
        for one in node.value.values():
            yield from _texts(one)
    elif isinstance(node.value, str):
        yield node


def fill(text: str, values: Mapping[str, object]) -> str:
    """Return *text* with each ``{name}`` replaced; names were checked when the definition was read."""
    return _TEMPLATE.sub(lambda found: str(values[found[1]]) if found[1] else found.group(), text)


def filled(templates: Sequence[str], values: Mapping[str, object]) -> list[str]:
    """Return *templates* with each ``{name}`` replaced."""
    return [fill(one, values) for one in templates]


def _definition(value: Any, info: ValidationInfo) -> Any:
    """Return the definition that is meant: a shipped one by its name, or a file relative to systems.yaml."""
    if not isinstance(value, str) or "${" in value:
        return value
    folder = (info.context or {}).get("folder") or "."
    if value in shipped():
        path = SHIPPED / f"{value}.yaml"
    elif "/" in value or value.endswith((".yaml", ".yml")):
        path = Path(folder, Path(value).expanduser())
    else:
        hint = nearest(value, shipped())
        known = f"{', '.join(shipped())}, or the path of a file of your own"
        raise ValueError(
            f"{value!r:.80} is no definition; known: {known}" + (f" (did you mean {hint!r}?)" if hint else "")
        )
    try:
        return read_definition(path, info.data.get("values") or {})
    except ConfigError as error:
        raise ValueError(f"the definition is wrong:\n{error}") from None


def _value(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _absolute(value: str) -> str:
    if not value.startswith(("/", "${")) or ":" in value:
        raise ValueError(f"{value!r:.80} is not an absolute path without ':'")
    return value


class CommandsOptions(_Closed):
    """`commands:` of a partition. Every field is described in docs/scheduler-commands.md."""

    values: dict[Name, Annotated[Text, BeforeValidator(_value)]] = Field(
        {}, description="for the definition's templates"
    )
    definition: Annotated[SchedulerDefinition, BeforeValidator(_definition)] = Field(
        description="gridengine or another one that is shipped, or a file relative to systems.yaml"
    )
    arguments: list[Arguments] = Field([], description="more arguments of each job, as `directives` has them")
    shared_directory: Annotated[Text, AfterValidator(_absolute)] | None = Field(
        None, description="folder on a file system that nodes see; else the state directory"
    )
    max_time: Duration | None = Field(None, description="longest allocation")
    pending_limit: Duration = PENDING_LIMIT_S
    batch_python: Text | None = Field(
        None, description="interpreter on the host, where the environment is a container"
    )

    @model_validator(mode="after")
    def _known_values(self) -> CommandsOptions:
        definition = self.definition
        known = {*JOB_NAMES, *definition.values, *self.values}
        for templates in self.arguments:
            for template in templates:
                for match in _TEMPLATE.finditer(template):
                    if match[1] not in known and not match.group().startswith("$"):
                        raise ValueError(
                            f"arguments: nothing gives {match.group()!r}; known: {', '.join(sorted(known))}"
                        )
        texts = f"{definition.model_dump_json()} {self.arguments}"
        used = {*definition.values, *re.findall(r"\{([a-z]\w*)\}", texts)}
        own = sorted(used - {*JOB_NAMES, "script", "id", "user", "host"})
        for name, value in self.values.items():
            if name not in used:
                hint = nearest(name, own)
                text = f"values.{name}: no template of {definition.title} uses it; used: {', '.join(own)}"
                raise ValueError(text + (f" (did you mean {hint!r}?)" if hint else ""))
            for match in _TEMPLATE.finditer(value):
                if match[1] not in JOB_NAMES and not match.group().startswith("$"):
                    raise ValueError(
                        f"values.{name}: nothing gives {match.group()!r}; known: {', '.join(JOB_NAMES)}"
                    )
        return self

    def contradictions(self, partition: PartitionModel) -> Iterator[tuple[str, str]]:
        """Yield (key, text) for each option of the rest of the partition that such a job cannot have."""
        if partition.launcher == "srun":
            title = self.definition.title
            yield (
                "launcher",
                f"srun starts ranks in jobs of Slurm alone, and this is {title}; leave it out, or write torchrun",
            )
        if partition.nodes is not None and partition.nodes.max > 1 and not self.definition.start:
            text = f"the definition has no `start`, so that nothing can be started on a second node of {self.definition.title}"
            yield "nodes.max", text
        for name, environment in (partition.environments or {}).items():
            if environment.uenv is not None:
                yield f"environments.{name}.uenv", "is mounted by Slurm alone"
            if environment.container is not None and environment.container.runtime in {
                "pyxis",
                "enroot",
                "edf",
            }:
                yield (
                    f"environments.{name}.container.runtime",
                    f"{environment.container.runtime} is started by srun alone",
                )
