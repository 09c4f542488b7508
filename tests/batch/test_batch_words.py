"""What launchers print about ranks that died, taken from real runs, as facts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_mlhpc.batch.words import Death, LauncherWords, torchrun_deaths

KILLED_BY_BAD_EXIT = """srun: error: node2: task 3: Killed
srun: launch/slurm: _step_signal: Terminating StepId=1000.0
slurmstepd-node1: error: *** STEP 1000.0 ON node1 CANCELLED AT 2026-11-21T12:48:24 ***
srun: error: node2: task 2: Terminated
srun: error: node1: tasks 0-1: Terminated
"""

CANCELLED = """slurmstepd: error: *** STEP 1000.0 ON node1 CANCELLED AT 2026-11-21T12:55:03 DUE TO TIME LIMIT ***
srun: error: node2: tasks 2-3: Killed
"""

OVER_MEMORY = """slurmstepd: error: StepId=1016.1 exceeded memory limit (2238849024 > 2044723200), being killed
slurmstepd: error: *** STEP 1016.1 ON node1 CANCELLED AT 2026-11-21T12:58:32 ***
srun: error: node1: tasks 0-15: Killed
"""

MPIRUN_CODE = """mpirun detected that one or more processes exited with non-zero status, thus causing
the job to be terminated. The first process to do so was:

  Process name: [[18083,1],2]
  Exit code:    7
"""


def heard(text: str) -> LauncherWords:
    words = LauncherWords()
    words.feed(text.encode())
    return words


def test_srun_names_the_task_that_died_first():
    words = heard(KILLED_BY_BAD_EXIT)
    assert words.deaths == [
        Death(3, "node2", -9), Death(2, "node2", -15), Death(0, "node1", -15), Death(1, "node1", -15),
    ]  # fmt: skip
    assert not words.cancelled


@pytest.mark.parametrize("text", ['{"dropped": 1e999}', '{"dropped": NaN}', '{"dropped": [1]}', "[" * 9000])
def test_words_that_are_none_of_podruns_are_passed_over(text):
    words = heard(f"mlhpc-podrun: {text}\nmlhpc-podrun: " + '{"dropped": 7}\n')
    assert words.dropped == 7


def test_lists_of_tasks_are_bounded_in_all():
    line = f"srun: error: n: tasks {'0-65535,' * 400}: Killed\n"
    assert len(heard(line * 3).deaths) <= 65536


def test_a_step_that_ends_before_any_task_died_was_cancelled():
    assert heard(CANCELLED).cancelled


@pytest.mark.parametrize(
    "text",
    [
        OVER_MEMORY,
        "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=5.0. Some of your processes may have been killed\n",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=5.0. Some of the step tasks have been OOM Killed.\n",
        "srun: error: node1: task 0: Out Of Memory\n",
    ],
)
def test_memory_is_told_apart(text):
    words = heard(text)
    assert words.out_of_memory
    assert not words.cancelled


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("Exited with exit code 7", 7),
        ("Segmentation fault (core dumped)", -11),
        ("Aborted", -6),
        ("Some new signal", -9),
    ],
)
def test_an_end_is_a_code_or_a_signal(text, code):
    assert heard(f"srun: error: node1: task 5: {text}\n").deaths == [Death(5, "node1", code)]


def test_a_program_that_does_not_exist_is_told():
    words = heard("slurmstepd-node2: error: execve(): /no/python: No such file or directory\n")
    assert words.no_program == "execve(): /no/python: No such file or directory"


def test_a_step_that_cannot_be_made_is_told_with_sruns_words():
    line = "srun: error: Unable to create step for job 5: More processors requested than permitted"
    assert heard(line + "\n").not_started == line


def test_a_failed_node_is_named():
    assert heard("srun: error: Node failure on node2\n").failed_nodes == ["node2"]


def test_openmpi_names_the_rank():
    assert heard(MPIRUN_CODE).deaths == [Death(2, "", 7)]
    killed = "mpirun noticed that process rank 3 with PID 3213 on node node2 exited on signal 9 (Killed).\n"
    assert heard(killed).deaths == [Death(3, "node2", -9)]


def test_torchruns_table_is_read():
    table = "  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 12)\n"
    assert torchrun_deaths(table) == {1: -9}


@given(st.integers(1, 40))
def test_words_may_arrive_in_pieces_of_any_size(size):
    words = LauncherWords()
    data = KILLED_BY_BAD_EXIT.encode()
    for start in range(0, len(data), size):
        words.feed(data[start : start + size])
    assert words == heard(KILLED_BY_BAD_EXIT)


@given(st.lists(st.binary(max_size=300), max_size=8))
def test_no_output_is_too_strange(pieces):
    words = LauncherWords()
    for piece in pieces:
        words.feed(piece)


def test_a_huge_range_of_tasks_is_not_believed():
    assert len(heard("srun: error: node1: tasks 0-99999999999: Killed\n").deaths) == 65536
