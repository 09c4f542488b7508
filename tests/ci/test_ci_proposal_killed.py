"""`mlhpc baseline propose` killed around each call of git: nothing half is left, and the same command later does the rest.

A `git` of the test's own stands first on the PATH. It ends its parent by SIGKILL at one call, and then does what was asked:
git outlives who called it.
"""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from git_projects import git, state_of
from services import wait_until

#: Calls of git for one file that differs, the push the last of them.
CALLS = 9


@pytest.fixture
def propose(project):
    """Return what runs the command; its git kills it at call *at*, and has ended when this returns."""
    folder, counted, ended = (project.parent / name for name in ("bin", "counted", "ended"))
    folder.mkdir()
    shutil.copy(Path(__file__).with_name("deadly_git.sh"), folder / "git")
    ours = ("CI_", "GIT_", "MLHPC_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment |= {"REAL": shutil.which("git"), "PATH": f"{folder}:{os.environ['PATH']}"}
    environment |= {"COUNTED": str(counted), "ENDED": str(ended), "TMPDIR": str(project.parent)}
    words = ["baseline", "propose", "--branch", "baseline/7", "--reason", "new driver"]
    argv = [sys.executable, "-m", "pytest_mlhpc.cli", *words]

    def run(at=0, when="during", **more):
        counted.write_text("", encoding="utf-8")
        variables = {**environment, "AT": str(at), "WHEN": when, **more}
        done = subprocess.run(argv, cwd=project, env=variables, capture_output=True, text=True, check=False)
        assert not at or wait_until(ended.exists, 300), done.stderr
        ended.unlink(missing_ok=True)
        done.calls = counted.read_text(encoding="utf-8").split()
        assert not at or len(done.calls) == at, done.stderr
        return done

    return run


@pytest.mark.parametrize(
    ("at", "when"), [(1, "during"), (2, "during"), (CALLS - 1, "during"), (CALLS, "during"), (CALLS, "after")]
)
def test_killed_around_any_call_it_leaves_no_half_and_is_done_the_next_time(
    project, server, propose, at, when
):
    before = state_of(project)
    assert propose(at, when).returncode == -signal.SIGKILL
    assert state_of(project) == before
    assert not list((project / ".git").glob("*.lock"))

    there = git(server, "for-each-ref", "--format=%(refname)")
    done = propose()

    assert (done.returncode, done.stderr) == (0, "")
    # What is there is not pushed again.
    assert (len(done.calls), "push" in done.calls) == ((CALLS - 1, False) if there else (CALLS, True))
    commit = git(server, "rev-parse", "baseline/7")
    assert done.stdout == f"pushed {commit[:12]} to baseline/7, to be merged into main\n"
    assert git(server, "for-each-ref", "--format=%(refname)") == "refs/heads/baseline/7"
    subjects = git(server, "log", "--format=%s", "baseline/7").splitlines()
    assert subjects == ["Accept new values on cirrus", "first"]
    # The server was told of one branch, once: it makes one merge request.
    assert (server / "options").read_text(encoding="utf-8").count("merge_request.create\n") == 1


def test_a_branch_that_somebody_went_on_with_is_not_written_over(server, propose):
    assert propose().returncode == 0
    theirs = git(server, "commit-tree", "baseline/7^{tree}", "-p", "baseline/7", "-m", "another word")
    git(server, "update-ref", "refs/heads/baseline/7", theirs)
    refused = propose()
    assert refused.returncode == 4
    assert (
        f"git push: baseline/7 is at {theirs[:12]} on origin, and the new values do not follow it"
        in refused.stderr
    )
    assert "push" not in refused.calls
    assert git(server, "rev-parse", "baseline/7") == theirs


@pytest.mark.parametrize("somebody", [True, False], ids=["somebody else pushed", "nobody pushed"])
def test_a_push_that_a_broken_pipe_ends_is_explained_or_made_again(project, server, propose, somebody):
    """Git writes push options to a receiver that has ended, where it sends no branch, and says nothing."""
    theirs = git(project, "commit-tree", "HEAD^{tree}", "-m", "another word")
    git(project, "push", "-q", "origin", f"{theirs}:refs/heads/other")
    piped = {
        "PIPED": str(project.parent / "piped"),
        "SERVER": str(server),
        "THEIRS": theirs if somebody else "",
    }
    done = propose(**piped)
    if somebody:
        assert done.returncode == 4
        assert f"git push: baseline/7 is at {theirs[:12]} on origin" in done.stderr
        assert done.calls.count("push") == 1
    else:
        assert (done.returncode, done.calls.count("push")) == (0, 2)
    assert (git(server, "rev-parse", "baseline/7") == theirs) is somebody
