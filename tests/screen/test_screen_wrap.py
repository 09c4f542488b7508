"""A screened program behaves as if nobody looked: streams, signals, exit codes, daemons, its own sitecustomize."""

import contextlib
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from cli_calls import refusals
from polling import ended, poll
from screen_samples import process, samples

from pytest_mlhpc import cli
from pytest_mlhpc.node import processes
from pytest_mlhpc.node.telemetry.readings import NoDevices
from pytest_mlhpc.screen import run as screen_run
from pytest_mlhpc.screen import usage

pytestmark = pytest.mark.servers  # each screens a program

MLHPC = [sys.executable, "-m", "pytest_mlhpc.cli", "screen"]


def run(argv, **more):
    options = {"capture_output": True, "text": True, "timeout": 600, "stdin": subprocess.DEVNULL, **more}
    return subprocess.run(argv, check=False, **options)


def screen(*words, **more):
    """Run the command to its end."""
    return run([*MLHPC, *words], **more)


def python(code):
    return ["--", sys.executable, "-c", code]


#: Lets a program run on until screening has said what it saw: then it removes the folder of its hook.
UNTIL_REPORTED = """
import os, time
while os.path.exists(os.environ["MLHPC_SCREEN"]): time.sleep(0.05)
"""


def reported(before, after, *words, options=(), **more):
    """Screen a program that runs this code *before* screening says what it saw, and that code *after*."""
    code = before + UNTIL_REPORTED + after
    return screen("--seconds", "1", *options, *python(code), *words, **more)


@contextlib.contextmanager
def started(*words, **more):
    """Start the command with a user's reaction to signals, and wait for the program's first line."""
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
    argv = ["env", "--default-signal=INT,HUP,TERM", *MLHPC, *words]
    with subprocess.Popen(argv, text=True, **options) as command:
        try:
            command.first = command.stdout.readline().strip()
            assert command.first, command.communicate()
            yield command
        finally:
            command.kill()


def test_streams_and_exit_code_are_the_programs():
    code = "import sys; print(sys.stdin.read().upper(), end=''); print('odd', file=sys.stderr); sys.exit(7)"
    done = screen(*python(code), input="text\n", stdin=None)
    assert (done.returncode, done.stdout) == (7, "TEXT\n")
    assert done.stderr.startswith("odd\n")
    assert "mlhpc screen: " in done.stderr


def test_a_program_that_ends_at_once_is_let_go_and_leaves_nothing(tmp_path):
    done = screen("--", "true", env={**os.environ, "TMPDIR": str(tmp_path)})
    assert (done.returncode, done.stdout) == (0, "")
    too_soon = r"true ended too soon to say what limits it \((0 samples|1 sample)\)|screened true .*"
    assert re.fullmatch(rf"mlhpc screen: ({too_soon})\n", done.stderr, re.DOTALL)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("program", "code", "text"),
    [
        ("/no/such/program", 127, "there is no program '/no/such/program'"),
        ("/etc/passwd", 126, "'/etc/passwd' cannot be run: Permission denied"),
    ],
)
def test_a_program_that_is_missing_or_cannot_be_run_is_as_in_a_shell(mlhpc, program, code, text):
    assert mlhpc("screen", "--", program, code=code).err == f"mlhpc screen: {text}\n"


@refusals(__file__)
def test_what_cannot_be_done_is_refused_before_anything_starts(refused, command, why):
    assert why in refused(command)


#: Calls the command as a user who may not do everything.
AS_NOBODY = """
import os, sys
from pytest_mlhpc import cli
from pytest_mlhpc.node import processes
from pytest_mlhpc.screen import run, usage
if os.getuid() == 0: os.setresuid(65534, 65534, 65534)
sys.exit(cli.main(["screen", *sys.argv[1:]]))
"""


