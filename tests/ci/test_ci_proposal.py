"""New accepted values, pushed to a real repository of git that records what GitLab would be told."""

import subprocess
from pathlib import Path

import pytest

from pytest_mlhpc.ci.proposal import GitError, Proposal, propose
from pytest_mlhpc.cli import main
from pytest_mlhpc.errors import ConfigError, UsageError
from pytest_mlhpc.judge.baselines import BaselineBook
from pytest_mlhpc.judge.entry import Entry
from pytest_mlhpc.results.record import SeriesKey

TOKEN = "glpat-secret"  # noqa: S105 - of nobody
HOOK = '#!/bin/sh\nfor at in 0 1 2; do eval echo "\\$GIT_PUSH_OPTION_$at"; done > "$GIT_DIR/options"\n'
KEY = SeriesKey("cirrus", "standard", "default", "EPYC", "", "resnet50[name=test_a]", "rate")


def git(folder, *words):
    done = subprocess.run(
        ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *words],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return done.stdout


def accept(project, value, key=KEY):
    book = BaselineBook(project / "baselines", project / "state")
    book.put(key, Entry(value, "samples/s", "higher", 0.05))
    book.save()


@pytest.fixture
def server(tmp_path):
    bare = tmp_path / "server.git"
    subprocess.run(["git", "init", "-q", "--bare", str(bare)], timeout=60, check=True)
    git(bare, "config", "receive.advertisePushOptions", "true")
    hook = bare / "hooks/post-receive"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(HOOK, encoding="utf-8")
    hook.chmod(0o755)
    return bare


@pytest.fixture
def project(tmp_path, server):
    checkout = tmp_path / "project"
    subprocess.run(["git", "init", "-q", "-b", "main", str(checkout)], timeout=60, check=True)
    (checkout / "README").write_text("x", encoding="utf-8")
    accept(checkout, 100.0)
    git(checkout, "add", "README", "baselines")
    git(checkout, "commit", "-qm", "first")
    git(checkout, "remote", "add", "origin", str(server))
    return checkout


def proposal(project, **changes):
    fields = {"branch": "baseline/7", "reason": "new driver", **changes}
    return Proposal(project, Path("baselines"), **fields)


def test_new_values_are_pushed_to_a_branch_that_gitlab_makes_a_merge_request_of(project, server):
    accept(project, 90.0)
    commit = propose(proposal(project))
    assert git(server, "rev-parse", "baseline/7").strip() == commit
    told = (server / "options").read_text(encoding="utf-8").splitlines()
    assert told == ["merge_request.create", "merge_request.target=main", "merge_request.remove_source_branch"]
    message = git(server, "log", "-1", "--format=%B", commit)
    assert message.splitlines()[0] == "Accept new values on cirrus"
    assert "new driver" in message
    assert "resnet50[name=test_a] rate (standard): 100 to 90 samples/s, -10.0% better" in message


def test_neither_branch_nor_index_nor_files_of_the_checkout_change(project):
    accept(project, 90.0)
    before = git(project, "status", "--porcelain"), git(project, "rev-parse", "HEAD")
    propose(proposal(project))
    assert (git(project, "status", "--porcelain"), git(project, "rev-parse", "HEAD")) == before


def test_nothing_but_baselines_is_pushed(project, server):
    accept(project, 90.0)
    accept(project, 5.0, SeriesKey("archer2", "cpu", "default", "EPYC", "", "b", "rate"))
    (project / "README").write_text("changed", encoding="utf-8")
    (project / "baselines/secret.txt").write_text("s", encoding="utf-8")
    commit = propose(proposal(project))
    names = git(server, "show", "--name-only", "--format=", commit).split()
    assert names == ["baselines/archer2.yaml", "baselines/cirrus.yaml"]
    assert "b rate (cpu): 5 samples/s, new" in git(server, "log", "-1", "--format=%B", commit)


def test_nothing_new_is_nothing_to_propose(project, server, monkeypatch):
    monkeypatch.chdir(project)
    assert main(["ci", "propose", "--branch", "b", "--reason", "r"]) == 5
    assert git(server, "branch") == ""


def test_a_reason_is_no_command_to_gitlab(project, server):
    accept(project, 90.0)
    commit = propose(proposal(project, reason="because\n/merge\n/assign @me"))
    assert "\n/" not in git(server, "log", "-1", "--format=%B", commit)


@pytest.mark.parametrize("branch", ["", "-x", "a b", "a..b", "--force", "a\nb"])
def test_a_branch_without_a_proper_name_is_refused(project, branch):
    with pytest.raises(UsageError, match="is no name of a branch"):
        propose(proposal(project, branch=branch))


def test_a_damaged_baseline_file_is_not_proposed(project):
    (project / "baselines/cirrus.yaml").write_text("schema: [", encoding="utf-8")
    with pytest.raises(ConfigError):
        propose(proposal(project))


def test_a_refusal_is_told_in_gits_words_without_the_token(project):
    accept(project, 90.0)
    remote = f"http://user:{TOKEN}@127.0.0.1:9/x.git"
    with pytest.raises(GitError) as error:
        propose(proposal(project, remote=remote, token=TOKEN))
    assert str(error.value).startswith("git push: ")
    assert TOKEN not in str(error.value)


def test_outside_of_a_checkout_git_says_so(tmp_path):
    with pytest.raises(GitError, match="not a git repository"):
        propose(proposal(tmp_path))
