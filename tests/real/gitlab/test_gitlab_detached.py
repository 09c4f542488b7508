"""A queue that no runner waits for: one pipeline submits to a real Slurm, later ones collect."""

import dataclasses
import sys

import pytest
from gitlab_ci_service import Project, read
from services import Slurm

pytestmark = pytest.mark.servers

SYSTEMS = read("systems_lab.yml")
SUITE = read("suite_lab.py.txt")
#: Pipelines that collect before the queue must be empty: 30 is minutes of an idle cluster.
MOST = 30


def test_what_a_night_submits_is_collected_by_a_later_pipeline(project: Project, slurm: Slurm):
    project = dataclasses.replace(project, environment={**project.environment, **slurm.environment})
    project.write("systems.yaml", SYSTEMS.replace("PYTHON", sys.executable))
    project.write("suites/test_echo.py", SUITE)
    inputs = f"system: lab, tags: [here], service_tags: [here], mode: detach, state: {project.state}, setup: . ./setup.sh"
    project.write(
        ".gitlab-ci.yml", f"include: [{{local: ci/gitlab/templates/bench.yml, inputs: {{{inputs}}}}}]\n"
    )
    submitted = project.run("schedule")
    assert submitted.jobs == {"submit:lab": "PASS"}, submitted.text
    assert project.records() == []
    commit = project.git("rev-parse", "HEAD")
    project.commit()  # the default branch goes on meanwhile
    for _ in range(MOST):
        collected = project.run("schedule", MLHPC_COLLECT="yes")
        if collected.jobs != {"collect:lab": "WARN"}:  # 75: still queued or running
            break
    assert collected.jobs == {"collect:lab": "PASS"}, collected.text
    (record,) = project.records()
    assert (record.purpose, record.verdict, record.commit) == ("nightly", "unjudged", commit)
    again = project.run("schedule", MLHPC_COLLECT="yes")
    assert again.jobs == {"collect:lab": "PASS"}
    assert "nothing was left to collect" in again.text
