"""Programs started directly on this machine, and everything that can happen to them."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from pytest_mlhpc.batch.plan import MetricPattern
from pytest_mlhpc.errors import ProvisionError
from pytest_mlhpc.jobs.spec import JobState
from pytest_mlhpc.provision.device_lock import DeviceLock
from pytest_mlhpc.results.schema import Measurement, from_json

RATE = {"rate": MetricPattern("items/s", "higher", r"rate: (\S+)")}


def test_a_program_says_started_measurement_end(local):
    heard = local.wait(local.shell("echo rate: 5; echo rate: 7; echo rate: 6"))
    assert heard.kinds() == ["started", "measurement", "end"]
    metric = from_json(Measurement, heard.body("measurement")).metric("rate")
    assert (metric.value, metric.samples, metric.first, metric.last) == (6.0, (5.0, 7.0, 6.0), 5.0, 6.0)
    assert heard.error is None


def test_json_lines_are_metrics_too(local):
    metrics = {"rate": MetricPattern("items/s", "higher")}
    heard = local.wait(local.shell("""echo '{"metric": "rate", "value": 2.5}'""", metrics=metrics))
    assert from_json(Measurement, heard.body("measurement")).metric("rate").value == 2.5


def test_the_output_is_kept_in_a_log(local):
    handle = local.shell("echo rate: 5; echo to stderr >&2")
    local.wait(handle)
    assert (handle.directory / "output.log").read_text() == "rate: 5\nto stderr\n"


def test_a_program_that_fails_after_its_metric_is_a_failure(local):
    heard = local.wait(local.shell("echo rate: 5; exit 3"))
    assert heard.failure() == ("worker_exit", "the program ended with exit code 3; its last lines:\nrate: 5")
    assert heard.body("end")["exit"] == [3]


def test_a_killed_program_is_named_with_its_signal(local):
    heard = local.wait(local.shell("echo rate: 5; kill -9 $$"))
    outcome, text = heard.failure()
    assert outcome == "worker_killed"
    assert text.startswith("the program was killed by SIGKILL (the kernel does that when memory runs out)")
    assert heard.body("end")["exit"] == [-9]


def test_a_program_that_does_not_exist_is_named(local):
    heard = local.wait(local.command("./no-such-bench"))
    outcome, text = heard.failure()
    assert outcome == "command_not_found"
    assert text.startswith("cannot start './no-such-bench': No such file or directory")
    assert heard.ended


def test_a_file_that_is_no_program_is_named(local, tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    outcome, text = local.wait(local.command(str(tmp_path / "notes.txt"))).failure()
    assert (outcome, "Permission denied" in text) == ("command_not_found", True)


def test_a_folder_to_start_in_that_does_not_exist_is_named(local):
    outcome, text = local.wait(local.shell("true", cwd="/no/such")).failure()
    assert outcome == "command_not_found"
    assert text == "the folder '/no/such' to start 'bash' in: No such file or directory"


def test_an_argument_with_nul_is_no_crash(local):
    assert local.wait(local.command("echo", "a\0b")).failure()[0] == "command_not_found"


def test_shell_metacharacters_are_only_text(local, tmp_path):
    handle = local.command("echo", f"rate: 5 $(touch {tmp_path}/made); `id`")
    assert local.wait(handle).kinds() == ["started", "measurement", "end"]
    assert not (tmp_path / "made").exists()


def test_50_mb_of_output_is_capped_and_told(local):
    handle = local.shell("echo rate: 5; head -c 50000000 /dev/zero | tr '\\0' x")
    outcome, text = local.wait(handle).failure()
    assert outcome == "output_limit"
    assert text == "the program printed 50000008 bytes; metrics are searched within 16777216"
    assert (handle.directory / "output.log").stat().st_size < 17_000_000


def test_50_mb_of_output_without_metrics_is_no_failure(local):
    heard = local.wait(local.shell("head -c 50000000 /dev/zero", metrics={}))
    assert heard.kinds() == ["started", "measurement", "end"]


def test_nul_and_invalid_utf8_do_no_harm(local):
    heard = local.wait(local.shell(r"printf '\000\377\376 rate: 5\n\033[31m'"))
    assert from_json(Measurement, heard.body("measurement")).metric("rate").value == 5.0


def test_hostile_last_words_are_made_printable(local):
    _, text = local.wait(local.shell(r"printf '\000\377\033[31mred'; exit 1")).failure()
    assert text.isprintable() or "\n" in text
    assert "\x1b" not in text


def test_a_missing_metric_is_named(local):
    heard = local.wait(local.shell("echo nothing"))
    assert heard.failure() == (
        "metric_missing",
        r"metric rate is not in the output: nothing matches 'rate: (\\S+)'",
    )


def test_a_metric_that_is_nan_is_invalid(local):
    heard = local.wait(local.shell("echo rate: nan"))
    assert heard.failure() == ("metric_invalid", "metric rate is 'nan', which is no finite number")


def test_a_hanging_program_ends_at_its_time_limit_with_its_children(local):
    handle = local.shell("sleep 61 & sleep 62", time_limit_s=0.3)
    assert local.wait(handle).failure() == ("time_limit", "the program did not end within 0.3 s")


def test_a_program_that_ignores_sigterm_is_killed(local, monkeypatch):
    monkeypatch.setattr("pytest_mlhpc.provision.local_process.LocalProcess.grace_s", 0.3)
    heard = local.wait(local.shell("trap '' TERM; while :; do sleep 0.1; done", time_limit_s=0.3))
    assert heard.failure()[0] == "time_limit"
    assert heard.body("end")["exit"] == [-signal.SIGKILL]


def test_a_daemon_is_ended_when_its_program_ends(local, is_alive, tmp_path):
    script = f"""
