"""Which cores and how many threads a rank gets."""

import os

import pytest
from file_trees import write_tree
from rank_helpers import run_plan

from pytest_mlhpc.node.agents.nodes import number_ranges
from pytest_mlhpc.node.worker import environment
from pytest_mlhpc.node.worker.environment import WorkerFailure


@pytest.mark.parametrize(
    ("owned", "ranks", "cores", "shares"),
    [
        (list(range(10)), range(3), (3, 2), [[0, 1, 2], [3, 4, 5], [6, 7, 8]]),
        ([6, 7], [3], (4, 2), [[6, 7]]),
        ([0, 1, 2, 3], [0], (1, 4), [[0, 1, 2, 3]]),
    ],
    ids=["ranks share cores evenly", "one that its launcher has bound stays", "one by itself has all"],
)
def test_a_rank_gets_its_share_of_the_cores(owned, ranks, cores, shares):
    assert [environment.share(owned, rank, *cores) for rank in ranks] == shares


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: environment.share([0, 1], 2, 3, 1),
            "binding=cores: rank 2 of 3 on this node finds 2 processors",
        ),
        (
            lambda: environment.threads_of(run_plan(parameters={"threads": 10**9})),
            "threads=1000000000, but this node has",
        ),
    ],
    ids=["ranks", "threads"],
)
def test_no_more_can_be_had_than_there_are_processors(call, text):
    with pytest.raises(WorkerFailure, match=f"too_few_devices: {text}"):
        call()


def test_threads_of_one_core_and_cores_of_one_socket_are_neighbours(tmp_path):
    for processor, (socket, core) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1)] * 2):
        write_tree(tmp_path / f"cpu{processor}/topology", {"physical_package_id": socket, "core_id": core})
    assert environment.in_order(range(8), tmp_path) == [0, 4, 2, 6, 1, 5, 3, 7]


def test_without_a_topology_numbers_decide(tmp_path):
    write_tree(tmp_path, {"cpu1/topology/core_id": "nonsense"})
    assert environment.in_order({3, 1, 2}, tmp_path) == [1, 2, 3]


@pytest.mark.parametrize(
    ("processors", "text"), [([], ""), ([5], "5"), ([0, 1, 2, 3], "0-3"), ([8, 0, 1, 3], "0-1,3,8")]
)
def test_processors_are_listed_as_linux_lists_them(processors, text):
    assert ",".join(number_ranges(processors)) == text


@pytest.mark.parametrize(
    ("asked", "variables", "threads"),
    [
        ({}, {}, 6),
        ({}, {"OMP_NUM_THREADS": "2"}, 2),
        ({}, {"OMP_NUM_THREADS": "3,1"}, 3),
        ({}, {"OMP_NUM_THREADS": "many"}, 6),
        ({"threads": 1}, {"OMP_NUM_THREADS": "7"}, 1),
    ],
    ids=["its cores", "a number", "the first of a list", "its cores for no number", "what the test names"],
)
def test_a_rank_has_as_many_threads_as(asked, variables, threads):
    run = run_plan(parameters=asked, variables=variables, cores_per_rank=6)
    assert environment.threads_of(run) == threads


def test_nothing_is_bound_unless_asked():
    before = os.sched_getaffinity(0)
    environment.bind(run_plan(), {"LOCAL_RANK": "0"})
    assert os.sched_getaffinity(0) == before
    assert environment.described(run_plan()) == {}


@pytest.mark.servers
def test_a_real_rank_computes_on_its_share_with_the_threads_that_were_asked_for(ranks):
    run = run_plan(parameters={"global_batch": 8, "binding": "cores", "threads": 1}, steps=2, warmup_steps=0)
    found = ranks(run).measurement.environment
    assert found["bound_to"] == ",".join(number_ranges(os.sched_getaffinity(0)))
    assert found["torch_threads"] == "1"
