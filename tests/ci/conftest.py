"""Commands in this process, and a checkout with a server of git."""

import shutil
from pathlib import Path

import pytest
from cli_calls import mlhpc  # noqa: F401 - a fixture
from git_projects import accept, git


@pytest.fixture
def server(tmp_path):
    bare = tmp_path / "server.git"
    git(tmp_path, "init", "-q", "--bare", "-b", "main", str(bare))
    git(bare, "config", "receive.advertisePushOptions", "true")
    hook = bare / "hooks/post-receive"
    hook.parent.mkdir(exist_ok=True)
    shutil.copy(Path(__file__).with_name("post_receive.sh"), hook)
    return bare


@pytest.fixture
def unchanged(tmp_path, server):
    """A checkout in which a value is accepted and committed."""
    checkout = tmp_path / "project"
    git(tmp_path, "init", "-q", "-b", "main", str(checkout))
    (checkout / "README").write_text("x", encoding="utf-8")
    accept(checkout, 100.0)
    git(checkout, "add", "README", "baselines")
    git(checkout, "commit", "-qm", "first")
    git(checkout, "remote", "add", "origin", str(server))
    return checkout


@pytest.fixture
def project(unchanged):
    """A checkout whose accepted value was changed, and not committed."""
    accept(unchanged, 90.0)
    return unchanged
