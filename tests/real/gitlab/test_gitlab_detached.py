"""A queue that no runner waits for: one pipeline submits to a real Slurm, later ones collect."""

import dataclasses
import sys

import pytest
from gitlab_ci_service import Project, read
from services import Slurm, wait_until

pytestmark = pytest.mark.servers

SYSTEMS = read("systems_lab.yml")
SUITE = read("suite_lab.py.txt")


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
    pipelines = []

    def collected():
        pipelines.append(project.run("schedule", MLHPC_COLLECT="yes"))
        return pipelines[-1].jobs != {"collect:lab": "WARN"}  # 75: still queued or running

    assert wait_until(collected), pipelines[-1].text
    assert pipelines[-1].jobs == {"collect:lab": "PASS"}, pipelines[-1].text
    (record,) = project.records()
    assert (record.purpose, record.verdict, record.commit) == ("nightly", "unjudged", commit)
    again = project.run("schedule", MLHPC_COLLECT="yes")
    assert again.jobs == {"collect:lab": "PASS"}
    assert "nothing was left to collect" in again.text
