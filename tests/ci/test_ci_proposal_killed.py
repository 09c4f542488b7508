"""`mlhpc ci propose` killed around each call of git: nothing half is left, and the same command later does the rest.

A `git` of the test's own stands first on the PATH. It ends its parent by SIGKILL at one call, and then does what was asked:
git outlives who called it.
"""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from worlds import entry

from pytest_mlhpc.judge.baselines import BaselineBook
from pytest_mlhpc.results.record import SeriesKey

KEY = SeriesKey("cirrus", "standard", "default", "EPYC", "", "resnet50[name=test_a]", "rate")
#: Calls of git for one file that differs, the push the last of them.
CALLS = 9
DEADLY = """#!/bin/sh
echo "$3" >> "$COUNTED"
if [ "$(wc -l < "$COUNTED")" -eq "$AT" ]; then
    [ "$WHEN" = after ] || kill -9 $PPID
    "$REAL" "$@"
    [ "$WHEN" = during ] || kill -9 $PPID
    : > "$ENDED"
    exit 1
fi
exec "$REAL" "$@"
"""


def git(folder, *words):
    done = subprocess.run(
        ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *words],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    return done.stdout.strip()


def accept(project, value):
    book = BaselineBook(project / "baselines", project / "state")
    book.put(KEY, entry(value))
    book.save()


@pytest.fixture
def server(tmp_path):
    bare = tmp_path / "server.git"
    subprocess.run(["git", "init", "-q", "--bare", "-b", "main", str(bare)], timeout=300, check=True)
    git(bare, "config", "receive.advertisePushOptions", "true")
    hook = bare / "hooks/post-receive"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text('#!/bin/sh\necho "$GIT_PUSH_OPTION_0" >> "$GIT_DIR/requests"\n', encoding="utf-8")
    hook.chmod(0o755)
    return bare


@pytest.fixture
def project(tmp_path, server):
    """A checkout whose accepted value was changed, and not committed."""
    checkout = tmp_path / "project"
    subprocess.run(["git", "init", "-q", "-b", "main", str(checkout)], timeout=300, check=True)
    accept(checkout, 100.0)
    git(checkout, "add", "baselines")
    git(checkout, "commit", "-qm", "first")
    git(checkout, "remote", "add", "origin", str(server))
    accept(checkout, 90.0)
    return checkout


def propose(project, at=0, when="during"):
    """Run the command; its git kills it at call *at*, and has ended when this returns."""
    folder = project.parent / "bin"
    folder.mkdir(exist_ok=True)
    (folder / "git").write_text(DEADLY, encoding="utf-8")
    (folder / "git").chmod(0o755)
    counted = project.parent / "counted"
    counted.write_text("", encoding="utf-8")
    ended = project.parent / "ended"
    ended.unlink(missing_ok=True)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("CI_", "GIT_", "MLHPC_"))},
        "REAL": str(shutil.which("git")), "PATH": f"{folder}:{os.environ['PATH']}", "TMPDIR": str(project.parent),
        "COUNTED": str(counted), "ENDED": str(ended), "AT": str(at), "WHEN": when,
    }  # fmt: skip
    words = ["ci", "propose", "--branch", "baseline/7", "--reason", "new driver"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest_mlhpc.cli", *words], cwd=project, env=environment,
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    if at:
        until = time.monotonic() + 60
        while not ended.exists():
            assert time.monotonic() < until, done.stderr
            time.sleep(0.02)
        assert len(calls(project)) == at, done.stderr
    return done


def calls(project):
    """Return what the last command asked git to do."""
    return (project.parent / "counted").read_text(encoding="utf-8").split()


@pytest.mark.parametrize(
    ("at", "when"), [(1, "during"), (2, "during"), (CALLS - 1, "during"), (CALLS, "during"), (CALLS, "after")]
)
def test_killed_around_any_call_it_leaves_no_half_and_is_done_the_next_time(project, server, at, when):
    before = git(project, "status", "--porcelain"), git(project, "rev-parse", "HEAD")
    assert propose(project, at, when).returncode == -signal.SIGKILL
    assert (git(project, "status", "--porcelain"), git(project, "rev-parse", "HEAD")) == before
    assert not list((project / ".git").glob("*.lock"))

    there = git(server, "for-each-ref", "--format=%(refname)")
    done = propose(project)

    assert (done.returncode, done.stderr) == (0, "")
    # What is there is not pushed again.
    assert (len(calls(project)), "push" in calls(project)) == ((CALLS - 1, False) if there else (CALLS, True))
    commit = git(server, "rev-parse", "baseline/7")
    assert done.stdout == f"pushed {commit[:12]} to baseline/7, to be merged into main\n"
    assert git(server, "for-each-ref", "--format=%(refname)") == "refs/heads/baseline/7"
    assert git(server, "log", "--format=%s", "baseline/7").splitlines() == [
        "Accept new values on cirrus",
        "first",
    ]
    # The server was told of one branch, once: it makes one merge request.
    assert (server / "requests").read_text(encoding="utf-8") == "merge_request.create\n"


def test_a_branch_that_somebody_went_on_with_is_not_written_over(project, server):
    assert propose(project).returncode == 0
    git(server, "update-ref", "refs/heads/baseline/7", git(
        server, "commit-tree", "baseline/7^{tree}", "-p", "baseline/7", "-m", "another word"
    ))  # fmt: skip
    theirs = git(server, "rev-parse", "baseline/7")

    refused = propose(project)

    assert refused.returncode == 3
    assert "git push: " in refused.stderr
    assert "baseline/7" in refused.stderr
    assert git(server, "rev-parse", "baseline/7") == theirs
