"""Runs with ranks on this machine, and everything that can happen to them; the ranks are small stand-ins."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
from local_allocations import RATE, files_of_at_most, is_alive

from pytest_mlhpc.errors import ProtocolError
from pytest_mlhpc.jobs.spec import JobState
from pytest_mlhpc.node.protocol.plan import PROTOCOL
from pytest_mlhpc.provision.guardian import socket_base, socket_prefix

pytestmark = pytest.mark.servers

GOOD = """
channel.progress(1, 3, 2.0)
print("hello from rank", channel.rank)
channel.report(a_report())
channel.close()
"""

WAIT = "time.sleep(600)\n"

KILLED = """
if channel.rank == int(os.environ.get("WORLD_SIZE", "1")) - 1:
    print("last words")
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""

KNOCKED_AT = """
import socket
with socket.socket(socket.AF_UNIX) as stranger:
    stranger.connect(os.environ["MLHPC_CHANNEL"])
    stranger.sendall(b'{"run": "knocked at", "nonce": "guessed", "rank": 0, "purpose": "messages"}\\n')
    while stranger.recv(4096): pass
"""

DAEMON = """
daemon = subprocess.Popen(["env", "-i", "setsid", "sleep", "600"])
open("daemon.pid", "w").write(str(daemon.pid))
"""