@pytest.mark.parametrize(("mode", "why"), [(0o555, "{} may not be written to"), (0o600, "Permission denied")])
def test_a_page_that_may_not_be_written_is_refused_before_anything_starts(mode, why):
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are for their user alone
        folder = Path(name)
        folder.chmod(mode)
        done = run(
            [sys.executable, "-c", AS_NOBODY, "--output", folder / "a.html", "--", "touch", folder / "begun"]
        )
        folder.chmod(0o700)
        assert list(folder.iterdir()) == []
    assert done.returncode == cli.USAGE, done.stderr
    assert f"--output {name}/a.html: {why.format(name)}\n" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_reaches_the_program_which_decides_what_follows(number):
    # It blocks the signal and waits for it: a handler would not end a sleep that begins just after the signal.
    code = f"import signal, sys; n = [{int(number)}]; signal.pthread_sigmask(signal.SIG_BLOCK, n); print('ready', flush=True); signal.sigwait(n); sys.exit(5)"
    with started(*python(code)) as command:
        command.send_signal(number)
        _, error = command.communicate()
    assert command.returncode == 5, error


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_program_that_a_signal_ends_takes_screening_along(number):
    usual = "" if number == signal.SIGKILL else f"signal.signal({int(number)}, signal.SIG_DFL); "
    done = screen(*python(f"import os, signal; {usual}os.kill(os.getpid(), {int(number)})"))
    assert done.returncode == -number
    assert f"mlhpc screen: the program was ended by {number.name}\n" in done.stderr


def test_a_program_does_not_outlive_screening_that_is_killed():
    with started(*python("import os, time; print(os.getpid(), flush=True); time.sleep(600)")) as command:
        command.kill()
        command.communicate()
    assert command.returncode == -signal.SIGKILL
    poll(lambda: ended(int(command.first)))


#: Counts interrupts until screening has passed on a signal that it got behind them.
COUNTING = """
import os, signal, sys, time
got = []
for number in (signal.SIGINT, signal.SIGUSR1): signal.signal(number, lambda number, _frame: got.append(number))
print("ready", flush=True)
while not got: time.sleep(0.05)
os.kill(os.getppid(), signal.SIGUSR1)
while signal.SIGUSR1 not in got: time.sleep(0.05)
open(sys.argv[1], "w").write(str(got.count(signal.SIGINT)))
"""


def test_a_terminals_interrupt_comes_once(tmp_path):
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp("env", ["env", "--default-signal=INT", *MLHPC, *python(COUNTING), tmp_path / "count"])  # noqa: S606
    printed = b""
    while b"ready" not in printed:
        printed += os.read(terminal, 4096)
    os.write(terminal, b"\x03")
    with contextlib.suppress(OSError):  # the other side is closed
        while os.read(terminal, 4096):
            pass
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert (tmp_path / "count").read_text() == "1"
    assert os.waitstatus_to_exitcode(status) == 0


#: Starts a daemon as daemons do, prints its number, and ends.
DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    pid = os.fork()
    if pid: print(pid, flush=True); os._exit(0)
    for number in (0, 1, 2): os.close(number)
    time.sleep(600); os._exit(0)