import os, sys, time
print("rate: 5", flush=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(3): os.close(fd)
        with open({str(tmp_path / "pid")!r}, "w") as file: file.write(str(os.getpid()))
        time.sleep(60)
    os._exit(0)
os.wait()
while not os.path.exists({str(tmp_path / "pid")!r}): time.sleep(0.01)
"""
    heard = local.wait(local.command(sys.executable, "-c", script))
    assert heard.kinds() == ["started", "measurement", "end"]
    assert not is_alive((tmp_path / "pid").read_text())


def test_the_program_knows_its_session_and_run(local):
    metrics = {"rate": MetricPattern("items/s", "higher", r"rate (\d+)")}
    handle = local.shell(
        "echo rate 1 $MLHPC_SESSION $MLHPC_RUN $EXTRA", metrics=metrics, variables={"EXTRA": "more"}
    )
    local.wait(handle)
    assert (handle.directory / "output.log").read_text() == f"rate 1 {local.session} {handle.id} more\n"


def test_cancel_ends_a_program_and_its_children(local, is_alive):
    handle = local.shell("setsid sleep 60 & sleep 60")
    local.wait(handle, lambda heard: "started" in heard.kinds())
    pid = local.provisioner._running[handle.id].process.pid
    local.provisioner.cancel([handle])
    assert not is_alive(pid)
    assert local.provisioner.events([handle], 0) == []


def test_measured_runs_take_turns_and_say_for_whom_they_wait(local):
    first = local.shell("sleep 0.3; echo rate: 1", exclusive=True)
    second = local.shell("echo rate: 2", exclusive=True)
    heard = local.wait(second)
    assert local.heard[first.id].ended
    assert [state.state for state in heard.states] == [JobState.QUEUED, JobState.RUNNING]
    assert heard.states[0].reason == f"waiting for machine: in use by process {os.getpid()}"


def spans(local, *handles) -> list[tuple[int, int]]:
    found = [from_json(Measurement, local.wait(handle).body("measurement")) for handle in handles]
    return [(one.started_ns, one.ended_ns) for one in found]


def test_nothing_runs_beside_a_measured_run_and_all_go_in_order(local):
    handles = [
        local.shell("sleep 0.2; echo rate: 1", exclusive=exclusive)
        for exclusive in (False, False, True, False, False)
    ]
    one, two, measured, four, five = spans(local, *handles)
    assert max(one[0], two[0]) < min(one[1], two[1])  # side by side
    assert max(one[1], two[1]) <= measured[0]
    assert measured[1] <= min(four[0], five[0])


def test_what_is_not_measured_waits_for_another_sessions_measured_run(local, tmp_path):
    other = DeviceLock(tmp_path / "locks")
    assert other.acquire([]) == ""
    handle = local.shell("echo rate: 1")
    heard = local.wait(handle, lambda heard: bool(heard.states))
    assert heard.states[0].state == JobState.QUEUED
    assert heard.messages == []
    other.release()
    assert local.wait(handle).kinds() == ["started", "measurement", "end"]


def test_what_is_not_measured_goes_past_a_run_that_waits_for_its_device(local, tmp_path):
    other = DeviceLock(tmp_path / "locks")
    assert other.acquire(["0"]) == ""
    changes = {"exclusive": True, "device_type": "cuda", "device_ids": ("0",)}
    waiting = [local.shell("echo rate: 1", **changes) for _ in range(2)]
    assert local.wait(local.shell("echo rate: 1")).kinds() == ["started", "measurement", "end"]
    assert not any(local.heard[handle.id].messages for handle in waiting)
    other.release()
    assert local.wait(waiting[1]).kinds() == ["started", "measurement", "end"]


def test_a_waiting_run_can_be_cancelled(local):
    first = local.shell("sleep 0.2; echo rate: 1", exclusive=True)
    second = local.shell("echo rate: 2", exclusive=True)
    local.provisioner.cancel([second])
    assert local.wait(first).kinds() == ["started", "measurement", "end"]
    assert local.heard[second.id].messages == []


def test_wake_interrupts_waiting(local):
    start = time.monotonic()
    threading.Timer(0.1, local.provisioner.wake).start()
    assert local.provisioner.events([], 30.0) == []
    assert time.monotonic() - start < 20


def test_a_full_disk_is_named_with_the_file(local):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handle = local.shell("head -c 300000 /dev/zero; sleep 60")
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        outcome, text = local.wait(handle).failure()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert outcome == "disk_full"
    assert text.startswith(f"cannot write {handle.directory / 'output.log'}: File too large; free space")


def test_a_state_directory_that_cannot_be_written_is_named(local, tmp_path):
    (tmp_path / "file").touch()
    local.folder = tmp_path / "file"
    with pytest.raises(ProvisionError, match=r"disk_full: cannot write .*/file"):
        local.shell("true")


def test_only_we_may_read_a_plan_for_it_may_hold_secrets(local):
    mask = os.umask(0o022)
    try:
        handle = local.shell("echo rate: 1", variables={"TOKEN": "secret"})
    finally:
        os.umask(mask)
    path = handle.directory / "plan.json"
    assert "secret" in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_link_in_the_place_of_a_plan_is_not_followed(local, tmp_path):
    run = local.run(argv=("true",))
    (tmp_path / run.run_id).mkdir()
    (tmp_path / run.run_id / "plan.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ProvisionError, match=r"plan\.json"):
        local.submit(run)
    assert not (tmp_path / "elsewhere").exists()


def test_the_guardian_is_started_again_when_somebody_ended_it(local):
    local.wait(local.shell("echo rate: 1"))
    first = local.provisioner._guardian
    first.kill()
    first.wait()
    local.wait(local.shell("echo rate: 1"))
    assert local.provisioner._guardian.poll() is None
    assert local.provisioner._guardian.pid != first.pid


def test_a_kernel_without_pidfd_is_good_enough(local, monkeypatch):
    monkeypatch.setattr("pytest_mlhpc.provision.local_process._pidfd", lambda pid: -1)
    assert local.wait(local.shell("echo rate: 5")).kinds() == ["started", "measurement", "end"]
    assert local.wait(local.shell("sleep 60", time_limit_s=0.2)).failure()[0] == "time_limit"


def test_48_programs_share_16_slots(local):
    waiting = [local.run(argv=("bash", "-c", "sleep 0.02; echo rate: 1"), metrics=RATE) for _ in range(48)]
    handles = []
    while waiting or handles:
        while waiting and len(handles) < 16:
            handles.append(local.submit(waiting.pop()))
        local.wait(handles[0])
        handles = [handle for handle in handles if not local.heard[handle.id].ended]
    assert all(heard.kinds() == ["started", "measurement", "end"] for heard in local.heard.values())


def test_what_has_ended_gives_back_its_descriptors(local):
    local.wait(local.shell("echo rate: 1"))
    before = len(list(Path("/proc/self/fd").iterdir()))
    for exclusive in (False, True):
        local.wait(local.shell("echo rate: 1", exclusive=exclusive))
    local.provisioner.cancel([local.shell("sleep 60")])
    local.wait(local.command("/no/such/program"))
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_close_ends_everything_and_can_be_repeated(local, is_alive):
    handle = local.shell("setsid sleep 60 & sleep 60")
    pid = local.provisioner._running[handle.id].process.pid
    guardian = local.provisioner._guardian.pid
    local.provisioner.close()
    local.provisioner.close()
    local.provisioner.wake()
    assert not is_alive(pid)
    assert not is_alive(guardian)
