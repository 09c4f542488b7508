"""A against B by pairs of runs: what is found, how often equal sides are called different, and what an interval is."""

import math
import random

import pytest

from pytest_mlhpc.jobs.job import is_first_side
from pytest_mlhpc.judge.paired import (
    ALPHA,
    EARLY,
    FEWEST_RUNS,
    MOST_RUNS,
    PairedVerdict,
    analyses,
    compare,
    follow,
    level,
    quantile,
    two_sided,
)

DIFFERENT = {PairedVerdict.WORSE, PairedVerdict.BETTER}


def pairs_of(seed: int, change: float, noise: float, drift: float = 0.0, runs: int = MOST_RUNS) -> list:
    """Return pairs of runs in turns: A is *change* better, each run varies by *noise*, and the machine slows by *drift* a run."""
    rng = random.Random(seed)  # noqa: S311 - noise
    values = [
        math.exp(rng.gauss(0, noise) - drift * number + (math.log1p(change) if is_first_side(number) else 0))
        for number in range(1, runs + 1)
    ]
    couples = zip(values[::2], values[1::2], strict=True)
    return [couple if is_first_side(2 * at + 1) else couple[::-1] for at, couple in enumerate(couples)]


def found(pairs: list, **options: float) -> PairedVerdict:
    settings = {"most": MOST_RUNS, "precision": 0.0, "alpha": ALPHA, **options}
    return follow(pairs, "higher", **settings).verdict


@pytest.mark.parametrize(
    ("t", "free", "expected"),
    [(2.0, 1, 0.295167), (2.0, 2, 0.183503), (2.0, 5, 0.101939), (2.0796, 21, 0.05), (12.706, 1, 0.05), (1e6, 2, 0.0)],
)  # fmt: skip
def test_students_t_is_that_of_the_tables(t, free, expected):
    assert two_sided(t, free) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("free", [1, 2, 5, 12, 21, 28])
@pytest.mark.parametrize("nominal", [0.5, 0.05, 0.0005, 1e-6])
def test_a_quantile_is_exceeded_with_its_probability(free, nominal):
    assert two_sided(quantile(nominal, free), free) == pytest.approx(nominal, rel=1e-6)


@pytest.mark.parametrize("most", range(FEWEST_RUNS, MOST_RUNS + 1, 2))
def test_all_looks_together_spend_the_level_and_no_more(most):
    planned = analyses(most)
    assert planned[-1] == most
    assert sorted(set(planned)) == planned
    assert sum(level(runs, most, ALPHA) for runs in planned) == pytest.approx(ALPHA)
    assert {level(runs, most, ALPHA) for runs in planned[:-1]} <= {ALPHA * EARLY}
    assert level(most - 1, most, ALPHA) == 0


def test_a_difference_of_one_paired_deviation_is_found_in_95_of_100_within_30_runs():
    change = math.expm1(0.01 * math.sqrt(2))
    verdicts = [found(pairs_of(seed, change, 0.01)) for seed in range(400)]
    assert sum(verdict is PairedVerdict.BETTER for verdict in verdicts) >= 0.93 * 400  # 95.6 of 100 in 20,000
    assert PairedVerdict.WORSE not in verdicts


def test_equal_sides_are_called_different_in_5_of_100_at_most():
    verdicts = [found(pairs_of(1000 + seed, 0.0, 0.01)) for seed in range(400)]
    assert sum(verdict in DIFFERENT for verdict in verdicts) <= 0.07 * 400  # 4.9 of 100 in 20,000


def test_a_steady_drift_is_no_difference():
    verdicts = [found(pairs_of(2000 + seed, 0.0, 0.003, drift=0.01)) for seed in range(200)]
    assert not DIFFERENT & set(verdicts)


def test_sides_that_are_equal_as_closely_as_asked_are_equal_after_few_runs():
    result = follow(pairs_of(1, 0.0, 0.001), "higher", most=MOST_RUNS, precision=0.015, alpha=ALPHA)
    assert (result.verdict, result.runs) == (PairedVerdict.EQUAL, FEWEST_RUNS)


def test_a_certain_difference_below_the_precision_does_not_count():
    result = follow(pairs_of(1, 0.004, 0.0005), "higher", most=MOST_RUNS, precision=0.015, alpha=ALPHA)
    assert result.verdict is PairedVerdict.EQUAL
    assert result.low > 0


def test_a_large_difference_ends_it_after_the_fewest_runs():
    result = follow(pairs_of(1, -0.2, 0.005), "higher", most=MOST_RUNS, precision=0.015, alpha=ALPHA)
    assert (result.verdict, result.runs) == (PairedVerdict.WORSE, FEWEST_RUNS)
    assert result.low < -0.2 < result.high


def test_times_are_better_where_they_are_lower():
    pairs = pairs_of(1, -0.2, 0.005)
    assert compare(pairs, "lower").change == pytest.approx(1 / 0.8 - 1, abs=0.02)
    assert compare(pairs, "lower", most=MOST_RUNS).verdict is PairedVerdict.BETTER


def test_a_decision_stands_whatever_later_runs_say():
    pairs = [*pairs_of(1, -0.2, 0.005, runs=8), *pairs_of(2, 0.5, 0.005, runs=22)]
    assert (
        follow(pairs, "higher", most=MOST_RUNS, precision=0.015, alpha=ALPHA).verdict is PairedVerdict.WORSE
    )


def test_before_the_first_look_nothing_is_known():
    result = follow(pairs_of(1, -0.5, 0.001, runs=6), "higher", most=MOST_RUNS, precision=0.015, alpha=ALPHA)
    assert result.verdict is PairedVerdict.UNCLEAR
    assert not math.isfinite(result.low)
    assert not math.isfinite(result.high)


def test_runs_without_any_noise_have_an_interval_of_one_point():
    result = compare([(2.0, 1.0)] * 4, "higher")
    assert (result.low, result.high) == pytest.approx((1.0, 1.0))
    assert result.verdict is PairedVerdict.BETTER


def test_of_many_comparisons_each_has_its_share_of_chance():
    verdicts = [found(pairs_of(3000 + seed, 0.0, 0.01), alpha=ALPHA / 20) for seed in range(400)]
    assert sum(verdict in DIFFERENT for verdict in verdicts) <= 5  # one is expected
