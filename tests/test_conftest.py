"""The proof that a test left no process looks at each test that starts any, in whatever way."""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest


def spawned() -> None:
    os.waitpid(os.posix_spawn(sys.executable, [sys.executable, "-c", ""], os.environ), 0)


def forked() -> None:
    process = multiprocessing.get_context("fork").Process(target=int)
    process.start()
    process.join()


WAYS = {
    "subprocess": lambda: subprocess.run(["true"], check=True),
    "spawn": spawned,
    "fork": forked,
}


@pytest.mark.parametrize("way", WAYS)
def test_whoever_starts_a_process_is_counted(way, beginnings):
    before = beginnings.count
    WAYS[way]()
    assert beginnings.count > before


def test_who_starts_none_is_not_counted(beginnings, tmp_path):
    before = beginnings.count
    Path(tmp_path / "file").write_text("a test that only writes")
    assert beginnings.count == before


def test_a_process_that_lives_on_is_found_by_the_environment_that_it_was_given(processes):
    with subprocess.Popen(["sleep", "600"]) as program:  # Popen returns while the program is being executed
        assert processes() == ["sleep 600 "]
        program.kill()
    assert processes() == []


def test_no_process_is_overlooked_while_it_executes_its_program(processes):
    overlooked = 0
    for _ in range(50):
        with subprocess.Popen(["sleep", "600"]) as program:
            overlooked += processes() != ["sleep 600 "]
            program.kill()
    assert overlooked == 0
