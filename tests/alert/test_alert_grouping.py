"""One cause, one message."""

import pytest
from alert_bads import bad, series

from pytest_mlhpc.alert.channels.base import Kind
from pytest_mlhpc.alert.incidents import by_chance, class_of, groups
from pytest_mlhpc.alert.model import Subject

FIVE = {"cirrus": [f"standard:{name}[] name=x" for name in "abcde"], "alps": []}


def both(benchmark, *, whole=0.06, compute=0.06, since=30, system="cirrus"):
    """Effective and compute throughput of a benchmark; those that lost nothing are left out."""
    losses = {"effective_throughput": whole, "compute_throughput": compute}
    name = f"{benchmark}[] name=x"
    return [bad(series(name, metric, system), since, loss) for metric, loss in losses.items() if loss]


@pytest.mark.parametrize(
    ("bads", "found"),
    [
        pytest.param([both(name) for name in "abcd"], [("all", 4)], id="most benchmarks of a system are one group"),
        pytest.param([both("a"), both("b")], [("benchmarks", 2)], id="two of five are not the system"),
        pytest.param([both(name, whole=0.1, compute=0) for name in "abcde"], [("io", 5)],
                     id="input and output alone, also of all"),
        pytest.param([both("a", whole=0.2, compute=0.02)], [("io", 1)],
                     id="a small loss of computing hides no input and output"),
        pytest.param([both("a"), both("b", whole=0.1, compute=0)], [("benchmarks", 1), ("io", 1)],
                     id="computing and input of different benchmarks"),
        pytest.param([both("a"), both("b", since=35)], [("benchmarks", 1), ("benchmarks", 1)],
                     id="other nights are other groups"),
        pytest.param([both("a"), both("b", since=31)], [("benchmarks", 2)], id="the night before and after are one"),
        pytest.param([], [], id="nothing bad is no group"),
    ],
)  # fmt: skip
def test_one_cause_is_one_group(bads, found):
    every = groups([one for some in bads for one in some], FIVE)
    assert [(group.scope, len(group.benchmarks)) for group in every] == found


@pytest.mark.parametrize(
    ("metric", "slow"),
    [
        ("read_bandwidth", "io"),
        ("bus_bandwidth", "communication"),
        ("latency", "communication"),
        ("rate", "benchmarks"),
    ],
)
def test_metrics_say_what_is_slow(metric, slow):
    assert class_of([bad(series("s[] name=x", metric))]) == slow


@pytest.mark.parametrize(
    ("bads", "found"),
    [
        pytest.param(
            [*both("a"), *both("a", system="alps")], [("code", ("alps", "cirrus"))], id="one benchmark"
        ),
        pytest.param(
            [*both("a"), *both("b", system="alps")],
            [("benchmarks", ("alps",)), ("benchmarks", ("cirrus",))],
            id="different benchmarks",
        ),
        pytest.param(
            [bad(Subject(Kind.STALE, name, "standard", benchmark="a")) for name in ("alps", "cirrus")],
            [("stale", ("alps",)), ("stale", ("cirrus",))],
            id="stale benchmarks",
        ),
        pytest.param(
            [bad(Subject(Kind.NODES, "cirrus", "standard", node=name)) for name in ("n1", "n2")],
            [("nodes", ("cirrus",))],
            id="nodes of one system",
        ),
    ],
)
def test_only_one_benchmark_on_two_systems_in_one_night_is_the_code(bads, found):
    assert [(group.scope, group.systems) for group in groups(bads, FIVE)] == found


def test_the_order_in_which_bads_come_changes_nothing():
    bads = [*both("a"), *both("b", whole=0.1, compute=0), *both("a", system="alps")]
    assert groups(bads, FIVE) == groups(bads[::-1], FIVE)


@pytest.mark.parametrize(
    ("losses_a_night", "scopes"),
    [(0.01, ["code"]), (3.0, ["benchmarks", "benchmarks"])],
    ids=["where losses are rare", "where several fall each night"],
)
def test_the_same_benchmark_on_two_systems_is_the_code_where_chance_hardly_brings_that_about(
    losses_a_night, scopes
):
    measured = {name: frozenset(f"standard:{at}" for at in range(200)) for name in ("alps", "cirrus")}
    bads = [*both("a"), *both("a", system="alps")]
    found = groups(bads, measured, dict.fromkeys(measured, losses_a_night))
    assert [group.scope for group in found] == scopes


@pytest.mark.parametrize(("losses_a_night", "least", "most"), [(0.05, 0, 0.02), (2.0, 0.5, 1)])
def test_a_group_knows_how_often_chance_brings_so_many_into_one_night(losses_a_night, least, most):
    bads = [bad(series(name)) for name in "abcd"]
    (group,) = groups(bads, {"cirrus": range(200)}, {"cirrus": losses_a_night})
    assert least <= group.chance <= most
    assert [one.chance for one in groups(bads[:1], {"cirrus": range(200)})] == [None]


def test_the_chance_of_very_many_at_once_is_a_number():
    assert (by_chance(2_000, 0.5), by_chance(0, 0.5)) == (0.0, 1.0)
    assert by_chance(1, 0.1) == pytest.approx(0.0952, abs=1e-4)
