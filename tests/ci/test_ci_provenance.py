"""What a session in CI says of itself."""

import pytest

from pytest_mlhpc.provenance import provenance_of


@pytest.mark.parametrize(
    ("purpose", "sources"),
    [
        ("nightly", ["schedule"]),
        ("change", ["merge_request_event", "push"]),
        ("manual", ["web", "api", "trigger", ""]),
    ],
)
def test_the_source_of_a_pipeline_says_what_it_is_for(tmp_path, purpose, sources):
    for source in sources:
        assert provenance_of(tmp_path, {"CI_PIPELINE_SOURCE": source}).purpose == purpose


def test_who_knows_better_says_so(tmp_path):
    # A child pipeline's source is always its parent, whatever that one's was.
    environ = {"CI_PIPELINE_SOURCE": "parent_pipeline", "MLHPC_PURPOSE": "nightly"}
    assert provenance_of(tmp_path, environ).purpose == "nightly"


def test_a_merge_request_is_on_the_branch_that_it_merges(tmp_path):
    environ = {"CI_MERGE_REQUEST_SOURCE_BRANCH_NAME": "mine", "CI_COMMIT_SHA": "c0ffee"}
    found = provenance_of(tmp_path, environ)
    assert (found.branch, found.commit) == ("mine", "c0ffee")


@pytest.mark.parametrize(
    ("event", "purpose"),
    [("schedule", "nightly"), ("workflow_dispatch", "manual"), ("pull_request", "change")],
)
def test_github_says_it_in_other_words(tmp_path, event, purpose):
    environ = {"GITHUB_SHA": "c0ffee", "GITHUB_REF_NAME": "main", "GITHUB_HEAD_REF": ""}
    found = provenance_of(tmp_path, {"GITHUB_EVENT_NAME": event, **environ})
    assert (found.purpose, found.branch, found.commit) == (purpose, "main", "c0ffee")
