"""What the detector of change points says of one series."""

from __future__ import annotations

import math
import random

import pytest

from pytest_mlhpc.judge.changes.detect import find, find_all


def noisy(levels: list[tuple[int, float]], sigma: float = 0.01, seed: int = 1) -> list[float]:
    """Return levels (points, value) one after the other, with relative white noise."""
    draw = random.Random(seed)  # noqa: S311  # noise, not a secret
    return [value * (1 + sigma * draw.gauss(0, 1)) for points, value in levels for _ in range(points)]


@pytest.mark.parametrize(
    "values",
    [
        [],
        [1.0],
        [math.nan] * 30,
        [math.inf] * 30,
        [1.0, 2.0],
        [5.0] * 50,
        [0.0] * 50,
        [-3.0] * 50,
        noisy([(200, 7.0)]),
    ],
    ids=["none", "one", "nan", "inf", "two", "constant", "zero", "negative", "noise"],
)
def test_a_series_without_a_change_has_none(values):
    assert find(values) == ()


def test_a_drop_is_found_where_it_is():
    (change,) = find(noisy([(60, 100.0), (40, 95.0)]))
    assert change.first <= 60 <= change.last
    assert change.size == pytest.approx(-0.05, abs=0.01)
    assert (change.before, change.after) == (pytest.approx(100, rel=0.01), pytest.approx(95, rel=0.01))


def test_one_night_that_is_far_off_is_no_change():
    values = noisy([(100, 100.0)])
    values[50] = 60.0
    assert find(values) == ()


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
