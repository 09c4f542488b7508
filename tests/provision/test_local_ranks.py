"""Runs with ranks on this machine, and everything that can happen to them; the ranks are small stand-ins."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest

from pytest_mlhpc import payload
from pytest_mlhpc.batch.plan import PROTOCOL, MetricPattern
from pytest_mlhpc.errors import ProtocolError, RunFailure
from pytest_mlhpc.jobs.spec import JobState
from pytest_mlhpc.provision.guardian import socket_base, socket_prefix
from pytest_mlhpc.results.schema import Measurement, from_json

pytestmark = pytest.mark.servers

RATE = {"rate": MetricPattern("items/s", "higher", r"rate: (\S+)")}

GOOD = """
channel.progress(1, 3, 2.0)
print("hello from rank", channel.rank)
channel.report(a_report())
channel.close()
"""

WAIT = "time.sleep(60)\n"


def test_a_run_says_started_progress_measurement_end(local):
    heard = local.wait(local.ranks(GOOD))
    assert heard.error is None
    assert heard.kinds() == ["started", "progress", "measurement", "end"]
    assert from_json(Measurement, heard.body("measurement")).ranks == 1
    assert heard.body("end")["exit"] == [0]
    assert [state.state for state in heard.states] == [JobState.RUNNING]


def test_each_rank_has_a_log_of_its_own(local):
    handle = local.ranks(GOOD, ranks=2)
    assert local.wait(handle).kinds()[-2:] == ["measurement", "end"]
    logs = [(handle.directory / handle.id / f"rank{n}.log").read_text() for n in (0, 1)]
    assert logs == ["hello from rank 0\n", "hello from rank 1\n"]


def test_a_worker_that_fails_after_reporting_is_a_failure(local):
    heard = local.wait(local.ranks(GOOD + "sys.exit(3)"))
    assert heard.kinds() == ["started", "progress", "failed", "end"]
    outcome, text = heard.failure()
    assert outcome == "worker_exit"
    assert text.startswith("rank 0 ended with exit code 3 after it had reported")
    assert heard.body("end")["exit"] == [3]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_worker_is_named_with_its_signal_and_its_last_lines(local, ranks):
    script = f"""
if channel.rank == {ranks - 1}:
    print("last words")
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""
    heard = local.wait(local.ranks(script, ranks=ranks))
    outcome, text = heard.failure()
    assert outcome == "worker_killed"
    assert text.startswith(f"rank {ranks - 1} was killed by SIGKILL")
    assert text.endswith("last words")
    assert heard.body("end")["exit"][-1] == -signal.SIGKILL


def test_one_rank_that_dies_ends_the_others(local):
    script = """
if channel.rank == 1:
    raise SystemExit("no more")
time.sleep(60)
"""
    outcome, text = local.wait(local.ranks(script, ranks=2)).failure()
    assert outcome == "worker_exit"
    assert text == "rank 1 ended with exit code 1; its last lines:\nno more"


def test_a_rank_that_never_came_is_not_hidden(local):
    script = "if channel.rank == 1: os._exit(0)\n" + GOOD
    outcome, text = local.wait(local.ranks(script, ranks=2)).failure()
    assert outcome == "no_result"
    # Its exit code is the launcher's to collect, who may be sooner than we who only look at it.
    known, unknown = "rank 1 ended with exit code 0 without a report", "these ranks ended without a report: 1"
    assert text.splitlines()[0] in (known, unknown)


def test_a_hanging_run_ends_at_its_time_limit_and_says_how_far_it_was(local):
    heard = local.wait(local.ranks("channel.progress(2, 3, 1.0)\n" + WAIT, time_limit_s=1.5))
    outcome, text = heard.failure()
    assert outcome == "time_limit"
    assert text.startswith("the run did not end within 1.5 s; last seen: rank 0 at step 2 of 3")
    assert heard.body("end")["exit"] == [-signal.SIGTERM]


def test_two_reports_of_one_rank_are_a_duplicate(local):
    outcome, text = local.wait(local.ranks("channel.report(a_report())\n" + GOOD)).failure()
    assert (outcome, text) == ("duplicate_result", "rank 0 reported twice")


def test_a_report_with_nan_is_invalid(local):
    script = "channel.report(a_report(epoch_s=float('nan')))\nchannel.close()"
    outcome, text = local.wait(local.ranks(script)).failure()
    assert outcome == "metric_invalid"
    assert "epoch_s: nan is not a finite number" in text


def test_a_failure_that_a_rank_tells_keeps_its_name(local):
    script = "channel.failed('loss_nan', 'step 3')\nchannel.close()\nsys.exit(1)"
    assert local.wait(local.ranks(script)).failure() == ("loss_nan", "rank 0: step 3")


