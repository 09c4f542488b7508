"""What the detector of change points says of one series."""

import math
import random

import pytest

from pytest_mlhpc.judge.changes import find, find_all


def noisy(levels, sigma=0.01, seed=1):
    """Return levels (points, value) one after the other, with relative white noise."""
    draw = random.Random(seed)  # noqa: S311  # noise, not a secret
    return [value * (1 + sigma * draw.gauss(0, 1)) for points, value in levels for _ in range(points)]


YEAR = noisy([(365, 100.0)], sigma=0.008)


@pytest.mark.parametrize(
    "values",
    [
        pytest.param([], id="none"),
        pytest.param([1.0], id="one"),
        pytest.param([math.nan] * 30, id="nan"),
        pytest.param([math.inf] * 30, id="inf"),
        pytest.param([1.0, 2.0], id="two"),
        pytest.param([5.0] * 50, id="constant"),
        pytest.param([0.0] * 50, id="zero"),
        pytest.param([-3.0] * 50, id="negative"),
        pytest.param(noisy([(200, 7.0)]), id="noise"),
        pytest.param(noisy([(50, 100.0), (1, 60.0), (49, 100.0)]), id="one night that is far off"),
        pytest.param(
            [value * (1 + 0.01 * math.sin(2 * math.pi * i / 180)) for i, value in enumerate(YEAR)],
            id="a level that wanders slowly within its noise",
        ),
        pytest.param([value * (1 - 0.02 * i / 365) for i, value in enumerate(YEAR)], id="a drift of months"),
    ],
)
def test_a_series_without_a_change_has_none(values):
    assert find(values) == ()


def test_a_drop_is_found_where_it_is():
    (change,) = find(noisy([(60, 100.0), (40, 95.0)]))
    assert change.first <= 60 <= change.last
    assert change.size == pytest.approx(-0.05, abs=0.01)
    assert (change.before, change.after) == (pytest.approx(100, rel=0.01), pytest.approx(95, rel=0.01))


def test_a_change_behind_a_gap_may_lie_anywhere_in_it():
    values = noisy([(40, 100.0), (40, 90.0)])
    values[36:44] = [math.nan] * 8
    (change,) = find(values)
    assert (change.first, change.index) == (36, 44)


def test_a_change_from_nothing_is_infinitely_large():
    (change,) = find([0.0] * 20 + [1.0] * 20)
    assert (change.index, change.size) == (20, math.inf)


def test_many_series_have_the_changes_that_each_has_alone():
    series = [noisy([(30 + i % 5, 100.0), (30, 100.0 - i)], seed=i) for i in range(80)]
    assert find_all(series) == [find(values) for values in series]


def test_a_change_lies_within_its_range_in_nineteen_of_twenty_series():
    changes = [find(noisy([(60, 100.0), (60, 98.0)], seed=seed))[-1] for seed in range(100)]
    assert sum(change.first <= 60 <= change.last for change in changes) >= 90


def test_a_surer_change_has_a_narrower_range():
    (small,) = find(noisy([(60, 100.0), (60, 98.0)]))
    (large,) = find(noisy([(60, 100.0), (60, 90.0)]))
    assert large.last - large.first < small.last - small.first


@pytest.mark.parametrize("unit", [1e-300, 1e300])
def test_units_do_not_matter(unit):
    values = noisy([(60, 1.0), (40, 0.9)])
    found, scaled = find(values), find([unit * value for value in values])
    assert [change.index for change in scaled] == [change.index for change in found]
