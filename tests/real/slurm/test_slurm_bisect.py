"""``mlhpc history bisect`` on a real cluster: each comparison is one job, a planted commit is named, a lost job is made again."""

import subprocess
import sys
from dataclasses import replace

import pytest
from git_checkouts import Checkout
from nights_of import nights, quiet, store
from running_suites import LIMIT_S, wait_for

TEST = """\
@program("./rate.sh", RATE, nodes=1)
def test_script(run): pass
"""

#: Each run differs a little, by its process id; it waits, and says so, where it is told to.
RATE = """\
#!/bin/sh
if [ -e {folder}/wait ]; then touch {folder}/begun; sleep 600; fi
echo rate: {rate}.$(( $$ % 100 ))
"""


@pytest.fixture
def planted(suite, tmp_path, monkeypatch):
    """A suite whose third commit of four made it slower, nights of the first and the last, and that commit."""
    # Else it is the default branch of the checkout in which these tests run.
    monkeypatch.setenv("CI_DEFAULT_BRANCH", "main")
    suite.partition(time_limit="1m")
    suite.tests(TEST)
    checkout = Checkout.made(suite.folder)
    checkout.write(".gitignore", "/wait\n/begun\n/pytest-*\n__pycache__\n")
    commits = []
    for number, rate in enumerate((1000, 1000, 900, 900)):
        text = RATE.format(folder=tmp_path, rate=rate) + f"# {number}\n"
        checkout.write("rate.sh", text, 0o755)
        commits.append(checkout.commit(f"c{number}"))
    made = nights(
        [*quiet(5, 1000), *quiet(5, 900, 2)],
        system="cluster", partition="part", node_id="test_faults.py::test_script[cluster:part]",
        benchmark="test_faults.py::test_script", root=str(suite.folder),
    )  # fmt: skip
    sides = [commits[0]] * 5 + [commits[3]] * 5
    store(suite.state, [replace(one, commit=commit) for one, commit in zip(made, sides, strict=True)])
    return checkout, commits[2]


def nothing_is_left(suite, checkout):
    left = [*suite.ledgers(), *suite.state.glob("bisect/*"), *suite.state.glob("**/worktrees/*")]
    return not left and not checkout.worktrees() and all(job.ended for job in suite.jobs())


def test_a_planted_commit_is_named_by_one_job_for_each_comparison(suite, planted):
    checkout, culprit = planted
    said = suite.mlhpc("history", "bisect", "test_script")
    assert f"commit {culprit[:12]} (c2, a)" in said
    assert "sure, after 8 runs in 2 comparisons" in said
    assert len(suite.jobs()) == 2
    wait_for(lambda: nothing_is_left(suite, checkout))


def test_a_job_that_is_cancelled_from_outside_is_submitted_once_more(suite, planted, tmp_path):
    checkout, culprit = planted
    (tmp_path / "wait").touch()
    argv = [
        sys.executable,
        "-m",
        "pytest_mlhpc.cli",
        "history",
        "bisect",
        "test_script",
        "--state-dir",
        suite.state,
    ]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(argv, text=True, **pipes) as process:
        try:
            wait_for((tmp_path / "begun").exists)
            (tmp_path / "wait").unlink()
            (job,) = suite.jobs()
            subprocess.run(["scancel", job.id], check=True)
            said, _ = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
    assert "; once more" in said
    assert f"commit {culprit[:12]} (c2, a)" in said
    assert len(suite.jobs()) == 3
    wait_for(lambda: nothing_is_left(suite, checkout))
