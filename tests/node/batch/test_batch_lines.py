"""The batch with its lines in files: what it leaves there in every way in which it can end."""

import errno
import json
import os
import signal
from unittest.mock import Mock

import pytest
from batches import finish, kinds, start, write_plan
from pods import bash, run_plan
from running_suites import wait_for

from pytest_mlhpc.node.agents import nodes
from pytest_mlhpc.node.batch import main as batch
from pytest_mlhpc.node.batch.main import (
    EXIT_CANNOT_WRITE,
    EXIT_NODES,
    EXIT_PLAN,
    EXIT_REQUEUED,
    EXIT_TERMINATED,
)
from pytest_mlhpc.node.batch.output import AlreadyStarted, LinesFolder


@pytest.fixture
def lines(tmp_path):
    (tmp_path / "lines").mkdir()
    return tmp_path / "lines"


def run(folder, *runs, **options):
    """Let a batch do runs with its lines in files; return its exit code and errors."""
    code, output, errors = finish(start(folder, *runs, lines="lines", **options))
    assert output == b""
    return code, errors


def over(folder):
    """Return the exit code that the batch left."""
    return json.loads((folder / "alloc.over").read_text())["exit"]


def contents(folder):
    return {path.name: (path.read_bytes(), path.stat().st_ino) for path in folder.iterdir()}


def test_each_run_is_reported_in_three_files_whatever_becomes_of_it(tmp_path, lines):
    (tmp_path / "b.skip").touch()  # nobody waits for it
    skipped = run_plan("b", argv=("touch", str(tmp_path / "ran")))
    assert run(tmp_path, skipped, run_plan("c", nodes=2, ranks=2), run_plan("a"))[0] == over(lines) == 0
    assert not (tmp_path / "ran").exists()
    assert kinds((lines / "alloc.jsonl").read_bytes(), "a", "b", "c") == [
        ("b", "failed"), ("b", "end"), ("c", "started"), ("c", "failed"), ("c", "end"), ("a", "started"), ("a", "end"),
    ]  # fmt: skip
    up = json.loads((lines / "alloc.up").read_text())
    assert (up["schema"], up["job_id"], up["nodes"]) == (1, "", [os.uname().nodename])
    assert sorted(contents(lines)) == ["alloc.jsonl", "alloc.over", "alloc.up"]


def test_sigterm_ends_everything_and_is_reported(tmp_path, lines):
    process = start(tmp_path, bash(f"trap '' TERM; touch {tmp_path}/on; sleep 600"), lines="lines")
    wait_for((tmp_path / "on").exists)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == over(lines) == EXIT_TERMINATED
    # Nothing is made up about how it ended.
    assert kinds((lines / "alloc.jsonl").read_bytes()) == [("run-0001", "started")]


@pytest.fixture
def refused(tmp_path, monkeypatch, capfd):
    """Let a batch refuse its run in the test's own process; return its exit code and errors."""
    for name, instead in {
        "BatchSignals": None, "raise_file_limit": None, "become_subreaper": "", "os.dup2": None,
    }.items():  # fmt: skip
        monkeypatch.setattr(f"pytest_mlhpc.node.batch.main.{name}", Mock(return_value=instead))

    def call(environ, allocation="alloc"):
        path = write_plan(tmp_path, run_plan(argv=("touch", str(tmp_path / "ran"))), allocation=allocation)
        code = batch.main(["--lines", str(tmp_path / "lines"), str(path)], environ)
        assert not (tmp_path / "ran").exists()
        return code, capfd.readouterr().err

    return call


NODE7 = {"SLURM_JOB_NODELIST": "node7"}


