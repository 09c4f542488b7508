"""Commands in this process, and a checkout with a server of git."""

import pytest
from cli_calls import mlhpc  # noqa: F401 - a fixture
from git_projects import accept, git

#: Notes what GitLab would be asked to do, one line for each option of a push.
HOOK = """\
#!/bin/sh
for at in $(seq 0 $((GIT_PUSH_OPTION_COUNT - 1))); do eval echo "\\$GIT_PUSH_OPTION_$at"; done >> "$GIT_DIR/options"
"""


@pytest.fixture
def server(tmp_path):
    bare = tmp_path / "server.git"
    git(tmp_path, "init", "-q", "--bare", "-b", "main", str(bare))
    git(bare, "config", "receive.advertisePushOptions", "true")
    hook = bare / "hooks/post-receive"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(HOOK, encoding="utf-8")
    hook.chmod(0o755)
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
