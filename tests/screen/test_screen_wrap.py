"""A screened program behaves as if nobody looked: streams, signals, exit codes, daemons, its own sitecustomize."""

import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from screen_samples import process, samples

from pytest_mlhpc import cli
from pytest_mlhpc.screen import courses, kept, wrap
from pytest_mlhpc.screen.node.devices import NoDevices

pytestmark = pytest.mark.servers  # each screens a program

MLHPC = [sys.executable, "-m", "pytest_mlhpc.cli", "screen"]

#: Limits, no measures: in seconds.
LIMIT_S = 300.0


def screen(*words, **more):
    """Run the command to its end."""
    return subprocess.run(
        [*MLHPC, *words], capture_output=True, text=True, timeout=LIMIT_S, check=False, **{"stdin": subprocess.DEVNULL, **more}
    )  # fmt: skip


def python(code):
    return ["--", sys.executable, "-c", code]


def started(*words):
    """Start the command with a user's reaction to signals, and wait for the program's first line."""
    process = subprocess.Popen(
        ["env", "--default-signal=INT,HUP,TERM", *MLHPC, *words],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    line = process.stdout.readline()
    assert line, process.communicate()
    return process, line.strip()


def gone(pid):
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_streams_and_exit_code_are_the_programs():
    code = "import sys; print(sys.stdin.read().upper(), end=''); print('odd', file=sys.stderr); sys.exit(7)"
    done = screen(*python(code), input="text\n", stdin=None)
    assert (done.returncode, done.stdout) == (7, "TEXT\n")
    assert done.stderr.startswith("odd\n")
    assert "mlhpc screen: " in done.stderr


def test_a_program_that_ends_at_once_is_let_go():
    done = screen("--", "true")
    assert (done.returncode, done.stdout) == (0, "")
    assert re.fullmatch(
        r"mlhpc screen: (true ended too soon to say what limits it \([01] looks\)|screened true .*)\n",
        done.stderr,
        re.DOTALL,
    )


def test_a_missing_program_is_as_in_a_shell():
    done = screen("--", "/no/such/program")
    assert (done.returncode, done.stderr) == (127, "mlhpc screen: there is no program '/no/such/program'\n")


def test_a_program_that_cannot_be_run_is_as_in_a_shell(tmp_path):
    (tmp_path / "text").write_text("text")
    done = screen("--", str(tmp_path / "text"))
    assert (done.returncode, done.stderr) == (
        126,
        f"mlhpc screen: '{tmp_path}/text' cannot be run: Permission denied\n",
    )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "say what to look at, one of: -- PROGRAM [ARGUMENT ...], --job ID, --pod NAME"),
        (["--"], "say what to look at"),
        (["--job", "7", "--", "true"], "say what to look at"),
        (["--job", "7", "--pod", "a"], "say what to look at"),
        (["--job", "", "--", "true"], "say what to look at"),
        (["--job", ""], "--job '' is no id of a Slurm job"),
        (["--pod", ""], "--pod '' is no name of Kubernetes"),
        (["--stop", "--job", "7"], "--stop is for a program that screening starts: a job or a pod goes on"),
        (["--namespace", "ml", "--", "true"], "--namespace and --container are of --pod"),
        (["--seconds", "-1", "--", "true"], "--seconds -1 is not between 1 and 86400"),
        (["--seconds", "1e300", "--", "true"], "--seconds 1e+300 is not between 1 and 86400"),
        (["--seconds", "inf", "--", "true"], "--seconds inf is not between 1 and 86400"),
        (["--seconds", "0", "--", "true"], "--seconds 0 is not between 1 and 86400"),
        (["--seconds", "nan", "--", "true"], "--seconds nan is not between"),
        (["--seconds", "soon", "--", "true"], "invalid float value: 'soon'"),
        (["--interval", "0", "--", "true"], "--interval 0 is not between 0.05 and 60"),
        (["--profile", "3", "--", "true"], "--profile '3' is neither `off` nor FIRST:STEPS, as 10:3"),
        (["--html", "/no/folder/a.html", "--", "true"], "there is no folder /no/folder"),
        (["--html", "/tmp", "--", "true"], "--html /tmp is a folder"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_starts(words, text, capsys):
    try:
        code = cli.main(["screen", *words])
    except SystemExit as error:  # argparse's own
        code = error.code
    assert code == cli.USAGE
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mode", "text"), [(0o555, "{} may not be written to"), (0o600, "Permission denied")]
)
def test_a_page_that_may_not_be_written_is_refused_before_anything_starts(mode, text):
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are for their user alone
        Path(name).chmod(mode)
        code = (
            "import os, sys\n"
            "from pytest_mlhpc import cli\n"
            "from pytest_mlhpc.screen import kept, screen_cli, wrap\n"
            "if os.getuid() == 0: os.setresuid(65534, 65534, 65534)\n"
            f"sys.exit(cli.main(['screen', '--html', {f'{name}/a.html'!r}, '--', 'touch', {f'{name}/begun'!r}]))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        Path(name).chmod(0o700)
        assert list(Path(name).iterdir()) == []
    assert done.returncode == cli.USAGE, done.stderr
    assert f"--html {name}/a.html: {text.format(name)}\n" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_reaches_the_program_which_decides_what_follows(number):
    code = (
        "import signal, sys, time\n"
        f"signal.signal({int(number)}, lambda *_: sys.exit(5))\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(0.1)"
    )
    process, _ = started(*python(code))
    process.send_signal(number)
    _, error = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 5, error


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_program_that_a_signal_ends_takes_screening_along(number):
    code = (
        f"import os, signal; signal.signal({int(number)}, signal.SIG_DFL) if {int(number)} != 9 else 0\n"
        f"os.kill(os.getpid(), {int(number)})"
    )
    done = screen(*python(code))
    assert done.returncode == -number
    assert f"mlhpc screen: the program was ended by {number.name}\n" in done.stderr


def test_a_program_does_not_outlive_screening_that_is_killed():
    process, pid = started(*python("import os, time; print(os.getpid(), flush=True); time.sleep(600)"))
    process.kill()
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == -signal.SIGKILL
    assert gone(int(pid))


def test_a_terminals_interrupt_comes_once(tmp_path):
    code = (
        "import signal, sys, time\n"
        "got = []\n"
        "signal.signal(signal.SIGINT, lambda *_: got.append(1))\n"
        "print('ready', flush=True)\n"
        "while not got: time.sleep(0.05)\n"
        "time.sleep(1.5)\n"
        f"open({str(tmp_path / 'count')!r}, 'w').write(str(len(got)))"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp("env", ["env", "--default-signal=INT", *MLHPC, *python(code)])  # noqa: S606
    said = b""
    while b"ready" not in said:
        said += os.read(terminal, 4096)
    os.write(terminal, b"\x03")
    while True:
        try:
            if not os.read(terminal, 4096):
                break
        except OSError:  # the other side is closed
            break
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert (tmp_path / "count").read_text() == "1"
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_daemon_that_it_forks_is_not_waited_for_and_lives_on():
    code = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    pid = os.fork()\n"
        "    if pid: print(pid, flush=True); os._exit(0)\n"
        "    for number in (0, 1, 2): os.close(number)\n"
        "    time.sleep(600); os._exit(0)\n"
        "os.wait()"
    )
    done = screen(*python(code))
    daemon = int(done.stdout)
    assert done.returncode == 0
    assert not gone_now(daemon)
    os.kill(daemon, signal.SIGKILL)


def gone_now(pid):
    return not Path(f"/proc/{pid}").exists()


def test_after_the_time_it_is_told_and_the_program_runs_on(tmp_path):
    process, _ = started("--seconds", "1", *python(
        f"import pathlib, time; print('begun', flush=True)\nwhile not pathlib.Path({str(tmp_path / 'go')!r}).exists(): time.sleep(0.1)\n"
        "print('end'); raise SystemExit(3)"
    ))  # fmt: skip
    told = []
    while not told or "not seen" not in told[-1]:
        told.append(process.stderr.readline())
        assert told[-1], told
    (tmp_path / "go").touch()
    output, _ = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, output) == (3, "end\n")
    assert told[0].startswith("mlhpc screen: screened ")
    assert "devices (" in told[-1]
    assert "steps (no process took an optimizer's step in Python with torch)" in told[-1]


