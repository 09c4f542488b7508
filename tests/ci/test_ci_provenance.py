"""What a session in CI says of itself."""

import subprocess

import pytest

from pytest_mlhpc.store.record import provenance_of


@pytest.mark.parametrize(
    ("purpose", "environ"),
    [
        ("nightly", {"CI_PIPELINE_SOURCE": "schedule"}),
        *(("change", {"CI_PIPELINE_SOURCE": source}) for source in ("merge_request_event", "push")),
        *(("manual", {"CI_PIPELINE_SOURCE": source}) for source in ("web", "api", "trigger", "")),
        # A child pipeline's source is always its parent, whatever that one's was.
        ("nightly", {"CI_PIPELINE_SOURCE": "parent_pipeline", "MLHPC_PURPOSE": "nightly"}),
    ],
)
def test_the_source_of_a_pipeline_says_what_it_is_for_unless_somebody_knows_better(
    tmp_path, purpose, environ
):
    assert provenance_of(tmp_path, environ).purpose == purpose


def test_a_branch_whose_name_is_no_utf8_is_written_out(tmp_path):
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    for words in (
        ["init", "-q"],
        ["commit", "-q", "--allow-empty", "-m", "x"],
        ["checkout", "-qb", b"m\xe9trique"],
    ):
        subprocess.run([*git, *words], check=True)
    assert provenance_of(tmp_path, {}).branch == r"m\xe9trique"


def test_a_merge_request_is_on_the_branch_that_it_merges(tmp_path):
    environ = {
        "CI_MERGE_REQUEST_SOURCE_BRANCH_NAME": "mine",
        "CI_COMMIT_SHA": "c0ffee",
        "CI_PIPELINE_ID": "31",
    }
    found = provenance_of(tmp_path, environ)
    assert (found.branch, found.commit, found.pipeline) == ("mine", "c0ffee", "31")


@pytest.mark.parametrize(
    ("event", "purpose"),
    [("schedule", "nightly"), ("workflow_dispatch", "manual"), ("pull_request", "change")],
)
def test_github_has_variables_of_other_names(tmp_path, event, purpose):
    environ = {"GITHUB_SHA": "c0ffee", "GITHUB_REF_NAME": "main", "GITHUB_HEAD_REF": "", "GITHUB_RUN_ID": "7"}
    found = provenance_of(tmp_path, {"GITHUB_EVENT_NAME": event, **environ})
    assert (found.purpose, found.branch, found.commit, found.pipeline) == (purpose, "main", "c0ffee", "7")
