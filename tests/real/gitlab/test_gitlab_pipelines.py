"""The templates of ci/gitlab, run: which jobs a pipeline has, what they measure, and what they leave."""

from __future__ import annotations

import json
from xml.etree import ElementTree as ET

import pytest
from gitlab_ci_service import Project

pytestmark = pytest.mark.servers

MERGE_REQUEST = {
    "CI_MERGE_REQUEST_IID": "7",
    "CI_MERGE_REQUEST_PROJECT_ID": "1",
    "CI_MERGE_REQUEST_SOURCE_PROJECT_ID": "1",
}
FORK = {**MERGE_REQUEST, "CI_MERGE_REQUEST_SOURCE_PROJECT_ID": "2"}
DETACH = "{system: local, partition: cpu, tags: [here], service_tags: [here], mode: detach, influx: true}"


def test_each_source_of_pipelines_has_its_own_jobs(project: Project):
    publish = {"mlhpc-report": "always"}
    assert project.jobs("schedule", schema=True) == {
        "bench:local": "on_success",
        **publish,
        "mlhpc-alert": "always",
    }
    assert project.jobs("web") == {"bench:local": "on_success", **publish}
    assert project.jobs("web", SYSTEM="another") == publish
    own = {"mlhpc-check": "on_success", "bench:local": "manual"}
    noted = project.jobs("merge_request_event", MLHPC_GITLAB_TOKEN="t", **MERGE_REQUEST)  # noqa: S106 - of nobody
    assert noted == {**own, "note:local": "on_success"}
    assert project.jobs("push") == {}


def test_a_fork_never_reaches_the_systems_runner_until_its_commit_is_approved(project: Project):
    check = {"mlhpc-check": "on_success"}
    assert project.jobs("merge_request_event", MLHPC_GITLAB_TOKEN="t", **FORK) == check  # noqa: S106 - of nobody
    assert project.jobs("merge_request_event", MLHPC_APPROVED_SHA="another", **FORK) == check
    approved = project.git("rev-parse", "HEAD")
    found = project.jobs("merge_request_event", MLHPC_APPROVED_SHA=approved, **FORK)
    assert found == {**check, "bench:local": "manual"}


def test_a_detached_system_submits_by_night_and_collects_in_a_schedule_of_its_own(project: Project):
    project.write(
        ".gitlab-ci.yml", f"include: [{{local: ci/gitlab/templates/bench.yml, inputs: {DETACH}}}]\n"
    )
    assert project.jobs("schedule", schema=True) == {"submit:local": "on_success", "publish:local": "always"}
    assert project.jobs("schedule", MLHPC_COLLECT="yes") == {
        "collect:local": "on_success",
        "publish:local": "always",
    }
    assert project.jobs("merge_request_event", **MERGE_REQUEST) == {"submit:local": "manual"}
    assert project.jobs("merge_request_event", **FORK) == {}


def test_a_night_is_measured_judged_and_reported(project: Project):
    found = project.run("schedule", "bench:local", "mlhpc-report")
    assert found.jobs == {"bench:local": "PASS", "mlhpc-report": "PASS"}, found.text
    (record,) = project.records()
    assert (record.purpose, record.verdict, record.branch) == ("nightly", "passed", "main")
    assert record.commit == project.git("rev-parse", "HEAD")
    (case,) = ET.parse(project.out / "junit.xml").iter("testcase")  # noqa: S314 - written by the test's own pytest
    properties = {one.get("name"): one.get("value") for one in case.iter("property")}
    assert properties["mlhpc.metric.rate"] == "4.0 items/s"
    metrics = (project.out / "metrics.txt").read_text(encoding="utf-8")
    assert 'mlhpc_rate_items_per_second{system="local",partition="cpu"' in metrics
    assert metrics.endswith("# EOF\n")
    assert "<html" in (project.folder / "public/index.html").read_text(encoding="utf-8")


def test_a_run_on_demand_is_none_of_the_nights(project: Project):
    found = project.run("web", "bench:local")
    assert found.jobs == {"bench:local": "PASS"}, found.text
    assert [record.purpose for record in project.records()] == ["manual"]


def test_a_change_that_makes_it_slower_is_an_orange_job_with_a_comparison(project: Project):
    project.run("schedule", "bench:local")
    found = project.run("merge_request_event", "bench:local", RATE="2", **MERGE_REQUEST)
    assert found.jobs == {"bench:local": "WARN"}, found.text
    assert {record.purpose for record in project.records() if record.verdict == "regressed"} == {"change"}
    (path,) = (project.out / "notes").glob("local.*.json")
    comparison = json.loads(path.read_text(encoding="utf-8"))
    (row,) = comparison["rows"]
    assert (row["accepted"], row["value"], row["change"]) == (4.0, 2.0, -0.5)
    assert (row["nightly"], row["nights"]) == (4.0, 1)
    assert comparison["troubles"][0]["verdict"] == "regressed"


