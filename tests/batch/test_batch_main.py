"""The batch as a program: its plan, its lifeline, its exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_mlhpc.batch.main import EXIT_PLAN, EXIT_TOLD_TO_END
from pytest_mlhpc.batch.plan import PROTOCOL, Plan, RunPlan
from pytest_mlhpc.batch.processes import stat_fields
from pytest_mlhpc.batch.ranks import RankBook
from pytest_mlhpc.batch.relay import Relay
from pytest_mlhpc.batch.runs import rank_environment
from pytest_mlhpc.batch.supervise import Supervisor
from pytest_mlhpc.results.lines import Decoder
from pytest_mlhpc.results.schema import to_json

pytestmark = pytest.mark.servers  # a batch with its ranks each


def run_plan(name: str = "run-1", **changes) -> RunPlan:
    fields = {
        "run_id": name, "nonce": "nonce", "attempt": 0, "workload": "command", "parameters": {}, "nodes": 1, "ranks": 1,
        "cores_per_rank": 1, "device_type": "cpu", "launcher": "plain", "time_limit_s": 30.0, "steps": 1,
        "warmup_steps": 0, "argv": ("true",),
    }  # fmt: skip
    return RunPlan(**{**fields, **changes})


def start(folder: Path, *runs: RunPlan, **changes) -> subprocess.Popen[bytes]:
    plan = to_json(Plan("a", "", str(folder), 1, 60.0, runs))
    return start_text(folder, json.dumps({**plan, **changes}))


def start_text(folder: Path, text: str) -> subprocess.Popen[bytes]:
    (folder / "plan.json").write_text(text)
    argv = [sys.executable, "-m", "pytest_mlhpc.batch.main", str(folder / "plan.json")]
    pipe = subprocess.PIPE
    return subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, cwd=folder, start_new_session=True)


def finish(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """Read to the end with the lifeline held."""
    with process:
        return process.stdout.read(), process.stderr.read()


def lines_of(output: bytes, *names: str) -> list[tuple[str, str]]:
    found = Decoder(dict.fromkeys(names or ("run-1",), "nonce")).feed(output)
    return [(message.run_id, message.kind) for message in found]


def test_runs_are_done_in_order(tmp_path):
    process = start(tmp_path, run_plan("b"), run_plan("a"))
    output, _ = finish(process)
    assert lines_of(output, "a", "b") == [("b", "started"), ("b", "end"), ("a", "started"), ("a", "end")]
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "cannot be used"),
        ("[" * 100_000, "cannot be used"),
        ('{"surprise": 1}', "unknown field 'surprise'"),
        ("\udcff", "cannot be used"),
    ],
)
def test_a_plan_that_is_none_is_refused(tmp_path, text, says):
    (tmp_path / "plan.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    process = start_text(tmp_path, text) if text.isascii() else start_bytes(tmp_path)
    output, error = finish(process)
    assert (process.returncode, output) == (EXIT_PLAN, b"")
    assert says in error.decode()


def start_bytes(folder: Path) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "pytest_mlhpc.batch.main", str(folder / "plan.json")]
    pipe = subprocess.PIPE
    return subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, cwd=folder)


def test_another_protocol_is_refused_and_both_are_named(tmp_path):
    process = start(tmp_path, run_plan(), protocol=PROTOCOL + 1)
    _, error = finish(process)
    assert process.returncode == EXIT_PLAN
    assert (
        f"protocol_mismatch: the plan speaks protocol {PROTOCOL + 1}, this payload {PROTOCOL}"
        in error.decode()
    )


def wait_for_pid(path: Path) -> int:
    deadline = time.monotonic() + 30
    while not (path.exists() and path.read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return int(path.read_text())


@pytest.mark.parametrize("end", ["lifeline", "sigterm"])
def test_everything_ends_with_the_lifeline_or_at_sigterm(tmp_path, end):
    script = f"trap '' TERM; env -i setsid sleep 60 & echo $! > {tmp_path}/pid; sleep 60"
    with start(tmp_path, run_plan(argv=("bash", "-c", script))) as process:
        pid = wait_for_pid(tmp_path / "pid")
        if end == "lifeline":
            process.stdin.close()
        else:
            process.send_signal(signal.SIGTERM)
        assert process.wait(20) == EXIT_TOLD_TO_END
    assert stat_fields(pid)[:1] in ([], ["Z"])


def test_a_controller_that_stops_reading_ends_the_batch(tmp_path):
    with start(tmp_path, run_plan("a"), run_plan("b", argv=("sleep", "60"))) as process:
        process.stdout.close()
        assert process.wait(20) == EXIT_TOLD_TO_END


def test_prints_by_mistake_do_not_reach_worker_lines(tmp_path):
    package = tmp_path / "noisy"
    package.mkdir()
    (package / "__init__.py").touch()
    code = (
        "print('noise', flush=True)\ndef launch(run, nodes, environment):\n    return ['true'], environment\n"
    )
    (package / "launcher.py").write_text(code)
    process = start(tmp_path, run_plan(launcher="noisy.launcher"))
    output, error = finish(process)
    assert lines_of(output) == [("run-1", "started"), ("run-1", "end")]
    assert b"noise" in error


def test_a_program_that_prints_without_pause_ends_at_its_time_limit(tmp_path):
    script = "for _ in 1 2 3 4 5 6 7 8; do timeout 12 cat /dev/zero & done; wait"
    with start(tmp_path, run_plan(argv=("bash", "-c", script), time_limit_s=0.5)) as process:
        assert process.wait(10) == 0
        output = process.stdout.read()
    (failed,) = [item for item in Decoder({"run-1": "nonce"}).feed(output) if item.kind == "failed"]
    assert failed.body["outcome"] == "time_limit"


@pytest.mark.timeout(20)
def test_output_without_end_is_not_read_to_its_end(tmp_path, monkeypatch):
    relay = Relay(os.open(os.devnull, os.O_WRONLY))
    supervisor = Supervisor(RankBook(run_plan()), tmp_path, relay, 0, lambda: False)
    with Path("/dev/zero").open("rb") as endless:
        monkeypatch.setattr(supervisor, "_process", SimpleNamespace(stdout=endless))
        supervisor._listen_to_all()
        supervisor._close()
    assert 1 << 20 <= (tmp_path / "rank0.log").stat().st_size <= 1 << 23


def test_a_full_disk_is_named_with_the_path(tmp_path):
    (tmp_path / "run-1").touch()
    output, _ = finish(start(tmp_path, run_plan()))
    (failed,) = [item for item in Decoder({"run-1": "nonce"}).feed(output) if item.kind == "failed"]
    assert failed.body["outcome"] == "disk_full"
    assert str(tmp_path / "run-1") in failed.body["text"]


def test_a_rank_does_not_take_a_foreign_launchers_place_for_its_own(monkeypatch):
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("PYTHONPATH", "payload.zip")
    environment = rank_environment(
        run_plan(variables={"PYTHONPATH": "site", "X": "1"}), Path("/p/plan.json"), "/s"
    )
    assert "RANK" not in environment
    assert environment["PYTHONPATH"] == f"payload.zip{os.pathsep}site"
    assert environment["X"] == "1"
