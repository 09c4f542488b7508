"""The interval of a median."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_mlhpc.report.figures import estimate, lower_rank


# Conover, Practical Nonparametric Statistics, table of the sign test, 5 % two-sided; with r = the critical value + 1.
@pytest.mark.parametrize(
    ("runs", "rank"), [(1, 0), (5, 0), (6, 1), (8, 1), (9, 2), (12, 3), (20, 6), (30, 10), (100, 40)]
)
def test_ranks_are_those_of_the_sign_test(runs, rank):
    assert lower_rank(runs) == rank


@pytest.mark.parametrize("runs", [6, 9, 13])
def test_the_interval_holds_the_median_at_least_as_often_as_it_says(runs):
    rank = lower_rank(runs)
    # Each run is below the true median or above, equally often: count all ways in which that can turn out.
    ways = (sum(below) for below in itertools.product((0, 1), repeat=runs))
    held = sum(rank <= below <= runs - rank for below in ways)
    assert held / 2**runs >= 0.95


def test_few_runs_have_their_range_and_none_have_nothing():
    found = estimate([12.0, 8.0, 10.0])
    assert (found.median, found.low, found.high, found.runs, found.sure) == (10.0, 8.0, 12.0, 3, False)
    assert estimate([]) is None


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=40))
def test_the_median_lies_in_its_interval_whatever_the_figures_are(values):
    found = estimate(values)
    assert math.isfinite(found.median)
    assert found.low <= found.median <= found.high
    assert found.sure == (len(values) >= 6)