def test_a_night_that_is_slower_fails_its_pipeline_and_is_still_reported(project: Project):
    found = project.run("schedule", RATE="2")
    assert found.jobs["bench:local"] == "FAIL", found.text
    assert found.jobs["mlhpc-report"] == "PASS", found.text
    assert "mlhpc-alert" in found.jobs


def test_trouble_of_the_infrastructure_is_an_allowed_failure(project: Project):
    project.write("systems.yaml", UNUSABLE)
    project.write("suites/test_echo.py", TWO_NODES)
    project.write("conftest.py", ELSEWHERE)
    inputs = f"{{system: unusable, tags: [here], service_tags: [here], state: {project.state}, setup: . ./setup.sh}}"
    project.write(
        ".gitlab-ci.yml", f"include: [{{local: ci/gitlab/templates/bench.yml, inputs: {inputs}}}]\n"
    )
    found = project.run("web", "bench:unusable")
    assert found.jobs == {"bench:unusable": "WARN"}, found.text
    assert found.code == 0
    assert "rejected: 2 nodes are wanted, this machine is one" in found.text


UNUSABLE = """\
schema: 1
systems:
  unusable:
    description: it says that it has two nodes
    partitions:
      cpu:
        scheduler: elsewhere
        accelerator: cpu
        preset: smoke
        nodes: {cores: 4, memory: 4GiB, max: 2}
        environments: {default: {python: python3}}
"""
#: Serves that scheduler by this machine's own provisioner.
ELSEWHERE = """\
from pytest_mlhpc.hookspecs import hookimpl

@hookimpl
def mlhpc_schedulers():
    return {"elsewhere": None}

@hookimpl
def mlhpc_provisioner(partition, state_dir, session_id):
    if partition.scheduler == "elsewhere":
        from pytest_mlhpc.provision.local import LocalProvisioner
        return LocalProvisioner(state_dir=state_dir, session_id=session_id)
"""
TWO_NODES = """\
import pytest

@pytest.mark.job("command", argv=["echo", "rate: 4"], metrics={"rate": {"pattern": r"rate: (\\S+)", "unit": "items/s", "better": "higher"}}, nodes=2, devices=2)
def test_echo(run): pass
"""


def test_each_system_has_a_child_pipeline_that_measures(project: Project):
    project.write("mlhpc-ci.yaml", CHILDREN.replace("STATE", str(project.state)))
    project.write(".gitlab-ci.yml", PARENT)
    found = project.run("schedule")
    assert found.code == 0, found.text
    assert found.jobs["local"] == "PASS"
    assert [record.purpose for record in project.records()] == ["nightly"]


def test_a_child_pipeline_of_a_system_that_nobody_asked_for_says_so(project: Project):
    project.write("mlhpc-ci.yaml", CHILDREN.replace("STATE", str(project.state)))
    project.write(".gitlab-ci.yml", PARENT)
    found = project.run("web", SYSTEM="another")
    assert found.code == 0, found.text
    assert "this pipeline is about another" in found.text
    assert project.records() == []


CHILDREN = """\
systems:
  local: {partition: cpu, tags: [here], service_tags: [here], state: STATE, setup: . ./setup.sh}
"""
PARENT = """\
mlhpc-generate:
  stage: build
  script: [". ./setup.sh", mlhpc ci generate --output mlhpc-ci]
  artifacts: {paths: [mlhpc-ci/]}
local:
  stage: test
  needs: [mlhpc-generate]
  trigger: {include: [{artifact: mlhpc-ci/local.yml, job: mlhpc-generate}], strategy: depend}
"""


def test_a_new_value_becomes_a_merge_request_of_its_own(project: Project):
    project.run("web", "bench:local", RATE="5")
    (test,) = {record.node_id for record in project.records()}
    wanted = {"SYSTEM": "local", "MLHPC_ACCEPT": test, "MLHPC_REASON": "new driver"}
    found = project.run("web", **wanted)
    assert found.jobs == {"accept:local": "PASS", "propose:local": "PASS"}, found.text
    (branch,) = project.git(
        "branch", "--list", "--format=%(refname:short)", folder=project.server
    ).splitlines()
    assert branch.startswith("baseline/")
    message = project.git("log", "-1", "--format=%B", branch, folder=project.server)
    assert "Accept new values on local" in message
    assert "new driver" in message
    assert "4 to 5 items/s, +25.0% better" in message
