"""What a program may be told of the node on which it starts."""

import pytest
from pods import run_plan

from pytest_mlhpc.node import cores


@pytest.fixture
def node(tmp_path, monkeypatch):
    """A node of two NUMA nodes, with a last cache of 32 MiB that cores 0 and 1 share."""
    for number in (0, 1):
        (tmp_path / "nodes" / f"node{number}").mkdir(parents=True)
    (tmp_path / "nodes" / "possible").touch()
    cache = tmp_path / "processors" / "cpu0" / "cache" / "index3"
    cache.mkdir(parents=True)
    for name, text in (("level", "3"), ("type", "Unified"), ("size", "32M"), ("shared_cpu_list", "0-1")):
        (cache / name).write_text(f"{text}\n")
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _pid: {0, 1})
    monkeypatch.setattr(cores.last_caches, "__defaults__", (tmp_path / "processors",))
    monkeypatch.setattr(cores.numa_nodes, "__defaults__", (tmp_path / "nodes",))
    return tmp_path


def test_arguments_and_variables_are_filled_in(node):
    run = run_plan(
        argv=("b", "{last_level_cache}", "x{numa_nodes}{}"), variables={"A": "{numa_nodes}", "B": "{cores}"}
    )
    found = cores.on_node(run)
    assert found.argv == ("b", str(32 << 20), "x2{}")
    assert found.variables == {"A": "2", "B": "{cores}"}


def test_what_the_node_filled_in_comes_back_by_a_message_without_secrets(node):
    planned = run_plan(
        argv=("b", "{numa_nodes}"), variables={"A": "{numa_nodes}", "B": "1", "MY_KEY": "x{numa_nodes}"}
    )
    started = cores.on_node(planned)
    body = cores.filled_on_node(planned, started)
    assert body == {"argv": ["b", "2"], "filled": {"A": "2"}}
    found = cores.with_filled(planned, body)
    assert (found.argv, found.variables) == (("b", "2"), {"A": "2", "B": "1", "MY_KEY": "x{numa_nodes}"})


@pytest.mark.parametrize("body", [{}, {"argv": 1, "filled": ["A"]}])
def test_a_run_is_as_it_was_planned_where_no_message_says_more(node, body):
    planned = run_plan(argv=("b", "1"), variables={"A": "1"})
    assert cores.filled_on_node(planned, cores.on_node(planned)) == {}
    assert cores.with_filled(planned, body) == planned


def test_a_placeholder_stays_where_the_kernel_does_not_answer(node, monkeypatch):
    monkeypatch.setattr(cores.last_caches, "__defaults__", (node / "nothing",))
    monkeypatch.setattr(cores.numa_nodes, "__defaults__", (node / "nothing",))
    assert cores.on_node(run_plan(argv=("{last_level_cache}", "{numa_nodes}"))).argv == (
        "{last_level_cache}",
        "1",
    )


def test_a_run_that_asks_for_nothing_is_the_same_run(node):
    run = run_plan(argv=("b", "{cores}"))
    assert cores.on_node(run) is run
