"""New accepted values, pushed to a real repository of git that records what GitLab would be told."""

import json
from pathlib import Path

import pytest
from git_projects import accept, git, state_of

from pytest_mlhpc.ci.gitlab import GitError, Proposal, propose
from pytest_mlhpc.errors import ConfigError, UsageError
from pytest_mlhpc.store.record import SeriesKey

TOKEN = "glpat-secret"  # noqa: S105 - of nobody


def proposal(project, **changes):
    return Proposal(project, Path("baselines"), **{"branch": "baseline/7", "reason": "new driver", **changes})


def message_of(server, commit):
    return git(server, "log", "-1", "--format=%B", commit)


def test_new_values_are_pushed_to_a_branch_that_gitlab_makes_a_merge_request_of(project, server):
    commit = propose(proposal(project))
    assert git(server, "rev-parse", "baseline/7") == commit
    options = (server / "options").read_text(encoding="utf-8").split()
    assert options == [f"merge_request.{what}" for what in ("create", "target=main", "remove_source_branch")]
    title, *text = message_of(server, commit).splitlines()
    assert title == "Accept new values on cirrus"
    assert "new driver" in text
    assert "suites/test_a.py::test_a rate (standard): 100 to 90 samples/s, -10.0% better" in " ".join(text)


def test_neither_branch_nor_index_nor_files_of_the_checkout_change(project):
    before = state_of(project)
    propose(proposal(project))
    assert state_of(project) == before


def test_nothing_but_baselines_is_pushed(project, server):
    accept(project, 5.0, SeriesKey("archer2", "cpu", "default", "", "b", "rate"))
    (project / "README").write_text("changed", encoding="utf-8")
    (project / "baselines/secret.txt").write_text("s", encoding="utf-8")
    commit = propose(proposal(project))
    names = git(server, "show", "--name-only", "--format=", commit).split()
    assert names == ["baselines/archer2.yaml", "baselines/cirrus.yaml"]
    assert "b rate (cpu): 5 samples/s, new" in message_of(server, commit)


def test_nothing_new_is_nothing_to_propose(unchanged, server, monkeypatch, mlhpc):
    monkeypatch.chdir(unchanged)
    data = json.loads(mlhpc("baseline", "propose", "--branch", "b", "--reason", "r", "--json").out)
    assert (data["schema"], data["settled"], data["commit"]) == ("mlhpc/baseline-propose/1", [], None)
    assert git(server, "branch") == ""


def test_a_reason_is_no_command_to_gitlab(project, server):
    commit = propose(proposal(project, reason="because\n/merge\n/assign @me"))
    assert "\n/" not in message_of(server, commit)


@pytest.mark.parametrize("branch", ["", "-x", "a b", "a..b", "--force", "a\nb"])
def test_a_branch_without_a_proper_name_is_refused(unchanged, branch):
    with pytest.raises(UsageError, match="is no name of a branch"):
        propose(proposal(unchanged, branch=branch))


def test_a_damaged_baseline_file_is_not_proposed(unchanged):
    (unchanged / "baselines/cirrus.yaml").write_text("schema: [", encoding="utf-8")
    with pytest.raises(ConfigError):
        propose(proposal(unchanged))


def test_a_refusal_has_gits_message_without_the_token(project):
    remote = f"http://user:{TOKEN}@127.0.0.1:9/x.git"
    with pytest.raises(GitError, match=r"^git push: ") as error:
        propose(proposal(project, remote=remote, token=TOKEN))
    assert TOKEN not in str(error.value)


def test_outside_of_a_checkout_git_says_so(tmp_path):
    with pytest.raises(GitError, match="not a git repository"):
        propose(proposal(tmp_path))
