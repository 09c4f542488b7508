"""The batch with its lines in files: what it leaves there in every way in which it can end."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path

import pytest
from batches import finish, kinds, start, write_plan
from pods import bash, run_plan
from running_suites import wait_for

from pytest_mlhpc.batch import main as batch
from pytest_mlhpc.batch import nodes
from pytest_mlhpc.batch.main import (
    EXIT_CANNOT_WRITE,
    EXIT_NODES,
    EXIT_PLAN,
    EXIT_REQUEUED,
    EXIT_TOLD_TO_END,
)
from pytest_mlhpc.batch.outlet import Begun, LinesFolder

SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]"}


@pytest.fixture
def lines(tmp_path) -> Path:
    (tmp_path / "lines").mkdir()
    return tmp_path / "lines"


def run(folder: Path, *runs, **options) -> tuple[int, str]:
    """Let a batch do runs with its lines in files; return its exit code and errors."""
    code, output, errors = finish(start(folder, *runs, lines="lines", **options))
    assert output == b""
    return code, errors


def over(folder: Path) -> int:
    """Return the exit code that the batch left."""
    return json.loads((folder / "alloc.over").read_text())["exit"]


def kinds_in(folder: Path) -> list[tuple[str, str]]:
    return kinds((folder / "alloc.jsonl").read_bytes(), "run-0001", "a", "b")


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_ino) for path in folder.iterdir()}


def test_each_run_is_told_of_in_three_files_whatever_becomes_of_it(tmp_path, lines):
    (tmp_path / "b.skip").touch()  # nobody waits for it
    runs = (
        run_plan("b", argv=("touch", str(tmp_path / "ran"))),
        run_plan("c", nodes=2, ranks=2),
        run_plan("a"),
    )
    assert run(tmp_path, *runs)[0] == 0
    assert not (tmp_path / "ran").exists()
    assert kinds((lines / "alloc.jsonl").read_bytes(), "a", "b", "c") == [
        ("b", "failed"), ("b", "end"), ("c", "started"), ("c", "failed"), ("c", "end"), ("a", "started"), ("a", "end"),
    ]  # fmt: skip
    up = json.loads((lines / "alloc.up").read_text())
    assert (up["schema"], up["job_id"], up["nodes"]) == (1, "", [os.uname().nodename])
    assert over(lines) == 0
    assert sorted(contents(lines)) == ["alloc.jsonl", "alloc.over", "alloc.up"]


def test_sigterm_ends_everything_and_is_told(tmp_path, lines):
    process = start(tmp_path, bash(f"trap '' TERM; touch {tmp_path}/on; sleep 600"), lines="lines")
    wait_for((tmp_path / "on").exists)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == over(lines) == EXIT_TOLD_TO_END
    assert kinds_in(lines) == [("run-0001", "started")]  # nothing is made up about how it ended


@pytest.fixture
def refused(tmp_path, monkeypatch, capfd):
    """Let a batch refuse its run in the test's own process; return its exit code and errors."""
    monkeypatch.setattr(batch, "Signals", lambda: None)
    monkeypatch.setattr(batch, "raise_file_limit", lambda _ranks: None)
    monkeypatch.setattr(batch, "become_subreaper", lambda: "")
    monkeypatch.setattr(batch.os, "dup2", lambda *_: None)

    def call(environ: dict[str, str], allocation: str = "alloc") -> tuple[int, str]:
        path = write_plan(tmp_path, run_plan(argv=("touch", str(tmp_path / "ran"))), allocation=allocation)
        code = batch.main(["--lines", str(tmp_path / "lines"), str(path)], environ)
        assert not (tmp_path / "ran").exists()
        return code, capfd.readouterr().err

    return call