@pytest.mark.parametrize(
    ("job", "code", "words"),
    [
        pytest.param(
            {"SLURM_JOB_ID": "12", **NODE7},
            0,
            "job 11 has already begun with the runs of this allocation; this job does nothing\n",
            id="a second job of the same submission",
        ),
        pytest.param(
            {},
            0,
            "job 11 has already begun with the runs of this allocation; this job does nothing\n",
            id="a batch of no job",
        ),
        pytest.param(
            {"SLURM_JOB_ID": "11", "SLURM_RESTART_COUNT": "1", **NODE7},
            EXIT_REQUEUED,
            "was requeued after its batch had begun",
            id="the same job, which Slurm has started again, says so by its exit code",
        ),
    ],
)
def test_a_batch_of_an_allocation_that_has_begun_does_nothing_and_writes_nothing(
    lines, refused, job, code, words
):
    (lines / "alloc.up").write_text('{"schema": 1, "job_id": "11"}')
    before = contents(lines)
    exit_code, errors = refused(job)
    assert (exit_code, words in errors) == (code, True)
    assert contents(lines) == before


def test_a_folder_that_is_not_there_is_named(tmp_path, refused):
    (tmp_path / "lines").touch()
    code, errors = refused({})
    assert (code, f"cannot write {tmp_path}/lines" in errors) == (EXIT_CANNOT_WRITE, True)


def test_an_id_that_is_no_name_writes_nowhere(tmp_path, lines, refused):
    code, errors = refused({}, allocation="../alloc")
    assert (code, "'../alloc' is no name of a file" in errors) == (EXIT_PLAN, True)
    assert not (tmp_path / "alloc.up").exists()


def test_a_list_of_nodes_that_is_none_is_an_error(lines, refused):
    code, errors = refused({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[2-1]"})
    assert code == over(lines) == EXIT_NODES
    assert "the nodes of this allocation are not known: SLURM_JOB_NODELIST: host list 'node[2-1]'" in errors
    assert "runs backwards" in errors


def test_a_full_disk_ends_the_batch_with_the_reason(tmp_path, lines):
    (lines / "alloc.jsonl").symlink_to("/dev/full")
    code, errors = run(tmp_path, run_plan())
    assert code == over(lines) == EXIT_CANNOT_WRITE
    assert "worker lines of the allocation alloc cannot be written: No space left on device" in errors


def test_a_list_of_nodes_is_expanded_without_asking_scontrol(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert nodes.allocated({"SLURM_JOB_NODELIST": "node7"}) == ("node7",)
    assert nodes.allocated({"SLURM_JOB_NODELIST": "node7,gpu[1-2]"}) == ("node7", "gpu1", "gpu2")


@pytest.mark.parametrize("links", [True, False])
def test_of_batches_that_begin_at_once_one_runs(tmp_path, monkeypatch, links):
    if not links:
        monkeypatch.setattr(os, "link", Mock(side_effect=OSError(errno.EPERM, "no hard links here")))
    first, second = LinesFolder(tmp_path, "alloc"), LinesFolder(tmp_path, "alloc")
    first.open(("node7",), "11")
    with pytest.raises(AlreadyStarted):
        second.open(("node8",), "12")
    assert (second.close(70, 74), second.holder) == (70, "11")
    assert sorted(contents(tmp_path)) == ["alloc.jsonl", "alloc.up"]
    assert first.close(0, 74) == over(tmp_path) == 0


def test_the_lines_are_on_disk_before_the_batch_says_that_it_is_over(tmp_path, monkeypatch):
    folder = LinesFolder(tmp_path, "alloc")
    descriptor = folder.open(("node7",), "")
    calls = Mock()
    for name in ("fsync", "close", "replace"):
        getattr(calls, name).side_effect = getattr(os, name)
        monkeypatch.setattr(os, name, getattr(calls, name))
    folder.close(0, 74)
    order = [name for name, (first, *_), _ in calls.mock_calls if name == "replace" or first == descriptor]
    assert (order[:2], order[-1]) == (["fsync", "close"], "replace")


def test_lines_that_get_lost_on_their_way_to_the_disk_are_no_success(tmp_path, monkeypatch):
    folder = LinesFolder(tmp_path, "alloc")
    descriptor = folder.open(("node7",), "")
    sync, times = os.fsync, []

    def full(fd):
        times.append(fd)
        if times == [descriptor]:  # descriptors are used again
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        sync(fd)

    monkeypatch.setattr(os, "fsync", full)
    assert folder.close(0, 74) == over(tmp_path) == 74
