"""When quorum and nights agree that a drop is there to stay."""

import math
import random
from dataclasses import replace

import pytest

from pytest_mlhpc.judge.changes import Attempts, lasting_drop, lasting_drops


def nights(count, level=100.0, sigma=0.01, seed=1):
    draw = random.Random(seed)  # noqa: S311  # noise, not a secret
    return [Attempts(level * (1 + sigma * draw.gauss(0, 1))) for _ in range(count)]


CONFIRMED = Attempts(94.0, (94.5, 93.8, 94.2), regressed=True)


SPLIT = replace(CONFIRMED, reruns=(94.5, 100.2, 94.1, 93.9))
LOWER, SLOWER = nights(12, level=97.5, seed=2), nights(6, level=108.0, seed=2)


@pytest.mark.parametrize(
    ("last", "better", "told"),
    [
        pytest.param(nights(30, seed=3), "higher", False, id="quiet nights"),
        pytest.param([SPLIT], "higher", False, id="a drop that a re-run denies waits for more nights"),
        pytest.param(
            [SPLIT, SPLIT], "higher", True, id="a drop that re-runs of two nights confirm for the most part"
        ),
        pytest.param(
            [Attempts(90.0, (100.1, 99.8), regressed=False)],
            "higher",
            False,
            id="a night whose re-runs deny it",
        ),
        pytest.param(LOWER[:1], "higher", False, id="the first night of a small drop"),
        pytest.param([Attempts(60.0)], "higher", False, id="one outlier without re-runs"),
        pytest.param(SLOWER, "lower", True, id="for times longer is worse"),
        pytest.param(SLOWER, "higher", False, id="for rates more is better"),
        pytest.param(nights(9, level=50.0), "none", False, id="what has no direction"),
    ],
)
def test_what_comes_after_sixty_quiet_nights_is_a_drop_or_not(last, better, told):
    assert (lasting_drop([*nights(60), *last], better) is not None) is told


@pytest.mark.parametrize("level", [50.0, 97.0])
def test_in_a_quiet_series_a_fall_is_told_though_clipping_leaves_little_of_it(level):
    quiet = nights(60, sigma=0.002)
    drop = lasting_drop([*quiet, *nights(3, level, sigma=0.002, seed=2)], "higher")
    assert drop.size == pytest.approx(1 - level / 100, abs=0.01)


def test_a_level_that_is_halved_is_told_in_its_first_night_also_if_nothing_was_run_again():
    assert lasting_drop([*nights(60, sigma=0.002), Attempts(50.0)], "higher").nights == 1
    denied = Attempts(50.0, (100.0, 99.9), regressed=False)
    assert lasting_drop([*nights(60, sigma=0.002), denied], "higher") is None


@pytest.mark.parametrize("quiet", [[], nights(90, 0.0)], ids=["no nights", "nights of nothing"])
def test_where_there_is_nothing_there_is_no_drop(quiet):
    assert lasting_drop(quiet, "higher") is None


def test_a_drop_that_all_reruns_confirm_is_told_in_its_first_night():
    drop = lasting_drop([*nights(60), CONFIRMED], "higher")
    assert (drop.nights, drop.size) == (1, pytest.approx(0.06, abs=0.01))


def test_small_drops_are_told_once_they_have_lasted():
    assert lasting_drop([*nights(60), *LOWER], "higher").nights > 4


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


def test_many_series_are_judged_as_each_alone():
    many = [([*nights(20 + i % 7, seed=i), *[CONFIRMED] * (i % 3)], "higher") for i in range(40)]
    assert lasting_drops(many) == [lasting_drop(*one) for one in many]


def test_figures_so_small_that_their_squares_are_nothing_divide_nothing_by_it():
    one_outlier = [0.0] * 8 + [1.0] * 7 + [3.431732783297146e161, 0.0, 0.0]
    assert lasting_drop([Attempts(value) for value in one_outlier], "higher").score == math.inf
