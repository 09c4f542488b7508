"""``mlhpc-ci.yaml``: which systems have child pipelines, and what the template's inputs are for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pytest_mlhpc.config.schema import Text
from pytest_mlhpc.config.yaml import Node, read_file, validate
from pytest_mlhpc.errors import ConfigError, Problem, nearest

#: A name that may stand in names of jobs, files and resource groups, as the template's own pattern says.
_NAME = r"^[A-Za-z0-9_][A-Za-z0-9._-]*$"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Template(_Strict):
    """Where the template lies: one of the forms of GitLab's ``include`` (a project's may name ``ref``)."""

    local: Text | None = None
    component: Text | None = None
    remote: Text | None = None
    project: Text | None = None
    file: Text | None = None
    ref: Text | None = None

    @model_validator(mode="after")
    def _one_form(self) -> Template:
        forms = [name for name in ("local", "component", "remote", "project") if getattr(self, name)]
        if len(forms) != 1:
            raise ValueError("names one of local, component, remote, or project with file")
        if bool(self.project) != bool(self.file) or (self.ref and not self.project):
            raise ValueError("project, file and perhaps ref go together")
        return self


class Inputs(_Strict):
    """The template's inputs, all but the system's name; what is left out is the template's own default."""

    tags: tuple[Text, ...] | None = None
    service_tags: tuple[Text, ...] | None = None
    partition: Annotated[str, Field(pattern=_NAME)] | None = None
    suite: Text | None = None
    options: Text | None = None
    mode: Literal["wait", "detach"] | None = None
    wait: Text | None = None
    timeout: Text | None = None
    state: Text | None = None
    setup: Text | None = None
    image: Text | None = None
    service_setup: Text | None = None
    scheduler: Text | None = None
    audience: Text | None = None
    nightly: bool | None = None
    influx: bool | None = None
    stage: Text | None = None
    publish_stage: Text | None = None


class _File(_Strict):
    template: Template = Template(local="ci/gitlab/templates/bench.yml")
    defaults: Inputs = Inputs()
    systems: dict[Annotated[str, Field(pattern=_NAME)], Inputs] = Field(min_length=1)


@dataclass(frozen=True)
class Settings:
    """What the file says: GitLab's ``include`` of the template, and system -> inputs."""

    template: Mapping[str, Any]
    systems: Mapping[str, Mapping[str, Any]]


def read(path: Path, known: Mapping[str, bool]) -> Settings:
    """Return what *path* says.

    Args:
        path: The file.
        known: Systems of systems.yaml -> whether they are archived.

    Raises:
        ConfigError: Every problem with file and line.
    """
    node = read_file(path)
    found, problems = validate(_File, node)
    problems += _unknown(node, known)
    if problems or found is None:
        raise ConfigError(problems)
    defaults = _given(found.defaults)
    systems = {name: defaults | _given(inputs) for name, inputs in found.systems.items()}
    bare = [
        Problem(path.name, f"systems.{name}.{key}", f"is missing: which runner {what}?")
        for name, inputs in systems.items()
        for key, what in (("tags", "is on the system's login node"), ("service_tags", "reaches GitLab"))
        if not inputs.get(key)
    ]
    if bare:
        raise ConfigError(bare)
    return Settings(_given(found.template), systems)


def _unknown(node: Node, known: Mapping[str, bool]) -> list[Problem]:
    systems = node.get("systems")
    problems = []
    for name, entry in systems.items() if systems is not None else ():
        if name not in known:
            problems.append(Problem(entry.where, entry.key, "no such system", nearest(name, known)))
        elif known[name]:
            problems.append(
                Problem(entry.where, entry.key, "is archived in systems.yaml: nothing can run there")
            )
    return problems


def _given(model: BaseModel) -> dict[str, Any]:
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in model if value is not None
    }
