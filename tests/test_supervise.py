"""The supervisor above a run of tests: nothing that was started below it outlives it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

SUPERVISE = [sys.executable, str(Path(__file__).with_name("supervise.py"))]
#: Longest wait for anything on a busy machine, in seconds.
GUARD_S = 300.0

#: Starts a program that no group, session or parent connects with the test, as a daemon of a server does.
LEAVES_A_DAEMON = """
import subprocess, pathlib

def test_it():
    subprocess.run(["setsid", "--fork", "sh", "-c", "echo $$ > daemon; exec sleep 7000"], check=True)
    while not pathlib.Path("daemon").exists() or not pathlib.Path("daemon").read_text():
        pass
    assert RESULT
"""


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def await_that(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + GUARD_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def supervise(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SUPERVISE, *words], cwd=folder, capture_output=True, text=True, timeout=GUARD_S, check=False
    )


@pytest.mark.parametrize(("result", "tests"), [("False", "1 failed"), ("True", "1 passed")])
def test_a_daemon_that_a_test_leaves_is_ended_and_fails_the_run(tmp_path, result, tests):
    (tmp_path / "test_it.py").write_text(LEAVES_A_DAEMON.replace("RESULT", result))
    done = supervise(tmp_path, "--grace", "0", "--", sys.executable, "-m", "pytest", "-p", "no:cacheprovider")
    assert tests in done.stdout
    assert "left running, and killed: sleep 7000" in done.stdout
    assert done.returncode == 1
    assert not is_alive(int((tmp_path / "daemon").read_text()))


def test_a_clean_run_keeps_its_exit_code_and_says_what_it_cost(tmp_path):
    done = supervise(tmp_path, "--", "sh", "-c", "echo out; exit 5")
    first, last = done.stdout.splitlines()
    assert (first, done.returncode) == ("out", 5)
    assert last.split()[1:4] == ["CPU", "seconds", "in"]


def test_what_ends_by_itself_within_the_grace_is_no_failure(tmp_path):
    done = supervise(tmp_path, "--", "setsid", "--fork", "sh", "-c", "while [ ! -e go ]; do touch go; done")
    assert done.returncode == 0
    assert "left running" not in done.stdout


def test_an_orphan_that_ends_is_collected_while_the_command_runs(tmp_path):
    program = (
        "setsid --fork sh -c 'echo $$ > pid.part; mv pid.part pid'; "
        "while [ ! -e pid ]; do :; done; while [ -e /proc/$(cat pid) ]; do :; done"
    )
    assert supervise(tmp_path, "--", "sh", "-c", program).returncode == 0


def test_a_command_past_the_limit_is_killed_with_all_below_it(tmp_path):
    program = "setsid --fork sh -c 'echo $$ > daemon; exec sleep 7000'; sleep 7000"
    done = supervise(tmp_path, "--quiet", "--grace", "0", "--limit", "3", "--", "sh", "-c", program)
    assert (done.returncode, done.stdout) == (124, "")
    pid = (tmp_path / "daemon").read_text() if (tmp_path / "daemon").exists() else ""
    assert not pid or not is_alive(int(pid))


def test_the_exit_code_of_a_command_that_a_signal_ended_names_the_signal(tmp_path):
    assert supervise(tmp_path, "--", "sh", "-c", "kill -TERM $$").returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_to_the_supervisor_reaches_the_command(tmp_path, number):
    # It blocks the signal and waits for it: a handler would not end a sleep that begins just after the signal.
    program = f"import signal, sys\nsignal.pthread_sigmask(signal.SIG_BLOCK, [{number:d}])\nopen('up', 'w')\nsignal.sigwait([{number:d}])\nsys.exit(7)"
    words = [*SUPERVISE, "--quiet", "--", sys.executable, "-c", program]
    with subprocess.Popen(words, cwd=tmp_path, stdin=subprocess.DEVNULL) as process:
        await_that((tmp_path / "up").exists)
        process.send_signal(number)
        assert process.wait(GUARD_S) == 7


def test_a_supervisor_whose_parent_is_killed_ends_the_command(tmp_path):
    program = (
        "import os, time\nopen('pid', 'w').write(str(os.getpid()))\nos.rename('pid', 'up')\ntime.sleep(7000)"
    )
    words = [*map(str, SUPERVISE), "--quiet", "--", sys.executable, "-c", program]
    parent = f"import subprocess\nsubprocess.run({words!r}, check=False)"
    with subprocess.Popen([sys.executable, "-c", parent], cwd=tmp_path) as process:
        await_that((tmp_path / "up").exists)
        process.kill()
    await_that(lambda: not is_alive(int((tmp_path / "up").read_text())))


def test_a_command_whose_supervisor_is_killed_is_interrupted(tmp_path):
    program = (
        "import os, time\nopen('pid', 'w').write(str(os.getpid()))\n"
        "try:\n    os.rename('pid', 'up')\n    while True: time.sleep(0.1)\nfinally:\n    open('cleaned', 'w')"
    )
    with subprocess.Popen(
        [*SUPERVISE, "--quiet", "--", sys.executable, "-c", program], cwd=tmp_path, stderr=subprocess.DEVNULL
    ) as process:
        await_that((tmp_path / "up").exists)
        process.kill()
    await_that((tmp_path / "cleaned").exists)
    pid = int((tmp_path / "up").read_text())
    await_that(lambda: not is_alive(pid))
    assert pid != os.getpid()