#: Runs of one allocation, one after the other: their scripts and what else their plans say.
RUNS = {
    "one": (GOOD, {}),
    "two": (GOOD, {"ranks": 2}),
    "fails after reporting": (GOOD + "sys.exit(3)", {}),
    "one is killed": (KILLED, {}),
    "second of two is killed": (KILLED, {"ranks": 2}),
    "one of two dies": ("if channel.rank == 1: raise SystemExit('no more')\n" + WAIT, {"ranks": 2}),
    "one of two leaves": ("if channel.rank == 1: os._exit(0)\n" + GOOD, {"ranks": 2}),
    "reports twice": ("channel.report(a_report())\n" + GOOD, {}),
    "reports NaN": ("channel.report(a_report(epoch_s=float('nan')))\nchannel.close()", {}),
    "names its failure": ("channel.failed('loss_nan', 'step 3')\nchannel.close()\nsys.exit(1)", {}),
    "knocked at": (KNOCKED_AT + GOOD, {}),
    "knocked at and fails": (KNOCKED_AT + "sys.exit(3)", {}),
    "daemon": (DAEMON + GOOD, {}),
    "no launcher": (GOOD, {"launcher": "no.such"}),
    "program": (
        "",
        {"workload": "command", "argv": ("echo", "rate: 4"), "metrics": RATE, "launcher": "stand_in.program_launcher"},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def allocation(module_local):
    """The allocation of all these runs: its directory, and what it reported."""
    runs = [module_local.rank_run(script, run_id=name, **plan) for name, (script, plan) in RUNS.items()]
    handle = module_local.batch(*runs, name=module_local.session)
    return handle.directory, module_local.wait(handle)


@pytest.fixture
def report_of(allocation):
    """Return what was reported of one of these runs."""
    return allocation[1].of


def test_an_allocation_ends_without_error_whatever_its_runs_come_to(allocation):
    assert allocation[1].error is None
    assert [state.state for state in allocation[1].states] == [JobState.RUNNING]


def test_a_run_reports_started_progress_measurement_end(report_of):
    report = report_of("one")
    assert report.kinds() == ["started", "progress", "measurement", "end"]
    assert (report.measurement.ranks, report.exit) == (1, [0])


def test_each_rank_has_a_log_of_its_own(allocation):
    directory, report = allocation
    logs = [(directory / "two" / f"rank{n}.log").read_text() for n in (0, 1)]
    assert logs == ["hello from rank 0\n", "hello from rank 1\n"]
    assert report.of("two").kinds()[-2:] == ["measurement", "end"]


def test_a_worker_that_fails_after_reporting_has_reported_nothing(report_of):
    assert report_of("fails after reporting").kinds() == ["started", "progress", "failed", "end"]


@pytest.mark.parametrize(
    ("run", "outcome", "text", "code"),
    [
        ("fails after reporting", "worker_exit", "rank 0 ended with exit code 3 after it had reported.*", 3),
        ("one is killed", "worker_killed", "rank 0 was killed by SIGKILL.*last words", -signal.SIGKILL),
        (
            "second of two is killed",
            "worker_killed",
            "rank 1 was killed by SIGKILL.*last words",
            -signal.SIGKILL,
        ),
        ("one of two dies", "worker_exit", "rank 1 ended with exit code 1; its last lines:\nno more", None),
        # Its exit code is the launcher's to collect, who may be sooner than we who only look at it.
        (
            "one of two leaves",
            "no_result",
            "(rank 1 ended with exit code 0 without a report|these ranks ended without a report: 1)(\n.*)?",
            None,
        ),
        ("reports twice", "duplicate_result", "rank 0 reported twice", None),
        ("reports NaN", "metric_invalid", ".*epoch_s: nan is not a finite number.*", None),
        ("names its failure", "loss_nan", "rank 0: step 3", None),
        ("no launcher", "launch_failed", "launcher 'no.such': No module named 'no'", None),
    ],
)
def test_a_failure_has_its_name_text_and_exit_code(report_of, run, outcome, text, code):
    report = report_of(run)
    assert report.failure[0] == outcome
    assert re.fullmatch(text, report.failure[1], re.DOTALL)
    assert code is None or report.exit[-1] == code


def test_who_does_not_know_the_secret_changes_nothing_and_is_told_of(allocation, report_of):
    assert report_of("knocked at").kinds() == ["started", "progress", "measurement", "end"]
    text = "connections that did not prove to be of this run and were dropped: 1"
    assert f"run knocked at: {text}" in (allocation[0] / "batch.log").read_text()
    assert report_of("knocked at and fails").failure == (
        "worker_exit",
        f"rank 0 ended with exit code 3; {text}",
    )


def test_what_the_ranks_of_a_run_prove_to_know_is_in_its_plan_alone(allocation):
    (directory, report), plan = allocation, json.loads((allocation[0] / "plan.json").read_text())
    secrets = {run["secret"] for run in plan["runs"]}
    printed = [path for path in directory.rglob("*") if path.is_file() and path.name != "plan.json"]
    assert len(secrets) == len(RUNS)
    assert [path for path in printed if any(one.encode() in path.read_bytes() for one in secrets)] == []
    assert not any(one in str(report.messages) for one in secrets)


def test_a_daemon_of_a_rank_is_ended_with_the_run(allocation):
    assert allocation[1].of("daemon").kinds()[-2:] == ["measurement", "end"]
    assert not is_alive((allocation[0] / "daemon/daemon.pid").read_text())


def test_a_program_may_run_through_a_batch_too(report_of):
    report = report_of("program")
    assert report.kinds() == ["started", "measurement", "end"]
    assert report.measurement.metric("rate").value == 4.0


# --- allocations of their own


#: Lets hours pass in every Python below a folder once there is a file in it.
LATE = """
import os, time
clock = time.monotonic
time.monotonic = lambda: clock() + (1e6 if os.path.exists({late!r}) else 0.0)
"""


def test_a_hanging_run_ends_at_its_time_limit_and_says_how_far_it_was(local, tmp_path):
    late = tmp_path / "late"
    (tmp_path / "sitecustomize.py").write_text(LATE.format(late=str(late)))
    handle = local.ranks("while True:\n    channel.progress(2, 3, 1.0)\n    time.sleep(0.1)\n")
    local.wait_for(handle, "progress")
    late.touch()
    report = local.wait(handle)
    text = "the run did not end within 600 s; last seen: rank 0 at step 2 of 3"
    assert (report.failure[0], report.failure[1][: len(text)]) == ("time_limit", text)
    assert report.exit == [-signal.SIGTERM]


def test_a_batch_that_is_killed_is_named_and_leaves_neither_ranks_nor_socket(local):
    handle = local.ranks("channel.progress(1, 3, 1.0)\n" + WAIT)
    local.wait_for(handle, "progress")
    (folder,) = Path(socket_base()).glob(f"{socket_prefix(local.session)}*")
    assert [path.name for path in folder.iterdir()] == ["s"]
    os.kill(local.process(handle).pid, signal.SIGKILL)
    error = local.wait(handle).error
    assert (type(error), error.outcome) == (ProtocolError, "channel_broken")
    assert "the batch was killed by SIGKILL" in str(error)
    assert not folder.exists()


def test_another_payload_than_the_controllers_is_a_mismatch_that_names_both(local):
    run, ours = local.rank_run(WAIT), "0" * 64
    sent = local.payload()
    sent.with_name(f"{ours}.zip").write_bytes(sent.read_bytes())
    outcome, text = local.wait(local.submit(run, sha256=ours)).failure
    assert outcome == "protocol_mismatch"
    assert text.startswith(f"the worker has protocol {PROTOCOL} and payload {sent.stem}")
    assert text.endswith(f"we have {PROTOCOL} and {ours}")


def test_cancel_returns_when_nothing_is_left(local):
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nchannel.progress(1, 3, 1.0)\n"
    handle = local.ranks(ignore + WAIT)
    local.wait_for(handle, "progress")
    pid = local.process(handle).pid
    local.provisioner.cancel([handle])
    assert not is_alive(pid)
    local.provisioner.cancel([handle])


def test_a_full_disk_under_a_ranks_log_is_named_with_the_file(local):
    run = local.rank_run("os.write(1, b'x' * 100_000)\n" + WAIT)
    local.payload()
    with files_of_at_most(50_000):
        handle = local.batch(run)
    text = f"cannot write {handle.directory / handle.id / 'rank0.log'}: File too large; free space"
    failure = local.wait(handle).failure
    assert (failure[0], failure[1][: len(text)]) == ("disk_full", text)


@pytest.mark.parametrize(
    ("script", "limit_s", "text"),
    [
        pytest.param(
            "exec sleep 600",
            0.3,
            "time_limit: the allocation did not end within 0.3 s",
            id="never comes to the batch",
        ),
        pytest.param(
            "echo libpython.so: not found >&2; exit 127",
            1200.0,
            "launch_failed: .* ended with exit code 127 before its runs had ended; its last lines:\nlibpython.so: not found",
            id="ends at once",
        ),
        pytest.param(
            "",
            1200.0,
            "launch_failed: cannot start '/no/such/python': No such file or directory",
            id="does not exist",
        ),
    ],
)
def test_an_interpreter_that_starts_no_batch_is_named(local, script, limit_s, text):
    python = local.interpreter(f"#!/bin/sh\n{script}\n") if script else "/no/such/python"
    error = local.wait(local.batch(local.rank_run("", python=python), time_limit_s=limit_s)).error
    assert re.fullmatch(text, str(error))


@pytest.mark.parametrize("whose", ["payload", "plan"])
def test_what_others_could_have_changed_is_not_started(local, whose):
    payload, ran = local.payload(), local.folder / "ran"
    waits_for = local.batch(local.rank_run("import time; time.sleep(600)", exclusive=True))
    handle = local.submit(local.rank_run(f"open({str(ran)!r}, 'w')", exclusive=True), sha256=payload.stem)
    changed = payload if whose == "payload" else handle.directory / "plan.json"
    changed.chmod(0o666)
    local.provisioner.cancel([waits_for])
    error = local.wait(handle).error
    assert str(error).startswith(f"unsafe_directory: {changed}: everybody may change it (mode 0666)")
    assert not ran.exists()


def test_a_payload_that_is_missing_is_named(local):
    error = local.wait(local.submit(local.rank_run(GOOD), sha256="f" * 64)).error
    assert str(error) == f"launch_failed: the payload {local.state}/payload/{'f' * 64}.zip is missing"