os.wait()
"""


def test_a_daemon_that_it_forks_is_not_waited_for_and_lives_on():
    done = screen(*python(DAEMON))
    daemon = int(done.stdout)
    assert not ended(daemon)
    os.kill(daemon, signal.SIGKILL)
    assert done.returncode == 0


def test_after_its_time_the_screening_is_reported_and_the_program_runs_on():
    done = reported("print('begun')", "print('end'); raise SystemExit(3)")
    assert (done.returncode, done.stdout) == (3, "begun\nend\n")
    lines = done.stderr.splitlines()
    assert lines[0].startswith("mlhpc screen: screened ")
    assert "devices (" in lines[-1]
    assert "steps (no process took an optimizer's step in Python with torch)" in lines[-1]


def test_with_stop_the_program_and_what_it_started_end_then_and_that_is_no_failure(tmp_path):
    pids = tmp_path / "pids"
    shell = f"sleep 600 & echo $! >> {pids}; (trap '' TERM; sleep 600 & echo $! >> {pids}; wait); true"
    done = screen("--seconds", "1", "--stop", "--", "sh", "-c", shell)
    assert done.returncode == 0, done.stderr
    assert "screened sh -c sleep 600 & echo" in done.stderr
    for pid in pids.read_text().split():
        poll(lambda pid=pid: ended(int(pid)))


def test_processes_that_come_and_go_all_the_time_are_survived():
    code = "import subprocess" + UNTIL_REPORTED.replace("time.sleep(0.05)", "subprocess.run(['true'])")
    done = screen("--seconds", "1", "--interval", "0.05", *python(code))
    assert (done.returncode, "screened" in done.stderr) == (0, True)


def test_a_sitecustomize_of_the_programs_own_is_run_as_ever(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('mine')\n")
    code = "import sitecustomize; print(sitecustomize.__file__)"
    done = screen(*python(code), env={**os.environ, "PYTHONPATH": str(tmp_path)})
    # Once in screening's own Python, once in the program's.
    assert done.stdout == f"mine\nmine\n{tmp_path}/sitecustomize.py\n"


def test_a_page_that_cannot_be_written_does_not_change_the_exit_code(tmp_path):
    folder = tmp_path / "pages"
    folder.mkdir()
    before = "import os, sys; os.rmdir(sys.argv[1]); open(sys.argv[1], 'x')"
    done = reported(before, "raise SystemExit(9)", folder, options=["--output", folder / "a.html"])
    assert done.returncode == 9
    assert f"mlhpc screen: {folder}/a.html: cannot be written: File exists" in done.stderr


def test_a_torch_without_hooks_after_steps_is_said_to_have_none(tmp_path):
    optim = tmp_path / "torch/optim"
    optim.mkdir(parents=True)
    (tmp_path / "torch/__init__.py").touch()
    (optim / "__init__.py").write_text("from torch.optim import optimizer")
    (optim / "optimizer.py").touch()
    done = reported("import torch.optim", "", env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0
    assert "steps (this torch calls no hooks after them; torch 2.1 and newer do)" in done.stderr


def test_what_a_killed_screening_had_to_leave_the_next_one_removes_and_nothing_else(tmp_path):
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    words = python("import time; print('ready', flush=True); time.sleep(600)")
    with started(*words, env=env) as killed, started(*words, env=env) as other:
        before = set(tmp_path.iterdir())
        killed.kill()
        killed.wait()
        assert len(before) == 2
        assert set(tmp_path.iterdir()) == before
        assert screen("--", "true", env=env).returncode == 0
        (left,) = tmp_path.iterdir()
        assert left in before
        other.terminate()
        other.wait()
    assert list(tmp_path.iterdir()) == []


def test_a_closed_or_unread_standard_error_does_not_end_the_program(tmp_path):
    code = f"import sys{UNTIL_REPORTED}open(sys.argv[1], 'a').write('end'); raise SystemExit(5)"
    line = shlex.join([*MLHPC, "--seconds", "1", *python(code), str(tmp_path / "written")])
    for where in ("2>&-", "2>&1 | true; exit ${PIPESTATUS[0]}"):
        assert run(["bash", "-c", f"{line} {where}"], capture_output=False).returncode == 5
    assert (tmp_path / "written").read_text() == "endend"


def test_a_temporary_folder_that_cannot_be_had_is_said_before_the_program_starts(
    tmp_path, monkeypatch, mlhpc
):
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    err = mlhpc("screen", "--", "touch", tmp_path / "begun", code=cli.INTERNAL).err
    way_out = "make room there, or name another one in TMPDIR\n"
    assert re.search(f"not_writable: screening has no folder for what .*Not a directory.*; {way_out}$", err)
    assert not (tmp_path / "begun").exists()


def test_an_hour_of_samples_is_stored_and_of_more_every_other_one():
    looks = samples(lambda second: [process(10, second)], seconds=11)
    rest = usage.halved(looks)
    assert [one.time_s for one in rest] == [one.time_s for one in looks[::2]]
    assert sum(one.cost_s for one in rest) == pytest.approx(sum(one.cost_s for one in looks))
    assert len(usage.halved(looks[:10])) == 5
    before, after = (usage.nodes(every)[0] for every in (looks, rest))
    assert after.cost == pytest.approx(before.cost)


def test_the_end_of_a_program_is_noticed_though_a_thread_of_a_library_took_its_signal():
    over = threading.Event()
    thread = threading.Thread(target=over.wait)  # begun before signals are blocked, so it may take them
    thread.start()
    wrapped = screen_run.ScreenedProgram(["true"], os.environ, NoDevices("none"), 0.05)
    try:
        poll(lambda: processes.stat_fields(wrapped._process.pid)[0] == "Z")
        assert wrapped.wait() == screen_run.Ended(0)
    finally:
        wrapped.close()
        over.set()
        thread.join()


def test_a_program_that_is_looked_at_for_a_day_is_looked_at_less_often(monkeypatch):
    monkeypatch.setattr(screen_run, "MOST_LOOKS", 8)
    wrapped = screen_run.ScreenedProgram(["sleep", "600"], os.environ, NoDevices("none"), 0.05)
    try:
        while wrapped._sampler.pause_s < 0.1:
            assert wrapped.watch(0.2) is None
        assert wrapped.stop().stopped
    finally:
        wrapped.close()
    assert 2 <= len(wrapped.samples) < 8
