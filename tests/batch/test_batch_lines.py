"""The batch with its lines in files: what it leaves there in every way in which it can end."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pytest_mlhpc.batch import nodes
from pytest_mlhpc.batch.main import (
    EXIT_CANNOT_WRITE,
    EXIT_NODES,
    EXIT_PLAN,
    EXIT_REQUEUED,
    EXIT_TOLD_TO_END,
)
from pytest_mlhpc.batch.outlet import Begun, LinesFolder
from pytest_mlhpc.batch.plan import Plan, RunPlan
from pytest_mlhpc.results.lines import Decoder
from pytest_mlhpc.results.schema import to_json


def run_plan(name: str = "run-1", **changes) -> RunPlan:
    fields = {
        "run_id": name, "nonce": "nonce", "attempt": 0, "workload": "command", "parameters": {}, "nodes": 1, "ranks": 1,
        "cores_per_rank": 1, "device_type": "cpu", "launcher": "plain", "time_limit_s": 30.0, "steps": 1,
        "warmup_steps": 0, "argv": ("true",),
    }  # fmt: skip
    return RunPlan(**{**fields, **changes})


def start(
    folder: Path, *runs: RunPlan, allocation: str = "alloc", **environment: str
) -> subprocess.Popen[bytes]:
    (folder / "lines").mkdir(exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(to_json(Plan(allocation, "", str(folder), 1, 60.0, runs))))
    argv = [sys.executable, "-m", "pytest_mlhpc.batch.main", "--lines", str(folder / "lines")]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    return subprocess.Popen(
        [*argv, str(folder / "plan.json")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        env={**clean, **environment},
    )


def finish(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    with process:
        output, error = process.communicate(timeout=40)
    assert output == b""
    return process.returncode, error.decode()


def over(folder: Path) -> dict:
    return over_of(folder / "lines")


def over_of(lines: Path) -> dict:
    return json.loads((lines / "alloc.over").read_text())


def kinds(folder: Path) -> list[tuple[str, str]]:
    data = (folder / "lines/alloc.jsonl").read_bytes()
    found = Decoder(dict.fromkeys(("run-1", "a", "b"), "nonce")).feed(data)
    return [(message.run_id, message.kind) for message in found]


def test_all_runs_are_told_of_in_three_files(tmp_path):
    assert finish(start(tmp_path, run_plan("b"), run_plan("a")))[0] == 0
    assert kinds(tmp_path) == [("b", "started"), ("b", "end"), ("a", "started"), ("a", "end")]
    up = json.loads((tmp_path / "lines/alloc.up").read_text())
    assert (up["schema"], up["job_id"], up["nodes"]) == (1, "", [os.uname().nodename])
    assert over(tmp_path)["exit"] == 0
    assert sorted(path.name for path in (tmp_path / "lines").iterdir()) == [
        "alloc.jsonl", "alloc.over", "alloc.up",
    ]  # fmt: skip


def test_sigterm_ends_everything_and_is_told(tmp_path):
    script = f"trap '' TERM; touch {tmp_path}/on; sleep 60"
    process = start(tmp_path, run_plan(argv=("bash", "-c", script)))
    deadline = time.monotonic() + 30
    while not (tmp_path / "on").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == EXIT_TOLD_TO_END
    assert over(tmp_path)["exit"] == EXIT_TOLD_TO_END
    assert kinds(tmp_path) == [("run-1", "started")]  # nothing is made up about how it ended


def test_a_run_that_nobody_waits_for_is_left_out_and_the_next_one_is_done(tmp_path):
    (tmp_path / "b.skip").touch()
    process = start(tmp_path, run_plan("b", argv=("touch", str(tmp_path / "ran"))), run_plan("a"))
    assert finish(process)[0] == 0
    assert not (tmp_path / "ran").exists()
    assert kinds(tmp_path) == [("b", "failed"), ("b", "end"), ("a", "started"), ("a", "end")]


@pytest.mark.parametrize("job", [{"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "node7"}, {}])
def test_a_second_job_of_the_same_submission_does_nothing_and_writes_nothing(tmp_path, job):
    assert finish(start(tmp_path, run_plan()))[0] == 0
    up = json.loads((tmp_path / "lines/alloc.up").read_text())
    (tmp_path / "lines/alloc.up").write_text(json.dumps({**up, "job_id": "11"}))
    before = {path.name: (path.read_bytes(), path.stat().st_ino) for path in (tmp_path / "lines").iterdir()}
    code, error = finish(start(tmp_path, run_plan(argv=("touch", str(tmp_path / "ran"))), **job))
    assert code == 0
    assert error == "job 11 has already begun with the runs of this allocation; this job does nothing\n"
    assert not (tmp_path / "ran").exists()
    assert before == {
        path.name: (path.read_bytes(), path.stat().st_ino) for path in (tmp_path / "lines").iterdir()
    }


def test_a_job_that_slurm_starts_again_does_nothing_and_says_so_by_its_exit_code(tmp_path):
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines/alloc.up").write_text('{"schema": 1, "job_id": "11"}')
    again = {"SLURM_JOB_ID": "11", "SLURM_RESTART_COUNT": "1", "SLURM_JOB_NODELIST": "node7"}
    code, error = finish(start(tmp_path, run_plan(), **again))
    assert code == EXIT_REQUEUED
    assert "was requeued after its batch had begun" in error
    assert not (tmp_path / "lines/alloc.over").exists()


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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alloc.jsonl", "alloc.up"]
    assert first.close(0, 74) == 0
    assert over_of(tmp_path)["exit"] == 0


def test_the_lines_are_on_disk_before_the_batch_says_that_it_is_over(tmp_path, monkeypatch):
    order = []
    sync, close, replace = os.fsync, os.close, os.replace
    lines = LinesFolder(tmp_path, "alloc")
    descriptor = lines.open(("node7",), {})

    def told(what, call):
        def done(first, *rest):
            if first == descriptor or what == "over":
                order.append(what)
            return call(first, *rest)

        return done

    monkeypatch.setattr(os, "fsync", told("synced", sync))
    monkeypatch.setattr(os, "close", told("closed", close))
    monkeypatch.setattr(os, "replace", told("over", replace))
    lines.close(0, 74)
    assert order[:2] == ["synced", "closed"]
    assert order[-1] == "over"


def test_lines_that_get_lost_on_their_way_to_the_disk_are_no_success(tmp_path, monkeypatch):
    lines = LinesFolder(tmp_path, "alloc")
    descriptor = lines.open(("node7",), {})
    sync, times = os.fsync, []

    def full(fd: int) -> None:
        times.append(fd)
        if times == [descriptor]:  # descriptors are used again
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        sync(fd)

    monkeypatch.setattr(os, "fsync", full)
    assert lines.close(0, 74) == 74
    assert over_of(tmp_path)["exit"] == 74


def test_a_full_disk_ends_the_batch_with_the_reason(tmp_path):
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines/alloc.jsonl").symlink_to("/dev/full")
    code, error = finish(start(tmp_path, run_plan()))
    assert code == over(tmp_path)["exit"] == EXIT_CANNOT_WRITE
    assert "worker lines of the allocation alloc cannot be written: No space left on device" in error


def test_a_folder_that_is_not_there_is_named(tmp_path):
    process = start(tmp_path, run_plan())
    finish(process)
    for path in (tmp_path / "lines").iterdir():
        path.unlink()
    (tmp_path / "lines").rmdir()
    (tmp_path / "lines").touch()
    argv = [sys.executable, "-m", "pytest_mlhpc.batch.main", "--lines", "lines", "plan.json"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, check=False, timeout=40)
    assert done.returncode == EXIT_CANNOT_WRITE
    assert f"cannot write {tmp_path}/lines" in done.stderr.decode()


def test_an_id_that_is_no_name_writes_nowhere(tmp_path):
    code, error = finish(start(tmp_path, run_plan(), allocation="../alloc"))
    assert code == EXIT_PLAN
    assert "'../alloc' is no name of a file" in error
    assert not (tmp_path / "alloc.up").exists()


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo no such host list >&2; exit 1", "no such host list"),
        ("exit 0", "named no node"),
        (None, "cannot start"),
    ],
)
def test_nodes_that_scontrol_does_not_tell_are_an_error(tmp_path, script, says):
    (tmp_path / "bin").mkdir()
    if script is not None:
        (tmp_path / "bin/scontrol").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin/scontrol").chmod(0o755)
    given = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]", "PATH": str(tmp_path / "bin")}
    code, error = finish(start(tmp_path, run_plan(), **given))
    assert code == over(tmp_path)["exit"] == EXIT_NODES
    assert "the nodes of this allocation cannot be found out: " in error
    assert says in error


def test_a_list_of_plain_names_is_read_without_asking_scontrol(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert nodes.allocated({"SLURM_JOB_NODELIST": "node7"}) == ("node7",)
    assert nodes.allocated({"SLURM_JOB_NODELIST": "node7,gpu1"}) == ("node7", "gpu1")


def test_more_nodes_than_there_are_fail_that_run_alone(tmp_path):
    assert finish(start(tmp_path, run_plan("a", nodes=2, ranks=2), run_plan("b")))[0] == 0
    assert kinds(tmp_path)[1:] == [("a", "failed"), ("a", "end"), ("b", "started"), ("b", "end")]


def test_a_usage_that_is_none_is_told(tmp_path):
    argv = [sys.executable, "-m", "pytest_mlhpc.batch.main", "--lines", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, check=False, timeout=40)
    assert done.returncode == EXIT_PLAN
    assert done.stderr.startswith(b"usage: ")