@pytest.mark.parametrize("job", [{"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "node7"}, {}])
def test_a_second_job_of_the_same_submission_does_nothing_and_writes_nothing(lines, refused, job):
    (lines / "alloc.up").write_text('{"schema": 1, "job_id": "11"}')
    before = contents(lines)
    error = "job 11 has already begun with the runs of this allocation; this job does nothing\n"
    assert refused(job) == (0, error)
    assert contents(lines) == before


def test_a_job_that_slurm_starts_again_does_nothing_and_says_so_by_its_exit_code(lines, refused):
    (lines / "alloc.up").write_text('{"schema": 1, "job_id": "11"}')
    again = {"SLURM_JOB_ID": "11", "SLURM_RESTART_COUNT": "1", "SLURM_JOB_NODELIST": "node7"}
    code, errors = refused(again)
    assert code == EXIT_REQUEUED
    assert "was requeued after its batch had begun" in errors
    assert not (lines / "alloc.over").exists()


def test_a_folder_that_is_not_there_is_named(tmp_path, refused):
    (tmp_path / "lines").touch()
    code, errors = refused({})
    assert code == EXIT_CANNOT_WRITE
    assert f"cannot write {tmp_path}/lines" in errors


def test_an_id_that_is_no_name_writes_nowhere(tmp_path, lines, refused):
    code, errors = refused({}, allocation="../alloc")
    assert code == EXIT_PLAN
    assert "'../alloc' is no name of a file" in errors
    assert not (tmp_path / "alloc.up").exists()


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo no such host list >&2; exit 1", "no such host list"),
        ("exit 0", "named no node"),
        (None, "cannot start"),
    ],
)
def test_nodes_that_scontrol_does_not_tell_are_an_error(lines, refused, monkeypatch, script, says):
    monkeypatch.setenv("PATH", str(lines.parent))
    if script is not None:
        (lines.parent / "scontrol").write_text(f"#!/bin/sh\n{script}\n")
        (lines.parent / "scontrol").chmod(0o755)
    code, errors = refused(SLURM)
    assert code == over(lines) == EXIT_NODES
    assert "the nodes of this allocation cannot be found out: " in errors
    assert says in errors


def test_a_full_disk_ends_the_batch_with_the_reason(tmp_path, lines):
    (lines / "alloc.jsonl").symlink_to("/dev/full")
    code, errors = run(tmp_path, run_plan())
    assert code == over(lines) == EXIT_CANNOT_WRITE
    assert "worker lines of the allocation alloc cannot be written: No space left on device" in errors


def test_a_list_of_plain_names_is_read_without_asking_scontrol(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert nodes.allocated({"SLURM_JOB_NODELIST": "node7"}) == ("node7",)
    assert nodes.allocated({"SLURM_JOB_NODELIST": "node7,gpu1"}) == ("node7", "gpu1")


@pytest.mark.parametrize("links", [True, False])
def test_of_batches_that_begin_at_once_one_has_the_word(tmp_path, monkeypatch, links):
    if not links:

        def link(*_names) -> None:
            raise OSError(errno.EPERM, "no hard links here")

        monkeypatch.setattr(os, "link", link)
    first, second = LinesFolder(tmp_path, "alloc"), LinesFolder(tmp_path, "alloc")
    first.open(("node7",), {"SLURM_JOB_ID": "11"})
    with pytest.raises(Begun):
        second.open(("node8",), {"SLURM_JOB_ID": "12"})
    assert second.close(70, 74) == 70
    assert second.holder == "11"
    assert sorted(contents(tmp_path)) == ["alloc.jsonl", "alloc.up"]
    assert first.close(0, 74) == over(tmp_path) == 0


def test_the_lines_are_on_disk_before_the_batch_says_that_it_is_over(tmp_path, monkeypatch):
    order = []
    folder = LinesFolder(tmp_path, "alloc")
    descriptor = folder.open(("node7",), {})

    def note(name, call):
        def noted(first, *rest):
            if first == descriptor or name == "replace":
                order.append(name)
            return call(first, *rest)

        return noted

    for name in ("fsync", "close", "replace"):
        monkeypatch.setattr(os, name, note(name, getattr(os, name)))
    folder.close(0, 74)
    assert order[:2] == ["fsync", "close"]
    assert order[-1] == "replace"


def test_lines_that_get_lost_on_their_way_to_the_disk_are_no_success(tmp_path, monkeypatch):
    folder = LinesFolder(tmp_path, "alloc")
    descriptor = folder.open(("node7",), {})
    sync, times = os.fsync, []

    def full(fd: int) -> None:
        times.append(fd)
        if times == [descriptor]:  # descriptors are used again
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        sync(fd)

    monkeypatch.setattr(os, "fsync", full)
    assert folder.close(0, 74) == over(tmp_path) == 74
