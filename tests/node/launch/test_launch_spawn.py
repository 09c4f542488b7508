"""Ranks of a program on one node, started without MPI and without torch."""

import signal
import subprocess
import sys

import pytest
from launching import run_plan

from pytest_mlhpc.node import spawn
from pytest_mlhpc.node.launch import spawned


def start(count, *argv):
    words = [sys.executable, "-m", spawn.__name__, str(count), "--", *argv]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def test_each_rank_knows_its_place():
    done = start(3, "sh", "-c", "echo $RANK of $WORLD_SIZE, here $LOCAL_RANK")
    lines = ["0: 0 of 3, here 0", "1: 1 of 3, here 1", "2: 2 of 3, here 2"]
    assert sorted(done.stdout.splitlines()) == lines
    assert (done.returncode, done.stderr) == (0, "")


def test_each_line_has_its_rank_and_its_stream():
    done = start(2, "sh", "-c", "echo out; printf 'no end' >&2")
    found = spawn.RankLines(2, error=False).feed(done.stdout.encode(), last=True)
    assert sorted(found) == [
        (r, e, text) for r in (0, 1) for e, text in ((False, b"out\n"), (True, b"no end\n"))
    ]


def test_a_process_around_one_rank_ends_as_that_does(monkeypatch):
    monkeypatch.setenv("RANK", "5")
    done = start("label", "sh", "-c", "echo here; kill -KILL $$")
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "5: here\n")


LONG = 3 * spawn.LONGEST_WAIT + 5


def test_a_long_line_stays_one_line_whatever_others_print_meanwhile():
    program = f"import sys; print('x' * {LONG}); print('y', file=sys.stderr)"
    done = start(2, sys.executable, "-c", program)
    found = spawn.RankLines(2, error=False).feed(done.stdout.encode(), last=True)
    line = b"x" * LONG + b"\n"
    assert sorted(found) == [(0, False, line), (0, True, b"y\n"), (1, False, line), (1, True, b"y\n")]


@pytest.mark.parametrize("size", [1023, 1024, 1025, 2048, 5000])
def test_a_long_line_of_srun_is_put_together_again(size):
    """As slurmstepd takes it in parts of 1,024 bytes; tests/program_files.py has it of a real srun."""
    line = b"x" * size + b"\n"
    parts = [line[at : at + 1024] for at in range(0, len(line), 1024)]
    printed = b"".join(b" 3: " + (part if part.endswith(b"\n") else part + b"\n") for part in parts)
    assert spawn.RankLines(12, error=True, srun=True).feed(printed + b"0: y\n") == [
        (3, True, line),
        (0, True, b"y\n"),
    ]


def test_a_line_without_end_is_given_out_in_parts():
    reader = spawn.RankLines(1, error=False, srun=True)
    found = [one for _ in range(3000) for one in reader.feed(b"0: " + b"x" * 1024 + b"\n")]
    found += reader.feed(b"", last=True)
    assert sum(text.count(b"x") for _, _, text in found) == 3000 * 1024
    assert len(found) == 3


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_labels_are_taken_off_however_the_lines_come(size):
    data = b"0: one\n 1! two: 2\nsrun: error: 7: no\n9: of nobody\n0:\n1: ends\rhere"
    reader, found = spawn.RankLines(2, error=False), []
    for at in range(0, len(data), size):
        found += reader.feed(data[at : at + size])
    found += reader.feed(b"", last=True)
    assert found == [
        (0, False, b"one\n"), (1, True, b"two: 2\n"), (-1, False, b"srun: error: 7: no\n"),
        (-1, False, b"9: of nobody\n"), (0, False, b"\n"), (1, False, b"ends\rhere"),
    ]  # fmt: skip


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
        spawned(run_plan(ranks=2), ["n1", "n2"], {})
