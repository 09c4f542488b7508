"""Histories that a site really has and no model of noise expects: each has its outcome, and nothing is certain out of nothing."""

import math
import random

import pytest
from worlds import entry, inputs, measurement, spec

from pytest_mlhpc.judge.changes import Attempts
from pytest_mlhpc.judge.judge import judge
from pytest_mlhpc.judge.losses import LossLimits, chance_a_month, incident_losses, limits_for
from pytest_mlhpc.store.record import Verdict

TOLD, FAILED, QUIET = "told", "failed", "quiet"


def noise(count, level=100.0, sigma=0.005, seed=5):
    choose = random.Random(seed)  # noqa: S311 - test data, the same each time
    return [choose.gauss(level, level * sigma) for _ in range(count)]


def outcome(figures, tonight, *, failed=(), better="higher"):
    """Return whether the test fails tonight, or people are told of it, or neither."""
    history = [Attempts(value, regressed=number in failed) for number, value in enumerate(figures)]
    run = measurement(tonight[0]) if math.isfinite(tonight[0]) and tonight[0] > 0 else None
    told = incident_losses(
        [([*history, Attempts(tonight[0], tuple(tonight[1:]))], better)], LossLimits(0.025)
    )
    if run is not None and better == "higher":
        runs = [run, *map(measurement, tonight[1:])]
        found = judge(runs, spec(), inputs({"rate": entry()}, {"rate": history}, reruns_allowed=0))
        if found.verdict in {Verdict.REGRESSED, Verdict.DRIFTED}:
            return FAILED
    return TOLD if told[0] else QUIET


SAME = [98.0] * 5


@pytest.mark.parametrize(
    ("figures", "tonight", "more", "expected"),
    [
        pytest.param([100.0] * 60, [100.0], {}, QUIET, id="constant"),
        pytest.param([100.0] * 60, [99.9], {}, QUIET, id="constant, and the last digit moves: sigma is never nothing"),
        pytest.param([100.0] * 60, [90.0] * 5, {}, FAILED, id="constant, and then a loss"),
        pytest.param([100.0, 100.0], [97.0], {}, QUIET, id="two points"),
        pytest.param([], [100.0], {}, QUIET, id="an epoch that begins tonight"),
        pytest.param([*noise(30), *[math.nan] * 20, *noise(10)], [100.0], {}, QUIET, id="a gap"),
        pytest.param([*noise(30), *[math.nan] * 20], [90.0] * 5, {}, FAILED, id="a loss behind a gap"),
        pytest.param(noise(60), [math.nan], {}, QUIET, id="NaN tonight"),
        pytest.param([0.0] * 60, [0.0], {}, QUIET, id="zeros"),
        pytest.param([0.0] * 60, [-1.0], {}, QUIET, id="a negative figure after zeros, not run again"),
        pytest.param([-100.0] * 60, [-100.0], {}, QUIET, id="negative figures"),
        pytest.param([*[100.0] * 29, 50.0], [100.0], {}, QUIET, id="thirty records with one value and one outlier"),
        pytest.param([*[100.0] * 29, 50.0], SAME, {}, QUIET, id="the same, and a loss that is too small to be told at once"),
        pytest.param([*noise(60), *noise(1)], noise(1), {}, QUIET, id="the same night twice"),
        pytest.param(noise(60), [120.0] * 5, {"better": "lower"}, TOLD, id="a direction that changed"),
        pytest.param([*noise(60), *noise(30, 110.0)], [100.0] * 5, {}, FAILED,
                     id="an improvement nobody accepted, and then the old level again"),
        pytest.param([*noise(60, sigma=0.03, seed=3), *noise(20, 106.0, 0.03, 13), *noise(6, 99.0, 0.03, 23)],
                     [99.0, 98.0, 100.0, 97.0, 99.0], {}, QUIET, id="a noisy record that rose for weeks and came back"),
        pytest.param([*noise(40), *noise(20, 90.0)], noise(1, 90.0), {"failed": range(40, 60)}, FAILED,
                     id="a loss is red until it is mended or accepted"),
        pytest.param([*noise(40), *noise(20, 90.0)], [100.0] * 5, {"failed": range(40, 60)}, QUIET, id="a loss that mends itself"),
        pytest.param(noise(30, 90.0), [100.0] * 5, {}, QUIET, id="an accepted loss that mends itself"),
        pytest.param(noise(60, 1e300), [1e300], {}, QUIET, id="figures as large as any"),
    ],
)  # fmt: skip
def test_a_history_has_its_outcome(figures, tonight, more, expected):
    assert outcome(figures, tonight, **more) == expected


def test_the_order_in_which_clocks_put_the_nights_before_does_not_decide_a_large_loss():
    nights = noise(60)
    random.Random(3).shuffle(nights)  # noqa: S311 - test data, the same each time
    assert outcome(nights, [90.0] * 5) == FAILED


@pytest.mark.parametrize("series", [600, 2_000, 10_000])
def test_at_the_limit_of_a_site_noise_looks_like_a_loss_once_a_month(series):
    limits = limits_for(series, 0.05)
    assert chance_a_month(series, limits.score) == pytest.approx(1.0)
    assert chance_a_month(series, limits.alone, confirmed=False) == pytest.approx(1.0)
    assert chance_a_month(series, limits.further, attempts=9) == pytest.approx(1.0)
    assert chance_a_month(series, limits.score + 0.2) == pytest.approx(10**-0.2)


def test_no_more_is_believed_of_a_loss_than_the_noise_of_records_can_tell():
    assert chance_a_month(600, 50.0) == chance_a_month(600, 6.0) == pytest.approx(10**-1.5)
