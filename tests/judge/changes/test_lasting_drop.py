"""When quorum and nights agree that a drop is there to stay."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from pytest_mlhpc.judge.changes.lasting import Attempts, lasting_drop, lasting_drops


def nights(count: int, level: float = 100.0, sigma: float = 0.01, seed: int = 1) -> list[Attempts]:
    draw = random.Random(seed)  # noqa: S311  # noise, not a secret
    return [Attempts(level * (1 + sigma * draw.gauss(0, 1))) for _ in range(count)]


CONFIRMED = Attempts(94.0, (94.5, 93.8, 94.2), regressed=True)


def test_quiet_nights_have_no_drop():
    assert lasting_drop(nights(90), "higher") is None


def test_a_drop_that_all_reruns_confirm_is_told_in_its_first_night():
    drop = lasting_drop([*nights(60), CONFIRMED], "higher")
    assert drop is not None
    assert drop.nights == 1
    assert drop.size == pytest.approx(0.06, abs=0.01)


def test_a_drop_that_a_rerun_denies_waits_for_more_nights():
    split = replace(CONFIRMED, reruns=(94.5, 100.2, 94.1, 93.9))
    assert lasting_drop([*nights(60), split], "higher") is None
    assert lasting_drop([*nights(60), split, split], "higher") is not None


def test_a_night_whose_reruns_do_not_confirm_it_says_nothing():
    denied = Attempts(90.0, (100.1, 99.8), regressed=False)
    assert lasting_drop([*nights(60), denied], "higher") is None


def test_small_drops_are_told_once_they_have_lasted():
    history = nights(60)
    lower = nights(12, level=97.5, seed=2)
    assert lasting_drop([*history, *lower[:1]], "higher") is None
    drop = lasting_drop([*history, *lower], "higher")
    assert drop is not None
    assert drop.nights > 4


def test_one_outlier_without_reruns_is_no_drop():
    assert lasting_drop([*nights(60), Attempts(60.0)], "higher") is None


def test_for_times_longer_is_worse():
    slower = nights(6, level=108.0, seed=2)
    assert lasting_drop([*nights(60), *slower], "lower") is not None
    assert lasting_drop([*nights(60), *slower], "higher") is None


def test_what_has_no_direction_has_no_drop():
    assert lasting_drop([*nights(60), *nights(9, level=50.0)], "none") is None


def test_with_little_history_the_quorum_decides_alone():
    assert lasting_drop([*nights(5), CONFIRMED], "higher").score == math.inf
    assert lasting_drop([*nights(5), Attempts(94.0)], "higher") is None


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_nights_without_a_figure_are_left_out(odd):
    history = nights(60)
    history[20:40] = [Attempts(odd)] * 20
    assert lasting_drop([*history, CONFIRMED], "higher") is not None
    assert lasting_drop([*history, CONFIRMED, Attempts(odd, (odd,))], "higher") is None


@pytest.mark.parametrize("level", [1e-300, 1e300, -5.0])
def test_any_level_can_be_compared(level):
    history = nights(60, level)
    assert lasting_drop(history, "higher") is None
    worse = level - abs(level) / 2
    assert lasting_drop([*history, *[Attempts(worse)] * 5], "higher") is not None


def test_nights_of_nothing_have_no_drop():
    assert lasting_drop(nights(90, 0.0), "higher") is None


def test_no_nights_have_no_drop():
    assert lasting_drop([], "higher") is None


def test_many_series_are_judged_as_each_alone():
    many = [([*nights(20 + i % 7, seed=i), *[CONFIRMED] * (i % 3)], "higher") for i in range(40)]
    assert lasting_drops(many) == [lasting_drop(*one) for one in many]


def test_figures_so_small_that_their_squares_are_nothing_divide_nothing_by_it():
    one_outlier = [0.0] * 8 + [1.0] * 7 + [3.431732783297146e161, 0.0, 0.0]
    drop = lasting_drop([Attempts(value) for value in one_outlier], "higher")
    assert drop is not None
    assert drop.score == math.inf
