"""A process on its leash: heard, killed with its children, and gone when its owner is."""

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from pytest_mlhpc.node.child_process import ChildProcess
from pytest_mlhpc.node.vet.workers import RunningCommand

pytestmark = pytest.mark.servers

#: A guard against hangs, in seconds.
HANG_S = 300.0

#: The programs on the leash and at its other end.
DATA = Path(__file__).with_name("data")


@pytest.fixture
def ask(tmp_path):
    """Have a new process do something; return its leash and its answers, once there are some or it failed."""
    shutil.copy(DATA / "on_a_leash.py.txt", tmp_path / "on_a_leash.py")
    started = []

    def start(what: str) -> tuple[ChildProcess, list[dict]]:
        leash = ChildProcess("on_a_leash", environ={**os.environ, "PYTHONPATH": str(tmp_path)})
        started.append(leash)
        leash.send({"do": what})
        deadline, answers = time.monotonic() + HANG_S, []
        while not answers and not leash.trouble and leash.ended is None:
            assert time.monotonic() < deadline, "it printed nothing"
            select.select([leash.answers, leash.words], [], [], 1.0)
            leash.listen()
            answers = leash.read()
        return leash, answers

    yield start
    for leash in started:
        leash.close()
        leash.wait(HANG_S)


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + HANG_S
    with suppress(OSError):  # there is no such process any more
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline, f"process {pid} lives on"
            time.sleep(0.02)


def test_its_own_children_are_killed_with_it(ask):
    leash, (answer,) = ask("fork")
    leash.kill()
    wait_until_gone(answer["pid"])
    assert leash.wait(HANG_S)
    assert leash.ended == -signal.SIGKILL


def test_it_dies_with_its_owner_and_so_do_its_children(ask, tmp_path):
    argv = [sys.executable, DATA / "owner.py.txt", tmp_path]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as owner:
        leash, child = (int(word) for word in owner.stdout.readline().split())
        owner.kill()
    wait_until_gone(leash)
    wait_until_gone(child)


def test_its_last_words_are_told_without_what_terminals_obey(ask):
    leash, _ = ask("die")
    assert leash.wait(HANG_S)
    assert leash.how() == "ended with exit code 5: my last\N{REPLACEMENT CHARACTER}[31m words"


@pytest.mark.parametrize(
    ("what", "words"),
    [("garbage", "it answered something that is no message"), ("flood", "a line that is too long")],
)
def test_what_is_no_answer_is_trouble(ask, what, words):
    leash, _ = ask(what)
    assert words in leash.trouble


def test_a_module_in_the_working_directory_takes_nobodys_place(ask, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/json.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path / "elsewhere")
    _, (answer,) = ask("path")
    assert {answer["cwd"], ""}.isdisjoint(answer["path"])


def test_what_does_not_vanish_is_left_behind_and_named(ask, monkeypatch):
    leash, _ = ask("path")
    held = RunningCommand(leash)
    monkeypatch.setattr("pytest_mlhpc.node.vet.workers.VANISH_S", 0.1)
    with monkeypatch.context() as patch:
        # nothing here can make a process that SIGKILL does not end
        patch.setattr(ChildProcess, "close", lambda _: None)
        assert held.let_go() == f"; not even SIGKILL ends it: process {leash.pid} is left behind"
