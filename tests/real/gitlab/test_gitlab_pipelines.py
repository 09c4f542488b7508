"""The templates of ci/gitlab, run: which jobs a pipeline has, what they measure, and what they leave."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from gitlab_ci_service import Pipeline, Project, make_project, read
from services import ROOT

from pytest_mlhpc.cli.init import MachineSurroundings, project_files
from pytest_mlhpc.store.record import Record

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
    noted = project.jobs("merge_request_event", MLHPC_GITLAB_TOKEN="t", **MERGE_REQUEST)
    assert noted == {**own, "note:local": "on_success"}
    assert project.jobs("push") == {}


PAGES = "{tags: [here], check_tags: [here], source: local, pages: true}"


def test_pages_are_published_by_night_where_asked_for(project: Project):
    project.write(
        ".gitlab-ci.yml", f"include: [{{local: ci/gitlab/templates/publish.yml, inputs: {PAGES}}}]\n"
    )
    by_night = {"mlhpc-report": "always", "mlhpc-alert": "always", "pages": "on_success"}
    assert project.jobs("schedule", schema=True) == by_night
    assert project.jobs("web") == {"mlhpc-report": "always"}
    assert "pages" not in project.jobs("schedule", MLHPC_ACCEPT="a test")


def test_a_fork_never_reaches_the_systems_runner_until_its_commit_is_approved(project: Project):
    check = {"mlhpc-check": "on_success"}
    assert project.jobs("merge_request_event", MLHPC_GITLAB_TOKEN="t", **FORK) == check
    assert project.jobs("merge_request_event", MLHPC_APPROVED_SHA="another", **FORK) == check
    approved = project.git("rev-parse", "HEAD")
    found = project.jobs("merge_request_event", MLHPC_APPROVED_SHA=approved, **FORK)
    assert found == {**check, "bench:local": "manual"}


def test_the_pipeline_of_a_new_project_is_one_job_that_measures(project: Project):
    project.write(".gitlab-ci.yml", project_files(MachineSurroundings())[".gitlab-ci.yml"])
    assert project.jobs("schedule", schema=True) == {"benchmarks": "on_success"}
    assert project.jobs("push") == {}


def test_a_catalogue_project_releases_versions_and_nothing_else(project: Project):
    project.write(".gitlab-ci.yml", (ROOT / "ci/gitlab/.gitlab-ci.yml").read_text())
    assert project.jobs("push", schema=True, CI_COMMIT_TAG="1.2.3") == {"release": "on_success"}
    assert project.jobs("push", CI_COMMIT_TAG="nightly") == {}
    assert project.jobs("push") == {}


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


@dataclass(frozen=True)
class Week:
    """Pipelines of one project, one after the other; what the first two left was read before the next."""

    project: Project
    night: Pipeline
    public: str
    properties: dict[str | None, str | None]
    metrics: str
    demand: Pipeline
    change: Pipeline
    comparison: dict[str, Any]
    slow_night: Pipeline
    records: list[Record]


@pytest.fixture(scope="module")
def week(gitlab_ci_local: str, accepted_project: Path, tmp_path_factory: pytest.TempPathFactory) -> Week:
    """A night, a run on demand, a change that makes it slower, and a night that is slower."""
    project = make_project(gitlab_ci_local, accepted_project, tmp_path_factory.mktemp("week"))
    night = project.run("schedule", "bench:local", "mlhpc-report")
    (case,) = ET.parse(project.out / "junit.xml").iter("testcase")  # noqa: S314 - written by the test's own pytest
    properties = {one.get("name"): one.get("value") for one in case.iter("property")}
    metrics = (project.out / "metrics.txt").read_text(encoding="utf-8")
    public = (project.folder / "public/index.html").read_text(encoding="utf-8")
    change = project.run("merge_request_event", "bench:local", RATE="2", **MERGE_REQUEST)
    (path,) = (project.out / "notes").glob("local.*.json")
    comparison = json.loads(path.read_text(encoding="utf-8"))
    demand = project.run("web", "bench:local")
    slow_night = project.run("schedule", RATE="2")
    return Week(
        project, night, public, properties, metrics, demand, change, comparison, slow_night, project.records()
    )


def test_a_night_is_measured_judged_and_reported(week: Week):
    assert week.night.jobs == {"bench:local": "PASS", "mlhpc-report": "PASS"}, week.night.text
    first = week.records[0]
    assert (first.purpose, first.verdict, first.branch) == ("nightly", "passed", "main")
    assert first.commit == week.project.git("rev-parse", "HEAD")
    assert week.properties["mlhpc.metric.rate"] == "4.0 items/s"
    assert 'mlhpc_rate_items_per_second{system="local",partition="cpu"' in week.metrics
    assert week.metrics.endswith("# EOF\n")
    assert "<html" in week.public


def test_a_run_on_demand_is_none_of_the_nights(week: Week):
    assert week.demand.jobs == {"bench:local": "PASS"}, week.demand.text
    assert [record.purpose for record in week.records if record.verdict == "passed"] == ["nightly", "manual"]


def test_a_change_that_makes_it_slower_is_an_orange_job_with_a_comparison(week: Week):
    assert week.change.jobs == {"bench:local": "WARN"}, week.change.text
    regressed = [record.purpose for record in week.records if record.verdict == "regressed"]
    assert set(regressed) == {"change", "nightly"}
    (row,) = week.comparison["rows"]
    assert (row["accepted"], row["value"], row["change"]) == (4.0, 2.0, -0.5)
    assert (row["nightly"], row["nights"]) == (4.0, 1)
    assert week.comparison["troubles"][0]["verdict"] == "regressed"


def test_a_night_that_is_slower_fails_its_pipeline_and_is_still_reported(week: Week):
    assert week.slow_night.jobs["bench:local"] == "FAIL", week.slow_night.text
    assert week.slow_night.jobs["mlhpc-report"] == "PASS", week.slow_night.text
    assert "mlhpc-alert" in week.slow_night.jobs


def test_trouble_of_the_infrastructure_is_an_allowed_failure(project: Project):
    project.write("systems.yaml", read("systems_unusable.yml"))
    project.write("suites/test_echo.py", read("suite_two_nodes.py.txt"))
    project.write("conftest.py", read("conftest_elsewhere.py.txt"))
    inputs = f"{{system: unusable, tags: [here], service_tags: [here], state: {project.state}, setup: . ./setup.sh}}"
    project.write(
        ".gitlab-ci.yml", f"include: [{{local: ci/gitlab/templates/bench.yml, inputs: {inputs}}}]\n"
    )
    found = project.run("web", "bench:unusable")
    assert found.jobs == {"bench:unusable": "WARN"}, found.text
    assert found.code == 0
    assert "rejected: 2 nodes are wanted, this machine is one" in found.text


def test_a_child_pipeline_measures_its_system_or_says_that_nobody_asked_for_it(project: Project):
    project.write("mlhpc-ci.yaml", read("children.yaml").replace("STATE", str(project.state)))
    project.write(".gitlab-ci.yml", read("parent.yml"))
    found = project.run("schedule")
    assert found.code == 0, found.text
    assert found.jobs["local"] == "PASS"
    assert [record.purpose for record in project.records()] == ["nightly"]
    other = project.run("web", SYSTEM="another")
    assert other.code == 0, other.text
    assert "this pipeline is about another" in other.text
    assert len(project.records()) == 1


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
