"""Child pipelines: what each system does on which occasion, and the file that says which systems there are."""

import re
from pathlib import Path

import pytest
import yaml

from pytest_mlhpc.ci.pipelines import PipelineTrigger, child, idle, occasion_of, read
from pytest_mlhpc.errors import ConfigError

TEMPLATE = {"local": "ci/gitlab/templates/bench.yml"}
DETACH = {"mode": "detach", "tags": ["x"]}
KNOWN = {"cirrus": False, "archer2": False, "eidf-cs2": True}


def occasion(source="schedule", **asked):
    return PipelineTrigger(source, asked)


def test_what_a_pipeline_is_about_is_written_into_its_children():
    found = child("cirrus", TEMPLATE, DETACH, occasion("schedule", MLHPC_COLLECT="yes"))
    assert found["variables"] == {"MLHPC_PIPELINE": "schedule", "MLHPC_COLLECT": "yes"}
    assert found["include"] == [{**TEMPLATE, "inputs": {"system": "cirrus", **DETACH}}]


def test_a_dollar_in_what_somebody_wrote_is_no_variable():
    asked = {"SYSTEM": "cirrus", "MLHPC_ACCEPT": "a", "MLHPC_REASON": "costs $CI_JOB_TOKEN"}
    found = child("cirrus", TEMPLATE, DETACH, occasion("web", **asked))
    assert found["variables"]["MLHPC_REASON"] == "costs $$CI_JOB_TOKEN"


IDLE = yaml.safe_load(Path(__file__).with_name("occasions.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("source", "asked", "inputs", "why"), IDLE)
def test_where_there_is_nothing_to_do_one_job_says_why(source, asked, inputs, why):
    found = child("cirrus", TEMPLATE, inputs, PipelineTrigger(source, asked))
    assert list(found) == ["nothing:cirrus"]
    assert why in found["nothing:cirrus"]["script"][0]


def test_for_a_commit_of_a_fork_there_is_nothing_to_do():
    found = child("cirrus", TEMPLATE, {}, PipelineTrigger("merge_request_event", {}, stranger=True))
    assert "its commit is of a fork" in found["nothing:cirrus"]["script"][0]


@pytest.mark.parametrize("source", ["schedule", "web", "api", "trigger", "merge_request_event"])
def test_a_system_has_something_to_do_in_pipelines_of(source):
    assert idle("cirrus", {}, occasion(source)) == ""


def test_a_system_without_nights_still_collects():
    assert idle("cirrus", {**DETACH, "nightly": False}, occasion("schedule", MLHPC_COLLECT="1")) == ""


def test_what_somebody_asks_for_cannot_end_the_shells_quotes():
    found = child("cirrus", TEMPLATE, {}, occasion("web", SYSTEM="'; rm -rf $HOME; '"))
    script = found["nothing:cirrus"]["script"][0]
    assert (script.count("'"), "$" in script) == (2, False)


FORK = {
    "CI_PIPELINE_SOURCE": "merge_request_event",
    "CI_MERGE_REQUEST_SOURCE_PROJECT_ID": "9",
    "CI_MERGE_REQUEST_PROJECT_ID": "1",
    "CI_COMMIT_SHA": "c0ffee",
}


@pytest.mark.parametrize(
    ("more", "stranger"),
    [
        ({}, True),
        ({"MLHPC_APPROVED_SHA": "another"}, True),
        ({"MLHPC_APPROVED_SHA": "", "CI_COMMIT_SHA": ""}, True),
        ({"MLHPC_APPROVED_SHA": "c0ffee"}, False),
        ({"CI_MERGE_REQUEST_SOURCE_PROJECT_ID": "1"}, False),
    ],
    ids=["nobody approved", "another was approved", "no commit", "it was approved", "of the project itself"],
)
def test_a_commit_of_a_fork_is_a_strangers_until_somebody_approved_just_that_one(more, stranger):
    assert occasion_of({**FORK, **more}).stranger is stranger


def test_outside_of_gitlab_a_person_asks():
    assert occasion_of({}).source == "web"


def written(tmp_path, text):
    path = tmp_path / "mlhpc-ci.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_systems_inputs_are_put_over_the_defaults(tmp_path):
    common, own = {"tags": ["slurm"], "service_tags": ["docker"]}, {"mode": "wait", "nightly": False}
    systems = {"cirrus": {"state": "/work/x"}, "archer2": own}
    content = {"defaults": {**common, "mode": "detach"}, "systems": systems}
    found = read(written(tmp_path, yaml.safe_dump(content)), KNOWN)
    assert found.template == TEMPLATE
    assert found.systems == {
        "cirrus": {**common, "mode": "detach", "state": "/work/x"},
        "archer2": {**common, **own},
    }


def test_every_problem_of_the_file_is_reported_at_once_with_its_line():
    """Each line of the file says in its comment what is wrong with it."""
    path = Path(__file__).with_name("wrong-ci.yaml")
    with pytest.raises(ConfigError) as error:
        read(path, KNOWN)
    problems = re.findall("# (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert [problem for problem in problems if problem not in str(error.value)] == []


def test_a_system_without_runner_is_refused(tmp_path):
    why = r"systems.cirrus.tags: is missing: which runner is on the system's login node\?"
    with pytest.raises(ConfigError, match=why):
        read(written(tmp_path, "systems: {cirrus: {service_tags: [a]}}\n"), KNOWN)
