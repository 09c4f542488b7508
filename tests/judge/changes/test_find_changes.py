"""What the detector of change points says of one series."""

from __future__ import annotations

import math
import random
import sys

import pytest

from pytest_mlhpc.errors import UsageError
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


def test_a_change_lies_within_its_range_in_nineteen_of_twenty_series():
    inside = 0
    for seed in range(100):
        change = find(noisy([(60, 100.0), (60, 98.0)], seed=seed))[-1]
        inside += change.first <= 60 <= change.last
    assert inside >= 90


def test_a_surer_change_has_a_narrower_range():
    (small,) = find(noisy([(60, 100.0), (60, 98.0)]))
    (large,) = find(noisy([(60, 100.0), (60, 90.0)]))
    assert large.last - large.first < small.last - small.first


def test_a_level_that_wanders_slowly_within_its_noise_has_no_change():
    noise = noisy([(365, 100.0)], sigma=0.008)
    assert find([v * (1 + 0.01 * math.sin(2 * math.pi * i / 180)) for i, v in enumerate(noise)]) == ()


def test_a_drift_of_months_is_no_change():
    noise = noisy([(365, 100.0)], sigma=0.008)
    assert find([value * (1 - 0.02 * i / 365) for i, value in enumerate(noise)]) == ()


@pytest.mark.parametrize("unit", [1e-300, 1e300])
def test_units_do_not_matter(unit):
    values = noisy([(60, 1.0), (40, 0.9)])
    assert [change.index for change in find([unit * value for value in values])] == [
        change.index for change in find(values)
    ]


def test_without_numpy_one_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy", None)
    for name in [name for name in sys.modules if name.endswith("judge.changes.arrays")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UsageError, match=r"pip install 'pytest-mlhpc\[history\]'"):
        find([1.0] * 9)
