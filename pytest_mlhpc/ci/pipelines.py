"""Child pipelines of GitLab CI, one for each system: what a pipeline is about goes in as data, its jobs come from the template.

A child pipeline knows neither the source of its parent nor the variables that somebody gave it, so both are written into it.
It must also have a job: where a system has nothing to do, one says why.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pytest_mlhpc.config.files import page

#: Sources of pipelines in which a system does something (rules of ci/gitlab/templates/bench.yml).
SOURCES = ("schedule", "web", "api", "trigger", "merge_request_event")
#: Variables of the one who starts a pipeline, which its children get.
FORWARDED = ("SYSTEM", "MLHPC_COLLECT", "MLHPC_ACCEPT", "MLHPC_REASON")


@dataclass(frozen=True)
class Occasion:
    """Why there is a pipeline: its source, what somebody asked for, and whether its commit is a stranger's."""

    source: str
    asked: Mapping[str, str]
    stranger: bool = False


def occasion_of(environ: Mapping[str, str]) -> Occasion:
    """Return it from GitLab's variables; outside of GitLab it is a pipeline that a person started."""
    source = environ.get("CI_PIPELINE_SOURCE") or "web"
    theirs, ours = (
        environ.get(f"CI_MERGE_REQUEST_{name}", "") for name in ("SOURCE_PROJECT_ID", "PROJECT_ID")
    )
    approved = environ.get("MLHPC_APPROVED_SHA", "")
    known = bool(approved) and approved == environ.get("CI_COMMIT_SHA", "")
    asked = {name: environ[name] for name in FORWARDED if environ.get(name)}
    return Occasion(source, asked, stranger=source == "merge_request_event" and theirs != ours and not known)


def idle(system: str, inputs: Mapping[str, Any], occasion: Occasion) -> str:
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
    system: str, template: Mapping[str, Any], inputs: Mapping[str, Any], occasion: Occasion
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
