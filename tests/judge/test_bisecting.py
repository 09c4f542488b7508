"""Bisection by noisy comparisons: what evidence says of candidates, which comparison is next, how long it is, and how it ends."""

import math
import random

import pytest

from pytest_mlhpc.judge.bisecting import (
    NONE,
    SURE,
    PairedEvidence,
    Posterior,
    comparisons_without_noise,
    ending,
    most_probable,
    next_comparison,
    posterior,
    priors,
    runs_for,
    wanted_runs,
)

LOSS = 0.1


def chain(many: int) -> dict[str, frozenset[int]]:
    """Comparisons with each commit before the last one of *many* candidates."""
    return {str(number): frozenset(range(number, many)) for number in range(many)}


def seen(possible, name, mean, *, pairs=4, deviation=0.01):
    return PairedEvidence(possible[name], pairs, mean, deviation)


def test_before_anything_is_measured_classes_are_equally_probable_and_so_are_their_candidates():
    now = posterior(priors([2, 1]), LOSS, [])
    share = (1 - NONE) / 2
    assert now.candidates == pytest.approx((share / 2, share / 2, share))
    assert now.none == pytest.approx(NONE)


def test_a_loss_that_shows_leaves_the_candidates_that_b_lacks():
    possible = chain(4)
    now = posterior(priors([4]), LOSS, [seen(possible, "2", LOSS)])
    assert sum(now.candidates[2:]) > 0.99
    assert now.candidates[2] == pytest.approx(now.candidates[3])


def test_no_difference_leaves_the_others_and_none():
    possible = chain(4)
    now = posterior(priors([4]), LOSS, [seen(possible, "2", 0.0)])
    assert sum(now.candidates[:2]) + now.none > 0.99


def test_evidence_of_noisy_runs_says_little():
    possible = chain(2)
    now = posterior(priors([2]), LOSS, [seen(possible, "1", LOSS / 2, deviation=3 * LOSS)])
    assert now.candidates == pytest.approx(priors([2]), abs=0.05)


def test_a_run_without_any_noise_divides_by_nothing():
    possible = chain(2)
    now = posterior(priors([2]), LOSS, [seen(possible, "1", LOSS, pairs=2, deviation=0.0)])
    assert now.candidates[1] > 0.9


def test_the_loss_of_today_is_that_which_was_measured_as_far_as_it_is_near_the_recorded_one():
    possible = chain(1)
    now = posterior(priors([1]), LOSS, [seen(possible, "0", 0.8 * LOSS, pairs=15)])
    assert now.loss == pytest.approx(0.8 * LOSS, rel=0.05)


def test_the_next_comparison_splits_the_probability_most_evenly():
    now = Posterior((0.2, 0.2, 0.3, 0.3), 0.0, LOSS)
    assert next_comparison(now, chain(4)) == "2"
    assert next_comparison(Posterior((0.1, 0.1, 0.1, 0.7), 0.0, LOSS), chain(4)) == "3"


def test_an_end_is_named_only_where_it_is_sure():
    possible = chain(2)
    assert ending(Posterior((SURE - 0.01, 0.06), 0.0, LOSS), possible) == ""
    assert ending(Posterior((SURE, 0.05), 0.0, LOSS), possible) == "named"
    assert ending(Posterior((0.02, 0.03), SURE, LOSS), possible) == "none"


def test_candidates_that_no_comparison_tells_apart_are_named_together():
    possible = {"0": frozenset({0, 1, 2}), "2": frozenset({2})}
    now = Posterior((0.5, 0.46, 0.04), 0.0, LOSS)
    assert (ending(now, possible), most_probable(now, possible)) == ("named", (0, 1))


def test_candidates_that_nothing_compares_are_not_told_from_the_machine():
    assert ending(Posterior((0.5, 0.1), 0.4, LOSS), {}) == "undecided"
    assert ending(Posterior((0.5, 0.02), 0.48, LOSS), {"1": frozenset({1})}) == "undecided"


@pytest.mark.parametrize(
    ("deviation", "runs"), [(0.0, 4), (LOSS / 4, 4), (LOSS / 2, 8), (LOSS, 24), (2 * LOSS, 30)]
)
def test_noisier_programs_have_longer_comparisons(deviation, runs):
    assert runs_for(LOSS, deviation) == runs


def test_the_noise_of_runs_replaces_that_of_nights():
    quiet = [PairedEvidence(frozenset(), 12, 0.0, 0.01)] * 3
    assert wanted_runs(LOSS, [], LOSS) == 24
    assert wanted_runs(LOSS, quiet, LOSS) == 4


@pytest.mark.parametrize(("many", "steps"), [(1, 1), (2, 2), (3, 2), (7, 3), (64, 7)])
def test_commits_take_as_many_comparisons_as_halving_does(many, steps):
    assert comparisons_without_noise(priors([many]), chain(many)) == steps


def test_set_ups_are_compared_one_after_the_other():
    possible = {name: frozenset({number}) for number, name in enumerate("abc")}
    assert comparisons_without_noise(priors([1, 1, 1]), possible) == 3


def trial(seed: int, many: int, deviations: float, culprit: int | None) -> int | None:
    """Return the candidate that is named, None for none, where runs have noise from *seed*."""
    rng, found, possible = random.Random(seed), [], chain(many)  # noqa: S311 - the same each time
    noise = LOSS / deviations
    for _ in range(100):
        now = posterior(priors([many]), LOSS, found)
        if how := ending(now, possible):
            return most_probable(now, possible)[0] if how == "named" else None
        name = next_comparison(now, possible)
        pairs = wanted_runs(LOSS, found, noise) // 2
        shown = LOSS if culprit is not None and culprit in possible[name] else 0.0
        values = [rng.gauss(shown, noise) for _ in range(pairs)]
        mean = math.fsum(values) / pairs
        spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (pairs - 1))
        found.append(PairedEvidence(possible[name], pairs, mean, spread))
    return -1


@pytest.mark.parametrize("deviations", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("many", [2, 16])
def test_the_named_candidate_is_the_culprit_in_95_of_100(many, deviations):
    """The seeds are fixed: which trials err is always the same."""
    answers = [trial(seed, many, deviations, seed % many) for seed in range(100)]
    assert sum(answer == seed % many for seed, answer in enumerate(answers)) >= 95


@pytest.mark.parametrize("deviations", [1.0, 2.0, 4.0])
def test_nobody_is_named_for_a_loss_that_does_not_come_back(deviations):
    assert sum(trial(seed, 8, deviations, None) is not None for seed in range(100)) <= 5
