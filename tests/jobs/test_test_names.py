"""Names of tests for people, and ids of runs."""

import itertools
import time
import uuid
from types import SimpleNamespace

import pytest

from pytest_mlhpc.jobs.spec import cut_names, short_names, uuid7

ONE, TWO = "local:cpu", "cirrus:gpu+torch-2"


def short(*ids, targets=()):
    places = targets or [ONE] * len(ids)
    return short_names(
        [
            SimpleNamespace(node_id=node_id, target=SimpleNamespace(id=place))
            for node_id, place in zip(ids, places, strict=True)
        ]
    )


@pytest.mark.parametrize(
    ("ids", "targets", "names"),
    [
        pytest.param([f"a.py::test_x[{ONE}-16]"], [ONE], ["test_x[16]"], id="one target"),
        pytest.param([f"a.py::test_x[{ONE}]"], [ONE], ["test_x"], id="no parameter but the target"),
        pytest.param(["a.py::TestB::test_x"], [ONE], ["TestB::test_x"], id="the class stays"),
        pytest.param(
            [f"a.py::test_x[{ONE}-1]", f"a.py::test_x[{TWO}-1]"],
            [ONE, TWO],
            [f"test_x[{ONE}-1]", f"test_x[{TWO}-1]"],
            id="two targets",
        ),
        pytest.param(
            [f"a.py::test_x[{ONE}]", f"b.py::test_x[{ONE}]", f"b.py::test_y[{ONE}]"],
            [ONE] * 3,
            ["a.py::test_x", "b.py::test_x", "test_y"],
            id="one name in two files",
        ),
    ],
)
def test_a_name_has_what_tells_it_from_others_and_no_more(ids, targets, names):
    assert short(*ids, targets=targets) == names


@pytest.mark.parametrize("width", [12, 16, 20, 30, 60, 300])
@pytest.mark.parametrize(
    "names",
    [
        pytest.param([f"test_copy_of_a_large_array[{n}]" for n in (1, 20, 300)], id="short parameters"),
        pytest.param(
            [f"test_x[{'-'.join(['float32', n, *['same'] * 9])}]" for n in "abc"], id="in the middle"
        ),
        pytest.param([f"test_{n}_{'x' * 80}[{'y' * 80}]" for n in "abc"], id="at the front"),
        pytest.param(["test_x"] * 1, id="short"),
    ],
)
def test_names_that_are_cut_fit_and_stay_different(names, width):
    cut = cut_names(names, width)
    assert max(map(len, cut)) <= width
    assert len(set(cut)) == len(names)


def test_ids_of_one_process_sort_in_the_order_in_which_they_were_made(monkeypatch):
    """Runs of one plan are made within a millisecond."""
    clock = itertools.count(1_800_000_000_000_000_000, 1_000)
    monkeypatch.setattr(time, "time_ns", lambda: next(clock))
    made = [uuid7() for _ in range(2_000)]
    assert made == sorted(made)
    assert {uuid.UUID(one).version for one in made} == {7}
    assert uuid7(10**18, bytes(10)) == "00e8d4a5-1000-7000-8000-000000000000"


def test_ids_made_at_one_moment_differ():
    assert len({uuid7(10**18) for _ in range(100)}) == 100
