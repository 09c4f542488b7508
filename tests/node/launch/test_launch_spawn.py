"""Ranks of a program on one node, started without MPI and without torch."""

import signal
import subprocess
import sys

import pytest
from launching import run_plan

from pytest_mlhpc.node.launch import spawn


def start(count, *argv):
    words = [sys.executable, "-m", spawn.__name__, str(count), "--", *argv]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def test_each_rank_knows_its_place():
    done = start(3, "sh", "-c", "echo $RANK of $WORLD_SIZE, here $LOCAL_RANK")
    assert sorted(done.stdout.splitlines()) == ["0 of 3, here 0", "1 of 3, here 1", "2 of 3, here 2"]
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("end", "code"), [("exit 7", 7), ("kill -KILL $$", 128 + signal.SIGKILL)], ids=["exit", "signal"]
)
def test_a_rank_that_ends_badly_ends_the_others(end, code):
    assert start(2, "sh", "-c", f"if [ $RANK = 1 ]; then {end}; fi; exec sleep 600").returncode == code


def test_a_program_that_is_missing_is_named():
    done = start(2, "/no/program")
    assert (done.returncode, done.stderr) == (127, "cannot start '/no/program': No such file or directory\n")


def test_several_nodes_are_refused():
    with pytest.raises(ValueError, match="launcher spawn starts ranks on one node, not on 2"):
        spawn.launch(run_plan(ranks=2), ["n1", "n2"], {})
