"""How small a loss of a series fails its test: what the size depends on, and what cannot be simulated."""

import functools
import itertools
import math
import random

import numpy as np
import pytest

from pytest_mlhpc.judge.losses import limits_for
from pytest_mlhpc.judge.sensitivity import (
    FEWEST,
    WITHIN,
    correlation_of_neighbours,
    deviations,
    rerun_deviations,
    sensitivity,
)

LIMITS = limits_for(600, 0.05)


def noise(sigma, count=60, level=100.0, seed=5):
    choose = random.Random(seed)  # noqa: S311 - test data, the same each time
    return [choose.gauss(level, level * sigma) for _ in range(count)]


@functools.cache
def found_in(sigma, better="higher", limits=LIMITS, factor=1.0):
    return sensitivity(noise(sigma), better, limits, noise=factor)


def sizes(sigma, better="higher", limits=LIMITS):
    return found_in(sigma, better, limits).smallest


@pytest.mark.parametrize("better", ["higher", "lower"])
def test_a_quiet_series_is_limited_by_its_tolerance_alone(better):
    # 1.4 and 0.6 times the tolerance of 5 %, and the next larger size that is tried.
    assert sizes(0.0005, better) == pytest.approx([0.075, 0.033, 0.033], abs=0.004)


@pytest.mark.parametrize("better", ["higher", "lower"])
def test_half_the_tolerance_finds_half_the_loss_in_a_quiet_series(better):
    assert sizes(0.0005, better, limits_for(600, 0.025)) == pytest.approx([0.0375, 0.0165, 0.0165], abs=0.003)


def test_more_nights_find_smaller_losses_in_a_noisy_series():
    found = sizes(0.04)
    assert all(later < sooner for sooner, later in itertools.pairwise(found))


def test_half_the_noise_finds_smaller_losses_in_a_noisy_series():
    before, after = found_in(0.04), found_in(0.04, factor=0.5)
    assert after.noise == pytest.approx(before.noise / 2)
    assert all(new < old for new, old in zip(after.smallest, before.smallest, strict=True))


def test_a_site_of_more_series_finds_larger_losses_in_a_noisy_one():
    assert sizes(0.04, limits=limits_for(60_000, 0.05))[2] > sizes(0.04)[2]


def test_a_level_that_changed_long_ago_is_no_noise():
    changed = [*noise(0.005, 40), *noise(0.005, 40, 60.0, seed=6)]
    assert sensitivity(changed, "higher", LIMITS).noise < 0.01


def test_nothing_is_promised_where_noise_hides_every_loss():
    wild = [10.0 ** (3 * value) for value in noise(0.5, level=1.0)]
    assert sensitivity(wild, "higher", LIMITS).smallest[0] is None


def test_without_a_loss_quiet_nights_do_not_fail():
    found = found_in(0.0005)
    assert (found.red, found.simulated) == (0, 60 * WITHIN[-1])


def test_the_same_nights_give_the_same_answer():
    assert sensitivity(noise(0.0005), "higher", LIMITS) == found_in(0.0005)


def test_figures_that_never_differ_have_an_answer():
    assert sensitivity([5.0] * 30, "higher", LIMITS).smallest == pytest.approx(
        [0.075, 0.033, 0.033], abs=0.004
    )


@pytest.mark.parametrize(
    ("values", "better"),
    [
        (noise(0.01, FEWEST - 1), "higher"),
        ([], "higher"),
        ([*noise(0.01, FEWEST - 1), math.nan, 0.0, -1.0, math.inf], "higher"),
        (noise(0.01), "none"),
    ],
    ids=["too few", "none", "too few that are usable", "no direction"],
)
def test_what_cannot_be_simulated_has_no_answer(values, better):
    assert sensitivity(values, better, LIMITS) is None


def test_deviations_are_from_the_level_between_two_changes():
    values = [*noise(0.001, 30), *noise(0.001, 30, 80.0, seed=6)]
    assert max(map(abs, deviations(values))) < 0.01


def test_reruns_share_as_much_of_a_night_as_neighbours_do_and_no_outlier():
    own, around = np.array([0.1, 1.0]), np.array([[0.2], [0.2]])
    assert rerun_deviations(own, around, 0.6, 0.1)[:, 0] == pytest.approx([0.06 + 0.16, 0.18 + 0.16])


def test_neighbouring_nights_resemble_each_other_where_they_drift():
    assert correlation_of_neighbours(np.sin(np.arange(60) / 10)) > 0.8
    assert correlation_of_neighbours(np.array([3.0, 1.0] * 30)) == 0.0
    assert correlation_of_neighbours(np.zeros(30)) == 0.0
