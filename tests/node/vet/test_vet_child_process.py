"""A process with its owner: heard, killed with its children, and gone when its owner is."""

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

pytestmark = pytest.mark.servers

#: A guard against hangs, in seconds.
HANG_S = 300.0

#: The programs in the child and at its other end.
DATA = Path(__file__).with_name("data")


@pytest.fixture
def begin(tmp_path):
    """Start a process, which is gone at the end of the test."""
    shutil.copy(DATA / "obedient.py.txt", tmp_path / "obedient.py")
    started = []

    def start() -> ChildProcess:
        started.append(ChildProcess("obedient", environ={**os.environ, "PYTHONPATH": str(tmp_path)}))
        return started[-1]

    yield start
    for child in started:
        child.close()
        child.wait(HANG_S)


@pytest.fixture
def ask(begin):
    """Have a new process do something; return its process and its answers, once there are some or it failed."""

    def start(what: str) -> tuple[ChildProcess, list[dict]]:
        child = begin()
        child.send({"do": what})
        deadline, answers = time.monotonic() + HANG_S, []
        while not answers and not child.trouble and child.ended is None:
            assert time.monotonic() < deadline, "it printed nothing"
            select.select([child.answers, child.printed], [], [], 1.0)
            answers = child.read()
        return child, answers

    return start


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + HANG_S
    with suppress(OSError):  # there is no such process any more
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline, f"process {pid} lives on"
            time.sleep(0.02)


def test_its_own_children_are_killed_with_it(ask):
    child, (answer,) = ask("fork")
    child.kill()
    wait_until_gone(answer["pid"])
    assert child.wait(HANG_S)
    assert child.ended == -signal.SIGKILL


def test_it_dies_with_its_owner_and_so_do_its_children(ask, tmp_path):
    argv = [sys.executable, DATA / "owner.py.txt", tmp_path]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as owner:
        child, grandchild = (int(word) for word in owner.stdout.readline().split())
        owner.kill()
    wait_until_gone(child)
    wait_until_gone(grandchild)


def test_its_last_lines_are_reported_without_what_terminals_obey(ask):
    child, _ = ask("die")
    assert child.wait(HANG_S)
    assert child.how() == "ended with exit code 5: my last\N{REPLACEMENT CHARACTER}[31m words"


@pytest.mark.parametrize(
    ("what", "words"),
    [("garbage", "it answered something that is no message"), ("flood", "a line that is too long")],
)
def test_what_is_no_answer_is_trouble(ask, what, words):
    child, _ = ask(what)
    assert words in child.trouble


@pytest.mark.parametrize(
    ("what", "limit_s", "answer", "hung", "words"),
    [
        ("babble", HANG_S, {"done": True}, False, ""),
        ("hang", 0.5, None, True, "did not end within 0.5 s"),
        ("die", HANG_S, None, False, "its process ended with exit code 5: my last"),
        ("garbage", HANG_S, None, False, "it answered something that is no message"),
    ],
)
def test_one_answer_is_waited_for_until_the_child_has_failed(begin, what, limit_s, answer, *, hung, words):
    child = begin()
    child.expect(1, what, limit_s)
    child.send({"do": what})
    assert child.answer() == (answer, hung)
    assert (words in child.failed()[0]) is True


def test_a_module_in_the_working_directory_takes_nobodys_place(ask, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/json.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path / "elsewhere")
    _, (answer,) = ask("path")
    assert {answer["cwd"], ""}.isdisjoint(answer["path"])


def test_what_does_not_vanish_is_left_behind_and_named(ask, monkeypatch):
    child, _ = ask("path")
    monkeypatch.setattr("pytest_mlhpc.node.child_process.VANISH_S", 0.1)
    with monkeypatch.context() as patch:
        # nothing here can make a process that SIGKILL does not end
        patch.setattr(ChildProcess, "close", lambda _: None)
        assert child.end() == f"; not even SIGKILL ends it: process {child.pid} is left behind"
