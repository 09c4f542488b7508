"""Builds and ranks of programs where the batch, or what starts them, is killed."""

import os
import signal
import time

import pytest
from batches import finish, messages, start
from pods import run_plan
from running_suites import wait_for

from pytest_mlhpc.node.batch import runs
from pytest_mlhpc.node.protocol.plan import BuildPlan


@pytest.fixture
def folder(tmp_path):
    """The folder of an allocation, as deep below the state directory as a session makes it."""
    made = tmp_path / "state" / "runs" / "session" / "alloc"
    made.mkdir(parents=True)
    return made


def built(script):
    build = BuildPlan("tool", "key", ("sh", "-c", script))
    return run_plan(argv=("cat", "{tool}/made"), builds=(build,))


def test_what_a_killed_batch_had_begun_to_build_is_built_anew_and_removed(folder, tmp_path):
    """Its process is the guardian's, or the scheduler's, to end: tests/plugin/test_plugin_programs.py."""
    began = tmp_path / "began"
    process = start(folder, built(f"echo $$ > {began}.pid; mv {began}.pid {began}; exec sleep 600"))
    wait_for(began.exists)
    process.kill()
    os.kill(int(began.read_text()), signal.SIGKILL)
    process.communicate()
    root = tmp_path / "state" / "builds"
    (left,) = root.iterdir()
    assert left.name == "key.nonce"
    os.utime(left, (0, 0))  # a week later
    (folder / "plan.json").unlink()
    _, output, _ = finish(start(folder, built("echo fine > made")))
    assert [one.kind for one in messages(output)] == ["started", "end"]
    assert (folder / "run-0001" / "rank0.log").read_text() == "fine\n"
    assert [path.name for path in root.iterdir()] == ["key"]


def test_a_build_that_was_left_is_removed_by_the_next_of_another_program(tmp_path):
    for name, age in (("other.nonce", 8), ("young.nonce", 1), ("whole", 8)):
        (tmp_path / name).mkdir()
        when = time.time() - age * 86400
        os.utime(tmp_path / name, (when, when))
    runs._remove_old(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["whole", "young.nonce"]


def test_ranks_end_with_the_process_that_spawned_them(folder, tmp_path):
    script = f"echo $PPID > {tmp_path}/parent; touch {tmp_path}/rank$RANK; exec sleep 600"
    process = start(folder, run_plan(argv=("sh", "-c", script), launcher="spawn", processes=2))
    wait_for((tmp_path / "rank0").exists)
    wait_for((tmp_path / "rank1").exists)
    os.kill(int((tmp_path / "parent").read_text()), signal.SIGKILL)
    _, output, _ = finish(process)
    failed = next(one for one in messages(output) if one.kind == "failed")
    assert failed.body["outcome"] == "worker_killed"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"argv": ("./nosuch",)}, "cannot start './nosuch': No such file or directory (looked for among the test's files, and beside"),
        ({"argv": ("nosuch",)}, "cannot start 'nosuch': No such file or directory (looked for in the folders of PATH)"),
        ({"argv": ("./nosuch",), "cwd": "/usr"}, "cannot start './nosuch': No such file or directory (looked for relative to '/usr')"),
        ({"argv": ("sh",), "cwd": "/no/folder"}, "the folder '/no/folder' to start 'sh' in: No such file or directory"),
    ],
)  # fmt: skip
def test_a_program_that_is_not_there_says_where_it_was_looked_for(folder, changes, text):
    _, output, _ = finish(start(folder, run_plan(**changes)))
    failed = next(one for one in messages(output) if one.kind == "failed")
    assert failed.body["outcome"] == "command_not_found"
    assert text in failed.body["text"]