def test_with_stop_the_program_ends_then_and_that_is_no_failure():
    done = screen("--seconds", "1", "--stop", "--", "sleep", "600")
    assert done.returncode == 0, done.stderr
    assert "screened sleep 600 for" in done.stderr  # the fixture of all tests sees that nothing is left


def test_processes_that_come_and_go_all_the_time_are_survived():
    code = "import subprocess, time\nend = time.monotonic() + 2\nwhile time.monotonic() < end: subprocess.run(['true'])"
    done = screen("--interval", "0.05", *python(code))
    assert done.returncode == 0
    assert "screened" in done.stderr


def test_a_sitecustomize_of_the_programs_own_is_run_as_ever(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('mine')\n")
    done = screen(
        *python("import sitecustomize; print(sitecustomize.__file__)"),
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    # Once in screening's own Python, once in the program's.
    assert done.stdout == f"mine\nmine\n{tmp_path}/sitecustomize.py\n"


def test_a_page_that_cannot_be_written_does_not_change_the_exit_code(tmp_path):
    folder = tmp_path / "pages"
    folder.mkdir()
    done = screen(
        "--html",
        str(folder / "a.html"),
        *python(
            f"import os, time; os.rmdir({str(folder)!r}); open({str(folder)!r}, 'x'); time.sleep(4); exit(9)"
        ),
    )
    assert done.returncode == 9
    assert f"mlhpc screen: {folder}/a.html: cannot be written: File exists" in done.stderr


OLD_TORCH = {
    "torch/__init__.py": "",
    "torch/optim/__init__.py": "from torch.optim import optimizer",
    "torch/optim/optimizer.py": "",
}


def test_a_torch_without_hooks_after_steps_is_said_to_have_none(tmp_path):
    for name, text in OLD_TORCH.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    done = screen(
        *python("import torch.optim, time; time.sleep(1.5)"), env={**os.environ, "PYTHONPATH": str(tmp_path)}
    )
    assert done.returncode == 0
    assert "steps (this torch calls no hooks after them; torch 2.1 and newer do)" in done.stderr


def test_nothing_is_left_in_the_temporary_folder(tmp_path):
    done = screen("--", "true", env={**os.environ, "TMPDIR": str(tmp_path)})
    assert done.returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_screening_had_to_leave_the_next_one_removes_and_nothing_else(tmp_path):
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    words = python("import time; print('ready', flush=True); time.sleep(600)")
    killed, other = (
        subprocess.Popen([*MLHPC, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env) for _ in range(2)
    )  # fmt: skip
    with killed, other:
        try:
            assert killed.stdout.readline() == other.stdout.readline() == b"ready\n"
            before = set(tmp_path.iterdir())
            killed.kill()
            killed.wait()
            assert len(before) == 2
            assert set(tmp_path.iterdir()) == before
            assert screen("--", "true", env=env).returncode == 0
            (left,) = tmp_path.iterdir()
            assert left in before
        finally:
            other.terminate()
    assert list(tmp_path.iterdir()) == []


def test_who_closes_standard_error_or_looks_away_does_not_end_the_program(tmp_path):
    said = tmp_path / "said"
    code = f"import time; time.sleep(3); open({str(said)!r}, 'a').write('end'); raise SystemExit(5)"
    line = shlex.join([*MLHPC, "--seconds", "1", *python(code)])
    for where in ("2>&-", "2>&1 | true; exit ${PIPESTATUS[0]}"):
        done = subprocess.run(["bash", "-c", f"{line} {where}"], timeout=LIMIT_S, check=False, stdin=subprocess.DEVNULL)  # fmt: skip
        assert done.returncode == 5
    assert said.read_text() == "endend"


def test_with_stop_what_the_program_started_ends_too(tmp_path):
    pids = tmp_path / "pids"
    shell = f"sleep 600 & echo $! >> {pids}; (trap '' TERM; sleep 600 & echo $! >> {pids}; wait); true"
    done = screen("--seconds", "1", "--stop", "--", "sh", "-c", shell)
    assert done.returncode == 0, done.stderr
    assert [gone(int(pid)) for pid in pids.read_text().split()] == [True, True]


def test_a_temporary_folder_that_cannot_be_had_is_said_before_the_program_starts(tmp_path):
    (tmp_path / "file").touch()
    code = (
        "import sys, tempfile; from pytest_mlhpc import cli\n"
        f"tempfile.tempdir = {str(tmp_path / 'file')!r}\n"
        f"sys.exit(cli.main(['screen', '--', 'touch', {str(tmp_path / 'begun')!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == cli.INTERNAL
    assert "disk_full: screening has no folder for what the program tells: " in done.stderr
    assert "Not a directory" in done.stderr
    assert done.stderr.endswith("; make room there, or name another one in TMPDIR\n")
    assert not (tmp_path / "begun").exists()


def test_an_hour_of_looks_is_kept_and_of_more_every_other_one():
    looks = samples(lambda second: [process(10, second)], seconds=11)
    rest = kept.halved(looks)
    assert [one.time_s for one in rest] == [one.time_s for one in looks[::2]]
    assert sum(one.cost_s for one in rest) == pytest.approx(sum(one.cost_s for one in looks))
    assert len(kept.halved(looks[:10])) == 5
    before, after = (courses.nodes(every)[0] for every in (looks, rest))
    assert after.cost == pytest.approx(before.cost)


def test_a_program_that_is_looked_at_for_a_day_is_looked_at_less_often(monkeypatch):
    monkeypatch.setattr(wrap, "MOST_LOOKS", 8)
    wrapped = wrap.Wrapped(["sleep", "600"], os.environ, NoDevices("none"), 0.05)
    try:
        assert wrapped.watch(2.0) is None
        assert wrapped.stop().stopped
    finally:
        wrapped.close()
    assert 2 <= len(wrapped.samples) < 8
    assert wrapped._sampler.pause_s >= 0.1
