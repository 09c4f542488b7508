"""A program with a limit: its end, what it leaves, and what holds its pipes."""

import os
import signal
import subprocess
import sys

import pytest
from polling import LIMIT_S, ended, poll

from pytest_mlhpc.node import processes
from pytest_mlhpc.node.processes import run_to_end

FOREVER = "import time; time.sleep(600)"
#: A child in a session of its own, which inherits the pipes.
ESCAPED = (
    "import subprocess, sys\n"
    f"child = subprocess.Popen([sys.executable, '-c', {FOREVER!r}], start_new_session=True)\n"
    "print(child.pid, file=sys.stderr, flush=True)\n"
)


def test_its_output_and_exit_code_are_returned():
    code = "import sys; print(sys.stdin.read()); sys.stderr.write('why'); sys.exit(3)"
    done = run_to_end([sys.executable, "-c", code], 120.0, given=b"what")
    assert (done.returncode, done.stdout, done.stderr) == (3, b"what\n", b"why")


def test_without_input_its_standard_input_is_empty():
    assert run_to_end(["/bin/cat"], 120.0).stdout == b""


def test_a_program_past_its_limit_is_killed_with_its_children_and_its_output_is_returned(
    tmp_path, limited_once_there_is, monkeypatch
):
    monkeypatch.setattr(processes, "DRAIN_S", LIMIT_S)
    limited_once_there_is(tmp_path / "child")
    script = (
        f"echo working >&2; sleep 600 & echo $! > {tmp_path}/pid; mv {tmp_path}/pid {tmp_path}/child; wait"
    )
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        run_to_end(["/bin/sh", "-c", script], 0.2)
    assert caught.value.stderr == b"working\n"
    poll(
        lambda: ended((tmp_path / "child").read_text().strip())
    )  # its pipes are closed before it is a zombie


def test_a_child_that_left_the_group_is_not_waited_for(monkeypatch, tmp_path, limited_once_there_is):
    monkeypatch.setattr(processes, "DRAIN_S", 0.2)
    limited_once_there_is(tmp_path / "child")
    code = f"{ESCAPED}import os; open('pid', 'w').write(str(child.pid)); os.rename('pid', 'child'); {FOREVER}"
    with pytest.raises(subprocess.TimeoutExpired):
        run_to_end([sys.executable, "-c", code], 0.2, cwd=tmp_path)
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


def test_one_that_cannot_be_started_is_an_error():
    with pytest.raises(FileNotFoundError):
        run_to_end(["/no-such-program"], 120.0)