def test_of_a_batch_that_is_killed_no_socket_is_left(local):
    handle = local.ranks("channel.progress(1, 3, 1.0)\n" + WAIT)
    local.wait(handle, lambda heard: "progress" in heard.kinds())
    (folder,) = Path(socket_base()).glob(f"{socket_prefix(local.session)}*")
    assert [path.name for path in folder.iterdir()] == ["s"]
    os.kill(local.provisioner._running[handle.id].process.pid, signal.SIGKILL)
    assert isinstance(local.wait(handle).error, ProtocolError)
    assert not folder.exists()


def test_a_daemon_of_a_rank_is_ended_with_the_run(local, is_alive, tmp_path):
    script = f"""
daemon = subprocess.Popen(["env", "-i", "setsid", "sleep", "60"])
open({str(tmp_path / "pid")!r}, "w").write(str(daemon.pid))
"""
    assert local.wait(local.ranks(script + GOOD)).kinds()[-2:] == ["measurement", "end"]
    assert not is_alive((tmp_path / "pid").read_text())


def test_another_payload_than_the_controllers_is_a_mismatch_that_names_both(local):
    heard = local.wait(local.ranks(WAIT, sha256="0" * 64))
    outcome, text = heard.failure()
    assert outcome == "protocol_mismatch"
    assert text.startswith(f"the worker has protocol {PROTOCOL} and payload ")
    assert text.endswith(f"we have {PROTOCOL} and {'0' * 64}")


def test_a_batch_that_is_killed_takes_its_ranks_along_and_is_named(local):
    handle = local.ranks(WAIT)
    local.wait(handle, lambda heard: "started" in heard.kinds())
    os.kill(local.provisioner._running[handle.id].process.pid, signal.SIGKILL)
    heard = local.wait(handle)
    assert isinstance(heard.error, ProtocolError)
    assert heard.error.outcome == "channel_broken"
    assert "the batch was killed by SIGKILL" in str(heard.error)


def test_an_interpreter_that_does_not_exist_is_a_launch_failure(local):
    heard = local.wait(local.ranks(GOOD, python="/no/such/python"))
    assert str(heard.error) == "launch_failed: cannot start '/no/such/python': No such file or directory"


def test_a_launcher_that_does_not_exist_is_named(local):
    outcome, text = local.wait(local.ranks(GOOD, launcher="no.such")).failure()
    assert (outcome, text) == ("launch_failed", "launcher 'no.such': No module named 'no'")


def test_cancel_returns_when_nothing_is_left(local, is_alive):
    handle = local.ranks(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nchannel.progress(1, 3, 1.0)\n" + WAIT
    )
    local.wait(handle, lambda heard: "progress" in heard.kinds())
    pid = local.provisioner._running[handle.id].process.pid
    local.provisioner.cancel([handle])
    assert not is_alive(pid)
    local.provisioner.cancel([handle])


def test_a_full_disk_under_a_ranks_log_is_named_with_the_file(local):
    payload.build(local.state)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
        handle = local.ranks("os.write(1, b'x' * 100_000)\n" + WAIT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    outcome, text = local.wait(handle).failure()
    assert outcome == "disk_full"
    assert text.startswith(
        f"cannot write {handle.directory / handle.id / 'rank0.log'}: File too large; free space"
    )


def test_an_interpreter_that_never_comes_to_the_batch_ends_with_the_allocation(local, tmp_path):
    (tmp_path / "stuck").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "stuck").chmod(0o755)
    run = local.run(workload="resnet50", python=str(tmp_path / "stuck"))
    heard = local.wait(local.submit(run, sha256=payload.build(local.state).sha256, time_limit_s=0.3))
    assert isinstance(heard.error, RunFailure)
    assert str(heard.error) == "time_limit: the allocation did not end within 0.3 s"


def test_an_interpreter_that_ends_at_once_is_a_launch_failure_with_its_last_words(local, tmp_path):
    (tmp_path / "broken").write_text("#!/bin/sh\necho libpython.so: not found >&2; exit 127\n")
    (tmp_path / "broken").chmod(0o755)
    run = local.run(workload="resnet50", python=str(tmp_path / "broken"))
    heard = local.wait(local.submit(run, sha256=payload.build(local.state).sha256))
    assert heard.error.outcome == "launch_failed"
    assert str(heard.error).endswith(
        "ended with exit code 127 before its runs had ended; its last lines:\nlibpython.so: not found"
    )


def test_a_payload_that_is_missing_is_named(local):
    heard = local.wait(local.submit(local.run(workload="resnet50"), sha256="f" * 64))
    assert str(heard.error) == f"launch_failed: the payload {local.state}/payload/{'f' * 64}.zip is missing"


def test_a_program_may_run_through_a_batch_too(local, tmp_path):
    package = tmp_path / "theirs"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "launcher.py").write_text(
        "def launch(run, nodes, environment):\n    return list(run.argv), environment\n"
    )
    run = local.run(argv=("echo", "rate: 4"), metrics=RATE, launcher="theirs.launcher")
    heard = local.wait(local.submit(run, sha256=payload.build(local.state).sha256))
    assert heard.kinds() == ["started", "measurement", "end"]
    assert from_json(Measurement, heard.body("measurement")).metric("rate").value == 4.0
