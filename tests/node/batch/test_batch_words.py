"""What launchers print about ranks that died, taken from real runs, as facts."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_mlhpc.node.batch.ranks import Death, LauncherOutput, torchrun_deaths

#: What launchers printed.
PRINTED = {path.stem: path.read_text() for path in Path(__file__).with_name("launcher_words").iterdir()}


def heard(text):
    words = LauncherOutput()
    words.feed(text.encode())
    return words


@pytest.mark.parametrize("text", ['{"dropped": 1e999}', '{"dropped": NaN}', '{"dropped": [1]}', "[" * 9000])
def test_messages_that_are_none_of_podruns_are_passed_over(text):
    words = heard(f"mlhpc-podrun: {text}\nmlhpc-podrun: " + '{"dropped": 7}\n')
    assert words.dropped == 7


def test_lists_of_tasks_are_bounded_in_all():
    line = f"srun: error: n: tasks {'0-65535,' * 400}: Killed\n"
    assert len(heard(line * 3).deaths) <= 65536


@pytest.mark.parametrize(
    "line",
    [
        "srun: error: n: task 0: Killed",
        "srun: error: Node failure on n",
        'mlhpc-podrun: {"death": {"task": 0, "pod": "p", "exit": 1, "memory": false}}',
        'mlhpc-podrun: {"lost": "p", "why": "gone"}',
        "mpirun noticed that process rank 0 with PID 1 on node n exited on signal 9 (Killed).",
        "Process name: [[1,1],0]\n  Exit code:    7",
    ],
)
def test_what_is_stored_of_endless_messages_is_bounded(line):
    words = heard(f"{line}\n" * 70_000)
    assert 0 < len(words.deaths) + len(words.failed_nodes) + len(words.lost_pods) <= 65536


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        pytest.param(
            PRINTED["killed_by_bad_exit"],
            {
                "deaths": [
                    Death(3, "node2", -9),
                    Death(2, "node2", -15),
                    Death(0, "node1", -15),
                    Death(1, "node1", -15),
                ],
                "cancelled": False,
            },
            id="srun names the task that died first",
        ),
        pytest.param(
            PRINTED["cancelled"],
            {"cancelled": True},
            id="a step that ends before any task died was cancelled",
        ),
        *[
            pytest.param(text, {"out_of_memory": True, "cancelled": False}, id="memory is told apart")
            for text in (
                PRINTED["over_memory"],
                "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=5.0. Some of your processes may have been killed",
                "slurmstepd: error: Detected 1 oom_kill event in StepId=5.0. Some of the step tasks have been OOM Killed.",
                "srun: error: node1: task 0: Out Of Memory",
            )
        ],
        *[
            pytest.param(
                f"srun: error: node1: task 5: {end}",
                {"deaths": [Death(5, "node1", code)]},
                id=f"an end by {code}",
            )
            for end, code in (
                ("Exited with exit code 7", 7),
                ("Segmentation fault (core dumped)", -11),
                ("Aborted", -6),
                ("Some new signal", -9),
            )
        ],
        pytest.param(
            "slurmstepd-node2: error: execve(): /no/python: No such file or directory",
            {"no_program": "execve(): /no/python: No such file or directory"},
            id="a program that does not exist",
        ),
        pytest.param(
            "srun: error: Unable to create step for job 5: More processors requested than permitted",
            {
                "not_started": "srun: error: Unable to create step for job 5: More processors requested than permitted"
            },
            id="a step that cannot be made is told with srun's words",
        ),
        pytest.param("srun: error: Node failure on node2", {"failed_nodes": ["node2"]}, id="a failed node"),
        pytest.param(PRINTED["mpirun_code"], {"deaths": [Death(2, "", 7)]}, id="Open MPI names the rank"),
        pytest.param(
            "mpirun noticed that process rank 3 with PID 3213 on node node2 exited on signal 9 (Killed).",
            {"deaths": [Death(3, "node2", -9)]},
            id="Open MPI names the signal",
        ),
    ],
)
def test_messages_of_launchers_become_facts(text, facts):
    words = heard(text.rstrip("\n") + "\n")
    assert {name: getattr(words, name) for name in facts} == facts


def test_torchruns_table_is_read():
    table = "  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 12)\n"
    assert torchrun_deaths(table) == {1: -9}


@given(st.integers(1, 40))
def test_messages_may_arrive_in_pieces_of_any_size(size):
    words, data = LauncherOutput(), PRINTED["killed_by_bad_exit"].encode()
    for start in range(0, len(data), size):
        words.feed(data[start : start + size])
    assert words == heard(PRINTED["killed_by_bad_exit"])


@given(st.lists(st.binary(max_size=300), max_size=8))
def test_no_output_is_too_strange(pieces):
    words = LauncherOutput()
    for piece in pieces:
        words.feed(piece)


def test_a_huge_range_of_tasks_is_not_believed():
    assert len(heard("srun: error: node1: tasks 0-99999999999: Killed\n").deaths) == 65536
