"""When the newest nights show a drop that is there to stay."""

import math
import random
from dataclasses import replace

import pytest

from pytest_mlhpc.judge.changes import Attempts, lasting_drop, lasting_drops
from pytest_mlhpc.judge.fence import SMALLEST
from pytest_mlhpc.judge.losses import SEVERAL, LossLimits, certain_losses, incident_losses, limits_for


def nights(count, level=100.0, sigma=0.01, seed=1):
    draw = random.Random(seed)  # noqa: S311  # noise, not a secret
    return [Attempts(level * (1 + sigma * draw.gauss(0, 1))) for _ in range(count)]


CONFIRMED = Attempts(90.0, (90.5, 89.8, 90.2, 90.1), regressed=True)


SPLIT = Attempts(90.0, (90.5, 100.2, 90.1, 101.0))
LOWER, SLOWER = nights(12, level=97.5, seed=2), nights(6, level=108.0, seed=2)


def told(*series):
    """Return what people are told of the newest night of each (history, better)."""
    return incident_losses(series, LossLimits(SMALLEST / SEVERAL))


@pytest.mark.parametrize(
    ("last", "better", "found"),
    [
        pytest.param(nights(30, seed=3), "higher", False, id="quiet nights"),
        pytest.param([CONFIRMED], "higher", True, id="a drop that all re-runs confirm, in its first night"),
        pytest.param([SPLIT], "higher", False, id="a drop that re-runs deny waits for more nights"),
        pytest.param([Attempts(90.0, (100.1, 99.8))], "higher", False, id="a night whose re-runs deny it"),
        pytest.param(LOWER[:1], "higher", False, id="the first night of a small drop"),
        pytest.param(LOWER, "higher", True, id="a small drop that lasts"),
        pytest.param([Attempts(70.0)], "higher", False, id="one outlier without re-runs"),
        pytest.param(SLOWER, "lower", True, id="for times longer is worse"),
        pytest.param(SLOWER, "higher", False, id="for rates more is better"),
        pytest.param(nights(9, level=50.0), "none", False, id="what has no direction"),
        pytest.param([Attempts(math.nan, (math.inf,))], "higher", False, id="a night without a figure"),
    ],
)
def test_what_comes_after_sixty_quiet_nights_is_told_or_not(last, better, found):
    assert (told(([*nights(60), *last], better))[0] is not None) is found


@pytest.mark.parametrize("level", [50.0, 97.0])
def test_in_a_quiet_series_a_fall_is_told_though_clipping_leaves_little_of_it(level):
    quiet = nights(60, sigma=0.002)
    (loss,) = told(([*quiet, *nights(3, level, sigma=0.002, seed=2)], "higher"))
    assert loss.size == pytest.approx(1 - level / 100, abs=0.01)


def test_a_level_that_is_halved_is_told_in_its_first_night_also_if_nothing_was_run_again():
    assert told(([*nights(60, sigma=0.002), Attempts(50.0)], "higher"))[0].nights == 1
    denied = Attempts(50.0, (100.0, 99.9), regressed=False)
    assert told(([*nights(60, sigma=0.002), denied], "higher")) == [None]


def test_with_little_history_the_verdict_decides_alone():
    failed = Attempts(94.0, (94.5, 93.8, 94.2), regressed=True)
    assert told(([*nights(5), failed], "higher"))[0].score == math.inf
    assert told(([*nights(5), Attempts(94.0)], "higher"), ([Attempts(94.0)], "higher")) == [None, None]


@pytest.mark.parametrize(
    ("before", "found"),
    [(34, None), (36, 12)],
    ids=[
        "the level of fewer nights may be a high spell",
        "three nights before for each of the loss are enough",
    ],
)
def test_a_small_loss_of_twelve_nights_needs_a_level_that_is_well_known(before, found):
    noisy = [Attempts(102.0), Attempts(98.0)] * (before // 2)
    history = [*noisy, *[Attempts(95.6, (95.6,) * 4)] * 12]
    (loss,) = certain_losses([(history, "higher")], limits_for(50, 0.05))
    assert (loss and loss.nights) == found


@pytest.mark.parametrize("quiet", [[], nights(90, 0.0)], ids=["no nights", "nights of nothing"])
def test_where_there_is_nothing_there_is_no_drop(quiet):
    assert lasting_drop(quiet, "higher") is None


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
    one_outlier = [0.0] * 9 + [1.0] * 8 + [3.431732783297146e161, 0.0, 0.0]
    assert lasting_drop([Attempts(value) for value in one_outlier], "higher").score == math.inf


def test_a_loss_that_failed_its_test_for_nights_is_told_also_if_nobody_asked_before():
    red = [Attempts(90.0, (90.5, 89.8, 90.2, 90.1), regressed=True), *[Attempts(90.1, regressed=True)] * 2]
    assert told(([*nights(60), *red], "higher"))[0].nights > 1


@pytest.mark.parametrize(
    ("failed", "found"),
    [(30, True), (29, False)],
    ids=["nights of a wrong baseline say what is usual after a month", "not before"],
)
def test_a_loss_after_a_month_that_failed_by_a_wrong_baseline_is_told(failed, found):
    month = [replace(night, regressed=True) for night in nights(failed)]
    tonight = replace(CONFIRMED, regressed=False)
    assert (told(([*month, tonight], "higher"))[0] is not None) is found
