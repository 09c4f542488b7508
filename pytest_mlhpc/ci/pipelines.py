"""Child pipelines of GitLab CI, one for each system of mlhpc-ci.yaml."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pytest_mlhpc.config.schema import Text
from pytest_mlhpc.config.yaml import YamlNode, read_file, validate
from pytest_mlhpc.errors import ConfigError, Problem, nearest
from pytest_mlhpc.store.locations import page

#: Sources of pipelines in which a system does something (rules of ci/gitlab/templates/bench.yml).
SOURCES = ("schedule", "web", "api", "trigger", "merge_request_event")
#: Variables of the one who starts a pipeline, which its children get.
FORWARDED = ("SYSTEM", "MLHPC_COLLECT", "MLHPC_ACCEPT", "MLHPC_REASON")


@dataclass(frozen=True)
class PipelineTrigger:
    """Why there is a pipeline: its source, what somebody asked for, and whether its commit is a stranger's."""

    source: str
    asked: Mapping[str, str]
    stranger: bool = False


def occasion_of(environ: Mapping[str, str]) -> PipelineTrigger:
    """Return it from GitLab's variables; outside of GitLab it is a pipeline that a person started."""
    source = environ.get("CI_PIPELINE_SOURCE") or "web"
    theirs, ours = (
        environ.get(f"CI_MERGE_REQUEST_{name}", "") for name in ("SOURCE_PROJECT_ID", "PROJECT_ID")
    )
    approved = environ.get("MLHPC_APPROVED_SHA", "")
    known = bool(approved) and approved == environ.get("CI_COMMIT_SHA", "")
    asked = {name: environ[name] for name in FORWARDED if environ.get(name)}
    return PipelineTrigger(
        source, asked, stranger=source == "merge_request_event" and theirs != ours and not known
    )


def idle(system: str, inputs: Mapping[str, Any], occasion: PipelineTrigger) -> str:
    """Return why a system has nothing to do in a pipeline, or an empty text."""
    asked, source = occasion.asked, occasion.source
    accepting, collecting = "MLHPC_ACCEPT" in asked, "MLHPC_COLLECT" in asked
    reasons = (
        (
            occasion.stranger,
            f"its commit is of a fork; who has read it sets MLHPC_APPROVED_SHA, see {page('gitlab')}",
        ),
        (source not in SOURCES, f"nothing is measured in a pipeline of source {source}"),
        (asked.get("SYSTEM", system) != system, f"this pipeline is about {asked.get('SYSTEM')}"),
        (
            accepting and not ("SYSTEM" in asked and "MLHPC_REASON" in asked),
            "MLHPC_ACCEPT needs SYSTEM and MLHPC_REASON",
        ),
        (accepting and source not in {"web", "api"}, "new values are accepted by a person"),
        (collecting and source == "merge_request_event", "what is left is collected in schedules"),
        (collecting and inputs.get("mode", "wait") != "detach", "it collects nothing, as its mode is wait"),
        (source == "schedule" and not collecting and not inputs.get("nightly", True), "it has no nights"),
    )
    return next((why for holds, why in reasons if holds), "")


def child(
    system: str, template: Mapping[str, Any], inputs: Mapping[str, Any], occasion: PipelineTrigger
) -> dict[str, Any]:
    """Return the whole pipeline of one system, as YAML's plain data."""
    variables = {"MLHPC_PIPELINE": occasion.source} | dict(occasion.asked)
    if why := idle(system, inputs, occasion):
        return {f"nothing:{system}": {"script": [f"echo '{_quiet(f'{system}: {why}')}'"]}}
    return {
        "variables": {name: value.replace("$", "$$") for name, value in variables.items()},
        "include": [{**template, "inputs": {"system": system, **inputs}}],
    }


def _quiet(text: str) -> str:
    """Return *text* fit to stand between single quotes of a shell in a file that GitLab expands variables in."""
    return re.sub(r"[^A-Za-z0-9 .,;:/_-]", "_", text)


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
class PipelineSettings:
    """What the file says: GitLab's ``include`` of the template, and system -> inputs."""

    template: Mapping[str, Any]
    systems: Mapping[str, Mapping[str, Any]]


def read(path: Path, known: Mapping[str, bool]) -> PipelineSettings:
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
    return PipelineSettings(_given(found.template), systems)


def _unknown(node: YamlNode, known: Mapping[str, bool]) -> list[Problem]:
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
