"""One cause, one message."""

import pytest
from alert_bads import bad, night, series

from pytest_mlhpc.alert.channels.base import Kind
from pytest_mlhpc.alert.grouping import class_of, groups
from pytest_mlhpc.alert.model import Subject

FIVE = {"cirrus": [f"standard:{name}[] name=x" for name in "abcde"], "alps": []}


def both(benchmark, *, whole=0.06, compute=0.06, since=30, system="cirrus"):
    """Effective and compute throughput of a benchmark; those that lost nothing are left out."""
    losses = {"effective_throughput": whole, "compute_throughput": compute}
    name = f"{benchmark}[] name=x"
    return [bad(series(name, metric, system), since, loss) for metric, loss in losses.items() if loss]


def scopes(bads):
    return [(group.scope, len(group.benchmarks)) for group in groups(bads, FIVE)]


def test_most_benchmarks_of_a_system_are_one_group():
    assert scopes([one for name in "abcd" for one in both(name)]) == [("all", 4)]


def test_two_of_five_are_not_the_system():
    assert scopes([*both("a"), *both("b")]) == [("benchmarks", 2)]


def test_input_and_output_alone_is_told_as_such_also_of_all_benchmarks():
    assert scopes([one for name in "abcde" for one in both(name, whole=0.1, compute=0)]) == [("io", 5)]


def test_a_small_loss_of_computing_does_not_hide_that_input_and_output_is_slow():
    assert scopes(both("a", whole=0.2, compute=0.02)) == [("io", 1)]


def test_computing_and_input_of_different_benchmarks_are_two_groups():
    assert scopes([*both("a"), *both("b", whole=0.1, compute=0)]) == [("benchmarks", 1), ("io", 1)]


@pytest.mark.parametrize(
    ("metric", "found"),
    [
        ("read_bandwidth", "io"),
        ("bus_bandwidth", "communication"),
        ("latency", "communication"),
        ("rate", "benchmarks"),
    ],
)
def test_metrics_say_what_is_slow(metric, found):
    assert class_of([bad(series("s[] name=x", metric))]) == found


def test_other_nights_are_other_groups():
    assert scopes([*both("a", since=30), *both("b", since=35)]) == [("benchmarks", 1), ("benchmarks", 1)]


def test_the_night_before_and_after_are_one():
    assert scopes([*both("a", since=30), *both("b", since=31)]) == [("benchmarks", 2)]


def test_the_same_benchmark_on_two_systems_in_one_night_is_the_code():
    found = groups([*both("a"), *both("a", system="alps")], FIVE)
    assert [(group.scope, group.systems) for group in found] == [("code", ("alps", "cirrus"))]


def test_different_benchmarks_on_two_systems_are_two_groups():
    found = groups([*both("a"), *both("b", system="alps")], FIVE)
    assert [group.systems for group in found] == [("alps",), ("cirrus",)]


def test_nodes_of_one_night_and_system_are_one_group():
    nodes = [bad(Subject(Kind.NODES, "cirrus", "standard", node=name)) for name in ("n1", "n2")]
    assert [len(group.bads) for group in groups(nodes, FIVE)] == [2]


def test_stale_benchmarks_of_two_systems_are_two_groups():
    stale = [bad(Subject(Kind.STALE, name, "standard", benchmark="a")) for name in ("alps", "cirrus")]
    assert [group.systems for group in groups(stale, FIVE)] == [("alps",), ("cirrus",)]


def test_the_order_in_which_bads_come_changes_nothing():
    bads = [*both("a"), *both("b", whole=0.1, compute=0), *both("a", system="alps")]
    assert groups(bads, FIVE) == groups(bads[::-1], FIVE)


def test_nothing_bad_is_no_group():
    assert groups([], FIVE) == []
    assert night(1) > night(0)
