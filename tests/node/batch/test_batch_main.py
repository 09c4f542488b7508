"""The batch as a program: its plan, its lifeline, its exit codes."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from batches import finish, kinds, messages, start, write_plan
from pods import HANG_S, bash, run_plan
from running_suites import wait_for

from pytest_mlhpc.node.batch import main as batch
from pytest_mlhpc.node.batch.main import EXIT_PLAN, EXIT_TERMINATED
from pytest_mlhpc.node.batch.output import Relay
from pytest_mlhpc.node.batch.ranks import RankBook
from pytest_mlhpc.node.batch.runs import rank_environment
from pytest_mlhpc.node.batch.supervise import Supervisor
from pytest_mlhpc.node.child_process import package_root
from pytest_mlhpc.node.processes import stat_fields
from pytest_mlhpc.node.protocol.plan import PROTOCOL


@pytest.mark.parametrize(
    "plan", [b"{", b"[" * 100_000, b'{"surprise": 1}', b"\xff"], ids=lambda plan: repr(plan[:20])
)
def test_a_plan_that_is_none_is_refused(tmp_path, capfd, plan):
    (tmp_path / "plan.json").write_bytes(plan)
    assert batch.main([str(tmp_path / "plan.json")]) == EXIT_PLAN
    output, errors = capfd.readouterr()
    assert output == ""
    assert f"{tmp_path}/plan.json cannot be used: " in errors
    assert ("unknown field 'surprise'" in errors) is (b"surprise" in plan)


def test_another_protocol_is_refused_and_both_are_named(tmp_path, capfd):
    path = write_plan(tmp_path, run_plan(), protocol=PROTOCOL + 1)
    assert batch.main([str(path)]) == EXIT_PLAN
    text = f"protocol_mismatch: the plan speaks protocol {PROTOCOL + 1}, this payload {PROTOCOL}"
    assert text in capfd.readouterr().err


@pytest.mark.parametrize("arguments", [["--lines", "folder"], [], ["--help"]])
def test_a_usage_that_is_none_is_reported(arguments, capfd):
    assert batch.main(arguments) == EXIT_PLAN
    assert capfd.readouterr().err.startswith("usage: ")


LAUNCHER = """
print('noise', flush=True)
def launch(run, nodes, environment):
    return ['true'], environment
"""


@pytest.mark.servers
def test_runs_are_done_in_order_and_prints_by_mistake_do_not_reach_worker_lines(tmp_path):
    (tmp_path / "noisy.py").write_text(LAUNCHER)
    code, output, errors = finish(start(tmp_path, run_plan("b"), run_plan("a", launcher="noisy")))
    assert kinds(output, "a", "b") == [("b", "started"), ("b", "end"), ("a", "started"), ("a", "end")]
    assert (code, "noise" in errors) == (0, True)


@pytest.mark.servers
@pytest.mark.parametrize("end", ["lifeline", "sigterm"])
def test_everything_ends_with_the_lifeline_or_at_sigterm(tmp_path, end):
    script = f"trap '' TERM; env -i setsid sleep 600 & echo $! > {tmp_path}/pid; sleep 600"
    with start(tmp_path, bash(script)) as process:
        pid = tmp_path / "pid"
        wait_for(lambda: pid.exists() and pid.read_text().strip())
        if end == "lifeline":
            process.stdin.close()
        else:
            process.send_signal(signal.SIGTERM)
        assert process.wait(HANG_S) == EXIT_TERMINATED
    assert stat_fields(int(pid.read_text()))[:1] in ([], ["Z"])


@pytest.mark.servers
def test_a_controller_that_stops_reading_ends_the_batch(tmp_path):
    with start(tmp_path, run_plan("a"), run_plan("b", argv=("sleep", "600"), time_limit_s=600.0)) as process:
        process.stdout.close()
        assert process.wait(HANG_S) == EXIT_TERMINATED


def failure_of(output):
    (failed,) = [item.body for item in messages(output) if item.kind == "failed"]
    return failed


@pytest.mark.servers
def test_a_program_that_prints_without_pause_ends_at_its_time_limit(tmp_path):
    script = "for _ in 1 2 3 4; do cat /dev/zero & done; wait"
    code, output, _ = finish(start(tmp_path, bash(script, time_limit_s=0.5)))
    assert (code, failure_of(output)["outcome"]) == (0, "time_limit")


def test_output_without_end_is_not_read_to_its_end(tmp_path, monkeypatch):
    relay = Relay(os.open(os.devnull, os.O_WRONLY))
    supervisor = Supervisor(RankBook(run_plan()), tmp_path, relay, 0, lambda: False)
    with Path("/dev/zero").open("rb") as endless:
        monkeypatch.setattr(supervisor, "_process", SimpleNamespace(stdout=endless, stderr=None))
        supervisor._listen_to_all()
        supervisor._close()
    assert 1 << 20 <= (tmp_path / "rank0.log").stat().st_size <= 1 << 23


@pytest.mark.servers
def test_a_file_that_cannot_be_written_is_named_with_its_path(tmp_path):
    (tmp_path / "run-0001").touch()
    failed = failure_of(finish(start(tmp_path, run_plan()))[1])
    assert (failed["outcome"], str(tmp_path / "run-0001") in failed["text"]) == ("not_writable", True)


def test_a_rank_does_not_take_a_foreign_launchers_place_for_its_own(monkeypatch):
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(("inherited", package_root())))
    run = run_plan(variables={"PYTHONPATH": "site", "X": "1"})
    found = rank_environment(run, Path("/p/plan.json"), "/s")
    assert "RANK" not in found
    assert found["PYTHONPATH"].split(os.pathsep) == [package_root(), "site", "inherited"]
    assert found["X"] == "1"


def test_packages_of_another_revision_are_found_before_all_others(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(("inherited", package_root())))
    run = run_plan(variables={"PYTHONPATH": "site"}, packages=("tree",))
    found = rank_environment(run, Path("/p/plan.json"), "/s")
    assert found["PYTHONPATH"].split(os.pathsep) == ["tree", package_root(), "site", "inherited"]
