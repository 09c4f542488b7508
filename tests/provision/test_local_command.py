"""Programs started directly on this machine, and everything that can happen to them."""

import os
import signal
import threading
from pathlib import Path

import pytest
from local_allocations import HANG_S, RATE, files_of_at_most, is_alive

from pytest_mlhpc.errors import ProvisionError
from pytest_mlhpc.jobs.spec import JobState
from pytest_mlhpc.node.protocol.plan import MetricPattern
from pytest_mlhpc.provision.device_lock import DeviceLock
from pytest_mlhpc.provision.payload import make_directory

WELL = ["started", "measurement", "end"]
JSON_RATE = {"rate": MetricPattern("items/s", "higher")}
SLEEPERS = "setsid sleep 600 & sleep 600"


@pytest.mark.parametrize(
    ("script", "metrics", "samples"),
    [
        pytest.param("echo rate: 5; echo rate: 7; echo rate: 6", RATE, (5.0, 7.0, 6.0), id="three lines"),
        pytest.param("""echo '{"metric": "rate", "value": 2.5}'""", JSON_RATE, (2.5,), id="a line of JSON"),
        pytest.param(r"printf '\000\377\376 rate: 5\n\033[31m'", RATE, (5.0,), id="NUL and invalid UTF-8 do no harm"),
    ],
)  # fmt: skip
def test_a_program_reports_started_measurement_end(local, script, metrics, samples):
    report = local.wait(local.shell(script, metrics=metrics))
    assert (report.kinds(), report.error) == (WELL, None)
    metric = report.measurement.metric("rate")
    assert (metric.samples, metric.first, metric.last) == (samples, samples[0], samples[-1])
    assert metric.value == sorted(samples)[len(samples) // 2]


@pytest.mark.parametrize(
    ("script", "plan", "failure", "code"),
    [
        pytest.param(
            "echo rate: 5; exit 3", {}, ("worker_exit", "the program ended with exit code 3; its last lines:\nrate: 5"), 3,
            id="it fails after its metric",
        ),
        pytest.param(
            "echo nothing", {}, ("metric_missing", "the program's output has no metric rate: nothing matches rate: (\\S+); its last lines:\nnothing"), 0,
            id="a metric is missing",
        ),
        pytest.param(
            "echo rate: nan", {}, ("metric_invalid", "metric rate is 'nan', which is no finite number; its last lines:\nrate: nan"), 0,
            id="a metric is NaN",
        ),
        pytest.param(
            "true", {"cwd": "/no/such"},
            ("command_not_found", "the folder '/no/such' to start 'bash' in: No such file or directory"), 127,
            id="its folder does not exist",
        ),
        pytest.param(
            "sleep 611 & sleep 612", {"time_limit_s": 0.2}, ("time_limit", "the program did not end within 0.2 s"),
            -signal.SIGTERM, id="it hangs",
        ),
        pytest.param(
            "echo rate: 5; head -c 50000000 /dev/zero", {},
            ("output_limit", "the program printed 50000008 bytes; metrics are searched within 16777216"), 0,
            id="it prints too much",
        ),
    ],
)  # fmt: skip
def test_a_failure_has_its_name_and_text(local, script, plan, failure, code):
    report = local.wait(local.shell(script, **plan))
    assert (report.failure, report.exit) == (failure, [code])


@pytest.mark.parametrize(
    ("argv", "outcome", "text", "code"),
    [
        (
            ("bash", "-c", "echo rate: 5; kill -9 $$"), "worker_killed",
            "the program was killed by SIGKILL (the kernel does that when memory runs out)", -9,
        ),
        (("./no-such-bench",), "command_not_found", "cannot start './no-such-bench': No such file or directory", 127),
        ((__file__,), "command_not_found", f"cannot start {__file__!r}: Permission denied", 127),
        (("echo", "a\0b"), "command_not_found", "cannot start 'echo': embedded null byte", 127),
    ],
    ids=["killed", "no such program", "no program", "an argument with NUL"],
)  # fmt: skip
def test_a_failure_to_start_or_by_a_signal_begins_with_its_cause(local, argv, outcome, text, code):
    report = local.wait(local.command(*argv))
    assert (report.failure[0], report.exit, report.ended) == (outcome, [code], True)
    assert report.failure[1].startswith(text)


def test_the_log_of_a_program_that_prints_too_much_is_capped(local):
    handle = local.shell("head -c 50000000 /dev/zero", metrics={})
    assert local.wait(handle).kinds() == WELL, "without metrics it is no failure"
    assert (handle.directory / "output.log").stat().st_size < 17_000_000


def test_shell_metacharacters_are_only_text(local, tmp_path):
    handle = local.command("echo", f"rate: 5 $(touch {tmp_path}/made); `id`")
    assert local.wait(handle).kinds() == WELL
    assert not (tmp_path / "made").exists()


def test_hostile_last_words_are_made_printable(local):
    _, text = local.wait(local.shell(r"printf '\000\377\033[31mred'; exit 1")).failure
    assert text.replace("\n", "").isprintable()


def test_a_program_that_ignores_sigterm_is_killed(local, monkeypatch):
    monkeypatch.setattr("pytest_mlhpc.provision.local_process.LocalProcess.grace_s", 0.2)
    handle = local.shell("trap '' TERM; echo ready; while :; do sleep 0.1; done")
    log = handle.directory / "output.log"
    local.wait(handle, lambda _: "ready" in log.read_text())
    local.process(handle).deadline = 0.0
    report = local.wait(handle)
    assert (report.failure[0], report.exit) == ("time_limit", [-signal.SIGKILL])


DAEMON = "exec <&- >&- 2>&-; echo $$ >new; mv new pid; exec sleep 600"


def test_a_daemon_is_ended_when_its_program_ends(local, tmp_path):
    start = f"echo rate: 5; setsid --fork bash -c '{DAEMON}'; until [ -e pid ]; do sleep 0.02; done"
    report = local.wait(local.shell(start, cwd=str(tmp_path)))
    assert report.kinds() == WELL
    assert not is_alive((tmp_path / "pid").read_text())


def test_the_program_knows_its_session_and_run_and_all_that_it_prints_is_kept_in_a_log(local):
    script = "echo $MLHPC_SESSION $MLHPC_RUN $EXTRA; echo to stderr >&2"
    handle = local.shell(script, metrics={}, variables={"EXTRA": "more"})
    local.wait(handle)
    log = (handle.directory / "output.log").read_text()
    assert log == f"{local.session} {handle.id} more\nto stderr\n"


def test_cancel_ends_a_program_and_its_children(local):
    handle = local.shell(SLEEPERS)
    local.wait_for(handle, "started")
    pid = local.process(handle).pid
    local.provisioner.cancel([handle])
    assert not is_alive(pid)
    assert local.provisioner.events([handle], 0) == []


# --- turns


@pytest.fixture
def gated(local, tmp_path):
    """Start a program that ends once the file `go` is there."""
    return lambda **plan: local.shell(
        f"until [ -e {tmp_path}/go ]; do sleep 0.02; done; echo rate: 1", **plan
    )


def test_measured_runs_take_turns_and_say_for_whom_they_wait(local, gated, tmp_path):
    first, second = gated(exclusive=True), local.shell("echo rate: 2", exclusive=True)
    local.wait(second, lambda report: report.states)
    (tmp_path / "go").touch()
    states = local.wait(second).states
    assert local.reports[first.id].ended
    assert [state.state for state in states] == [JobState.QUEUED, JobState.RUNNING]
    assert states[0].reason == "waiting for the machine: in use by this session"


def test_nothing_runs_beside_a_measured_run_and_all_go_in_order(local, tmp_path):
    side = f"{tmp_path}/up.side"

    def beside(number):
        """Start a program that ends once *number* of its kind have begun."""
        all_there = f"[ $(ls {side}.* | wc -l) -ge {number} ]"
        return local.shell(f"touch {side}.$MLHPC_RUN; until {all_there}; do sleep 0.02; done; echo rate: 1")

    handles = [beside(2), beside(2), local.shell("echo rate: 1", exclusive=True), beside(4), beside(4)]
    one, two, alone, three, four = [local.wait(handle).measurement for handle in handles]
    assert max(one.ended_ns, two.ended_ns) <= alone.started_ns
    assert alone.ended_ns <= min(three.started_ns, four.started_ns)


@pytest.fixture
def other_session(tmp_path):
    lock = DeviceLock(tmp_path / "locks")
    yield lock
    lock.release()


def test_what_is_not_measured_waits_for_another_sessions_measured_run(local, other_session):
    assert other_session.acquire([]) == ""
    handle = local.shell("echo rate: 1")
    report = local.wait(handle, lambda report: report.states)
    assert (report.states[0].state, report.messages) == (JobState.QUEUED, [])
    other_session.release()
    assert local.wait(handle).kinds() == WELL


def test_what_is_not_measured_goes_past_a_run_that_waits_for_its_device(local, other_session):
    assert other_session.acquire(["0"]) == ""
    device = {"exclusive": True, "device_type": "cuda", "device_ids": ("0",)}
    waiting = [local.shell("echo rate: 1", **device) for _ in range(2)]
    assert local.wait(local.shell("echo rate: 1")).kinds() == WELL
    assert not any(local.reports[handle.id].messages for handle in waiting)
    other_session.release()
    assert local.wait(waiting[1]).kinds() == WELL


def test_a_waiting_run_can_be_cancelled(local, gated, tmp_path):
    first, second = gated(exclusive=True), local.shell("echo rate: 2", exclusive=True)
    local.provisioner.cancel([second])
    (tmp_path / "go").touch()
    assert (local.wait(first).kinds(), local.reports[second.id].messages) == (WELL, [])


def test_wake_interrupts_waiting(local):
    waiting = threading.Thread(target=local.provisioner.events, args=([], 10 * HANG_S), daemon=True)
    waiting.start()
    local.provisioner.wake()
    waiting.join(HANG_S)
    assert not waiting.is_alive()


# --- what the machine lacks


def test_a_full_disk_is_named_with_the_file(local):
    handle = local.shell("head -c 300000 /dev/zero; sleep 600")
    with files_of_at_most(100_000):
        outcome, text = local.wait(handle).failure
    assert outcome == "disk_full"
    assert text.startswith(f"cannot write {handle.directory / 'output.log'}: File too large; free space")


def test_a_state_directory_that_cannot_be_written_is_named(local, tmp_path):
    (tmp_path / "file").touch()
    local.folder = tmp_path / "file"
    with pytest.raises(ProvisionError, match=r"not_writable: cannot write .*/file"):
        local.shell("true")


def test_only_we_may_read_a_plan_for_it_may_hold_secrets(local):
    mask = os.umask(0o022)
    try:
        path = local.shell("echo rate: 1", variables={"TOKEN": "secret"}).directory / "plan.json"
    finally:
        os.umask(mask)
    assert ("secret" in path.read_text(), path.stat().st_mode & 0o777) == (True, 0o600)


@pytest.mark.parametrize(("root", "runs"), [(0o2775, 0o2775), (0o3775, 0o3775), (0o700, 0o755)])
def test_below_a_folder_that_a_group_shares_only_the_folder_of_all_sessions_is_the_groups(
    tmp_path, root, runs
):
    state = tmp_path / "state"
    state.mkdir()
    state.chmod(root)
    mask = os.umask(0o022)
    try:
        make_directory(state / "runs/session/allocation", "run")
    finally:
        os.umask(mask)
    folders = [state / "runs", *(state / "runs").rglob("*")]
    assert [folder.stat().st_mode & 0o7777 for folder in folders] == [runs, 0o700, 0o700, 0o700]


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
    second = local.provisioner._guardian
    assert (second.poll(), second.pid == first.pid) == (None, False)


def test_a_kernel_without_pidfd_is_good_enough(local, monkeypatch):
    monkeypatch.setattr("pytest_mlhpc.provision.local_process._pidfd", lambda pid: -1)
    assert local.wait(local.shell("echo rate: 5")).kinds() == WELL
    assert local.wait(local.shell("sleep 600", time_limit_s=0.2)).failure[0] == "time_limit"


def test_what_has_ended_gives_back_its_descriptors(local):
    local.wait(local.shell("echo rate: 1"))
    before = len(list(Path("/proc/self/fd").iterdir()))
    for exclusive in (False, True):
        local.wait(local.shell("echo rate: 1", exclusive=exclusive))
    local.provisioner.cancel([local.shell("sleep 600")])
    local.wait(local.command("/no/such/program"))
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_close_ends_everything_and_can_be_repeated(local):
    pids = [local.process(local.shell(SLEEPERS)).pid, local.provisioner._guardian.pid]
    local.provisioner.close()
    local.provisioner.close()
    local.provisioner.wake()
    assert not any(map(is_alive, pids))
