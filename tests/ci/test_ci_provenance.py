"""What a session in CI says of itself."""

import pytest

from pytest_mlhpc.provenance import provenance_of


@pytest.mark.parametrize(
    ("source", "purpose"),
    [
        ("schedule", "nightly"),
        ("merge_request_event", "change"),
        ("push", "change"),
        ("web", "manual"),
        ("api", "manual"),
        ("trigger", "manual"),
        ("", "manual"),
    ],
)
def test_the_source_of_a_pipeline_says_what_it_is_for(tmp_path, source, purpose):
    assert provenance_of(tmp_path, {"CI_PIPELINE_SOURCE": source}).purpose == purpose


def test_who_knows_better_says_so(tmp_path):
    # A child pipeline's source is always its parent, whatever that one's was.
    assert (
        provenance_of(tmp_path, {"CI_PIPELINE_SOURCE": "parent_pipeline", "MLHPC_PURPOSE": "nightly"}).purpose
        == "nightly"
    )


def test_a_merge_request_is_on_the_branch_that_it_merges(tmp_path):
    found = provenance_of(
        tmp_path, {"CI_MERGE_REQUEST_SOURCE_BRANCH_NAME": "mine", "CI_COMMIT_SHA": "c0ffee"}
    )
    assert (found.branch, found.commit) == ("mine", "c0ffee")


@pytest.mark.parametrize(
    ("event", "purpose"),
    [("schedule", "nightly"), ("workflow_dispatch", "manual"), ("pull_request", "change")],
)
def test_github_says_it_in_other_words(tmp_path, event, purpose):
    environ = {
        "GITHUB_EVENT_NAME": event,
        "GITHUB_SHA": "c0ffee",
        "GITHUB_REF_NAME": "main",
        "GITHUB_HEAD_REF": "",
    }
    found = provenance_of(tmp_path, environ)
    assert (found.purpose, found.branch, found.commit) == (purpose, "main", "c0ffee")
