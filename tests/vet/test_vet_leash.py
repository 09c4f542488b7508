"""A process on its leash: heard, killed with its children, and gone when its owner is."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pytest_mlhpc.vet.held import Held
from pytest_mlhpc.vet.leash import Leash

pytestmark = pytest.mark.servers

PROGRAM = """
import json, os, subprocess, sys, time
out = os.fdopen(int(sys.argv[sys.argv.index("--answers") + 1]), "w", buffering=1)
print("to standard output", flush=True)
for line in sys.stdin:
    what = json.loads(line)["do"]
    if what == "fork":
        child = subprocess.Popen(["sleep", "1000"])
        out.write(json.dumps({"pid": child.pid}) + "\\n")
    elif what == "path":
        out.write(json.dumps({"path": sys.path, "cwd": os.getcwd()}) + "\\n")
    elif what == "garbage":
        out.write("no json\\n")
    elif what == "flood":
        while True:
            out.write("x" * 65536)
    elif what == "die":
        sys.stderr.write("my last\\x1b[31m words\\n")
        sys.exit(5)
"""


@pytest.fixture
def start(tmp_path):
    (tmp_path / "on_a_leash.py").write_text(PROGRAM)
    started = []

    def begin() -> Leash:
        started.append(Leash("on_a_leash", environ={**os.environ, "PYTHONPATH": str(tmp_path)}))
        return started[-1]

    yield begin
    for leash in started:
        leash.close()
        leash.wait(5.0)


def answer(leash: Leash, limit_s: float = 20.0) -> list[dict]:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if select.select([leash.answers, leash.words], [], [], 1.0)[0]:
            leash.listen()
            found = leash.read()
            if found or leash.trouble or leash.ended is not None:
                return found
    raise AssertionError("it says nothing")


def gone(pid: int, limit_s: float = 10.0) -> bool:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def test_its_own_children_are_killed_with_it(start):
    leash = start()
    leash.send({"do": "fork"})
    (said,) = answer(leash)
    leash.kill()
    assert gone(said["pid"])
    assert leash.wait(5.0)
    assert leash.ended == -signal.SIGKILL


def test_it_dies_with_its_owner_and_so_do_its_children(start, tmp_path):
    start()  # writes the program
    code = (
        "import os, sys, time, select\n"
        "from pytest_mlhpc.vet.leash import Leash\n"
        f"leash = Leash('on_a_leash', environ={{**os.environ, 'PYTHONPATH': {str(tmp_path)!r}}})\n"
        "leash.send({'do': 'fork'})\n"
        "select.select([leash.answers], [], [])\n"
        "print(leash.pid, leash.read()[0]['pid'], flush=True)\n"
        "time.sleep(1000)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        pids = [int(word) for word in owner.stdout.readline().split()]
        owner.kill()
    assert len(pids) == 2
    assert all(gone(pid) for pid in pids)


def test_its_last_words_are_told_without_what_terminals_obey(start):
    leash = start()
    leash.send({"do": "die"})
    answer(leash)
    assert leash.wait(5.0)
    assert leash.how() == "ended with exit code 5: my last\N{REPLACEMENT CHARACTER}[31m words"


@pytest.mark.parametrize(
    ("what", "words"),
    [("garbage", "it answered something that is no message"), ("flood", "a line that is too long")],
)
def test_what_is_no_answer_is_trouble(start, what, words):
    leash = start()
    leash.send({"do": what})
    while not leash.trouble:
        answer(leash)
    assert words in leash.trouble


def test_a_module_in_the_working_directory_takes_nobodys_place(start, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/json.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path / "elsewhere")
    leash = start()
    leash.send({"do": "path"})
    (said,) = answer(leash)
    assert said["cwd"] not in said["path"]
    assert "" not in said["path"]


def test_what_does_not_vanish_is_left_behind_and_named(start, monkeypatch):
    leash = start()
    held = Held(leash)
    monkeypatch.setattr("pytest_mlhpc.vet.held.VANISH_S", 0.1)
    with monkeypatch.context() as patch:
        patch.setattr(
            Leash, "close", lambda _: None
        )  # nothing here can make a process that SIGKILL does not end
        assert held.let_go() == f"; not even SIGKILL ends it: process {leash.pid} is left behind"
