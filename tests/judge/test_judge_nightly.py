"""The judge of a series with nights enough: what fails, what is suspect, and until when."""

import math
import random

import pytest
from worlds import entry, inputs, measurement, spec

from pytest_mlhpc.judge.changes import Attempts
from pytest_mlhpc.judge.judge import failure_of, judge
from pytest_mlhpc.store.record import Verdict


def noise(sigma, count, level=100.0, seed=5):
    choose = random.Random(seed)  # noqa: S311 - test data, the same each time
    return [choose.gauss(level, level * sigma) for _ in range(count)]


def quiet(count=40, level=100.0):
    return [Attempts(value) for value in noise(0.005, count, level)]


def slow(level, count, *, regressed=False):
    """Return nights at *level*, which were re-run."""
    return [Attempts(level, (level,) * 4, regressed=regressed)] * count


def judged(*figures, history, baseline=None, **options):
    """Judge tonight's figures, the first attempt's and the re-runs', after the nights of *history*."""
    runs = [one if not isinstance(one, float) else measurement(one) for one in figures]
    terms = {"series": 600, **options}
    return judge(runs, spec(), inputs({"rate": baseline or entry()}, {"rate": history}, **terms))


@pytest.mark.parametrize(
    ("figures", "history", "verdict", "reruns", "words"),
    [
        ([99.0], quiet(), Verdict.PASSED, 0, ""),
        ([90.0], quiet(), Verdict.INCONCLUSIVE, 2, "2 more re-runs are needed"),
        ([90.0, 90.2, 89.9], quiet(), Verdict.INCONCLUSIVE, 2, "2 more re-runs are needed"),
        ([90.0, 90.2, 89.9, 90.1, 90.0], quiet(), Verdict.REGRESSED, 0, "tonight, "),
        ([90.0, 100.1, 99.8], quiet(), Verdict.PASSED, 0, "2 re-runs did not agree"),
        ([95.5, 95.6, 95.4, 95.5, 95.7], quiet(), Verdict.SUSPECT, 0, "4 re-runs do not settle it; the next nights decide"),
        ([95.0, 95.1, 94.9, 95.0, 95.2], quiet() + slow(95.0, 1), Verdict.INCONCLUSIVE, 4, "4 further re-runs are needed"),
        ([95.0, 95.1, 94.9, 95.0, 95.2] + [95.0] * 4, quiet() + slow(95.0, 1), Verdict.REGRESSED, 0, "for 2 nights"),
        ([95.0] * 6 + [97.5] * 3, quiet() + slow(95.0, 1), Verdict.SUSPECT, 0, "8 re-runs do not settle it"),
        ([95.0, 95.1, 94.9, 95.0, 100.0], quiet() + slow(95.0, 1), Verdict.SUSPECT, 0, "do not settle it"),
        ([95.0, 95.1, 94.9, 97.7, 97.9], quiet() + slow(95.0, 1), Verdict.SUSPECT, 0, "do not settle it"),
        ([94.0] * 5, quiet() + slow(94.0, 2) + [Attempts(100.0)], Verdict.SUSPECT, 0, "do not settle it"),
        ([98.0, 98.1, 97.9, 98.0, 98.2], quiet() + slow(98.0, 9), Verdict.PASSED, 0, ""),
        ([120.0], quiet(), Verdict.IMPROVED, 0, ""),
        ([96.0], quiet(60) + quiet(40, 98.5) + quiet(40, 97.0) + quiet(40, 95.5), Verdict.DRIFTED, 0, "worse than the first 30"),
        ([100.0], [Attempts(value) for value in noise(0.05, 40)], Verdict.PASSED, 0, ""),
        ([90.0], [Attempts(value) for value in noise(0.05, 40)], Verdict.INCONCLUSIVE, 2, ""),
        ([100.0], [Attempts(100.0)] * 40, Verdict.PASSED, 0, ""),
        ([90.0] * 5, [Attempts(100.0)] * 40, Verdict.REGRESSED, 0, ""),
        ([90.0] * 5, [*quiet(), Attempts(math.nan), Attempts(math.inf)], Verdict.REGRESSED, 0, "tonight"),
    ],
    ids=[
        "a usual figure passes",
        "a large loss is re-run, two runs at first",
        "re-runs that agree are made all",
        "a large loss that all re-runs confirm fails the same night",
        "two re-runs at the old level end the matter",
        "a loss that just matters is suspect on its first night",
        "one that is only just certain is run again as often",
        "and fails on its second night, when these agree",
        "not while three of nine attempts lose only half of it",
        "not while a re-run is as good as ever",
        "nor while two re-runs lose only half of it",
        "nor as long as one of its nights was as good as ever",
        "a loss that does not matter passes, however certain it is",
        "a better figure passes, and says so",
        "a slow loss over months is a drift",
        "a usual figure of a noisy series passes",
        "a low figure of a noisy series is re-run",
        "a series without any noise passes",
        "and fails for a loss",
        "nights without a figure do not count",
    ],
)  # fmt: skip
def test_a_night_is_judged(figures, history, verdict, reruns, words):
    judgement = judged(*figures, history=history)
    assert (judgement.verdict, judgement.reruns_wanted) == (verdict, reruns)
    assert words in judgement.metrics[0].reason
    failed = failure_of(judgement)
    assert (failed.outcome if failed else "") == (
        verdict.value if verdict in {Verdict.REGRESSED, Verdict.DRIFTED} else ""
    )


@pytest.mark.parametrize(
    ("false_alarms", "verdict"), [(1.0, Verdict.SUSPECT), (30.0, Verdict.REGRESSED), (0.1, Verdict.SUSPECT)]
)
def test_a_site_that_accepts_more_false_alarms_is_told_of_less_certain_losses(false_alarms, verdict):
    history = [Attempts(value) for value in noise(0.02, 40)]
    judgement = judged(*[91.0] * 9, history=history, series=600 / false_alarms)
    assert judgement.verdict is verdict


LOST = quiet() + slow(90.0, 5, regressed=True)


@pytest.mark.parametrize(
    ("figures", "history", "options", "verdict", "words"),
    [
        ([90.0], LOST, {}, (Verdict.REGRESSED, 0), "for 6 nights now"),
        ([100.0], LOST, {}, (Verdict.INCONCLUSIVE, 2), "the level may be back"),
        ([100.0, 99.5, 100.4], LOST, {}, (Verdict.PASSED, 0), "the level is back, as 2 re-runs agree"),
        ([100.0, 99.5, 90.4], LOST, {}, (Verdict.REGRESSED, 0), "for 6 nights now"),
        ([100.0], LOST, {"reruns_allowed": 0}, (Verdict.REGRESSED, 0), "for 6 nights now"),
        ([100.0], LOST + slow(100.0, 2, regressed=True), {"reruns_allowed": 0}, (Verdict.PASSED, 0), ""),
        ([90.0] * 5, LOST + slow(100.0, 20), {}, (Verdict.REGRESSED, 0), "tonight"),
    ],
    ids=[
        "a loss lasts without being run again",
        "a figure at the old level is run again",
        "and ends it when re-runs agree",
        "and does not when one differs",
        "without re-runs one good night ends nothing",
        "and three nights do",
        "what was lost, mended and is lost again fails again",
    ],
)  # fmt: skip
def test_what_failed_fails_until_its_level_is_back(figures, history, options, verdict, words):
    verdict, reruns = verdict
    judgement = judged(*figures, history=history, **options)
    assert (judgement.verdict, judgement.reruns_wanted) == (verdict, reruns)
    assert words in judgement.metrics[0].reason


@pytest.mark.parametrize(
    ("options", "verdict", "words"),
    [
        ({"reruns_allowed": 0}, Verdict.SUSPECT, "no re-runs were possible"),
        ({"reruns_broken": 6, "reruns_allowed": 12}, Verdict.SUSPECT, "no re-runs were possible"),
    ],
)
def test_a_large_loss_that_no_re_run_confirms_is_suspect(options, verdict, words):
    judgement = judged(80.0, history=quiet(), **options)
    assert (judgement.verdict, judgement.reruns_wanted, failure_of(judgement)) == (verdict, 0, None)
    assert words in judgement.metrics[0].reason


@pytest.mark.parametrize(("reruns", "verdict"), [(2, Verdict.SUSPECT), (3, Verdict.REGRESSED)])
def test_with_fewer_than_three_re_runs_more_certainty_is_asked(reruns, verdict):
    history = [Attempts(value) for value in noise(0.02, 60)] + slow(93.0, 1)
    assert judged(*[93.0] * (1 + reruns), history=history, reruns_allowed=0).verdict is verdict
    worse = [Attempts(value) for value in noise(0.02, 60)] + slow(90.0, 1)
    assert judged(*[90.0] * (1 + reruns), history=worse, reruns_allowed=0).verdict is Verdict.REGRESSED


@pytest.mark.parametrize(
    ("options", "verdict", "reruns"),
    [
        ({"reruns_allowed": 1}, Verdict.INCONCLUSIVE, 1),
        ({"reruns_allowed": 9, "reruns_broken": 6}, Verdict.SUSPECT, 0),
        ({"reruns_allowed": 0}, Verdict.SUSPECT, 0),
        ({"reruns_allowed": 0, "series": 20}, Verdict.REGRESSED, 0),
    ],
    ids=[
        "as many as may be",
        "not if too many broke",
        "without them it is suspect",
        "or sure enough for the site",
    ],
)
def test_further_re_runs_are_those_that_can_be_had(options, verdict, reruns):
    history = [Attempts(value) for value in noise(0.02, 40)]
    judgement = judged(*[90.0] * 5, history=history, **options)
    assert (judgement.verdict, judgement.reruns_wanted) == (verdict, reruns)


@pytest.mark.parametrize(("before", "verdict"), [(1, Verdict.SUSPECT), (2, Verdict.REGRESSED)])
def test_without_re_runs_the_third_night_of_a_loss_is_certain(before, verdict):
    history = [*quiet(), *[Attempts(80.0)] * before]
    assert judged(80.0, history=history, reruns_allowed=0).verdict is verdict


def test_a_baseline_that_was_one_lucky_run_fails_nothing():
    judgement = judged(100.0, history=quiet(), baseline=entry(115.0))
    assert (judgement.verdict, round(judgement.metrics[0].baseline)) == (Verdict.PASSED, 100)


def test_where_lower_is_better_the_same_is_said():
    history = [Attempts(10_000 / night.value) for night in quiet()]
    runs = [measurement(10_000 / value, unit="s", better="lower") for value in (90.0, 90.2, 89.9, 90.1, 90.0)]
    judgement = judged(*runs, history=history, baseline=entry(unit="s", better="lower"))
    assert judgement.verdict is Verdict.REGRESSED


def test_with_more_series_more_certainty_is_asked():
    history = [Attempts(value) for value in noise(0.02, 60)] + slow(94.0, 2)
    figures = (94.0, 94.2, 93.9, 94.1, 94.0)
    assert judged(*figures, history=history, series=50).verdict is Verdict.REGRESSED
    assert judged(*figures, history=history, series=10_000_000).verdict is Verdict.SUSPECT


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (measurement(80.0, contention={"steal": 0.3}), "the machine was busy: the hypervisor gave 30.0%"),
        (measurement(80.0, calibration_before=40.0, calibration_after=40.0), "this machine is 20.0% slower today"),
    ],
)  # fmt: skip
def test_a_loss_that_the_machine_explains_is_inconclusive(run, words):
    judgement = judged(run, history=quiet(), local=True, baseline=entry(calibration=50.0, tolerance=0.1))
    assert (judgement.verdict, judgement.reruns_wanted) == (Verdict.INCONCLUSIVE, 0)
    assert words in judgement.metrics[0].reason


@pytest.mark.parametrize(
    ("matters", "tolerance", "verdict"),
    [
        (None, 0.05, Verdict.SUSPECT),
        (0.03, 0.05, Verdict.REGRESSED),
        (0.2, 0.05, Verdict.PASSED),
        (0.2, 0.02, Verdict.REGRESSED),
    ],
    ids=["the usual", "less matters on the partition", "only more does", "the baseline file says otherwise"],
)
def test_what_matters_is_the_partitions_unless_the_baseline_file_says_otherwise(matters, tolerance, verdict):
    figures = [95.5, 95.6, 95.4, 95.5, 95.7]
    found = judged(*figures, history=quiet(), matters=matters, baseline=entry(tolerance=tolerance))
    assert found.verdict is verdict


def month(level, count=30, *, regressed=False):
    """Return nights of half a per cent of noise, each run again."""
    return [Attempts(one, (one,) * 4, regressed=regressed) for one in noise(0.005, count, level)]


def test_a_baseline_that_a_month_of_failed_nights_disagrees_with_is_wrong_and_fails_nothing():
    before = judged(*[92.0] * 5, history=month(92.0, 29, regressed=True))
    judgement = judged(92.0, history=month(92.0, regressed=True))
    assert (before.verdict, judgement.verdict) == (Verdict.REGRESSED, Verdict.WRONG_BASELINE)
    assert failure_of(judgement) is None
    assert judgement.accept_command == (
        "mlhpc baseline accept 'suites/test_a.py::test_a[cirrus:standard]' --reason TEXT"
    )
    wrong = "(the baseline is wrong: 30 nights without a change lie at 91.97 samples/s)"
    assert judgement.explanation[0] == f"rate 92 samples/s: 8 % below 100 {wrong}"


@pytest.mark.parametrize(
    ("figures", "history", "options", "verdict"),
    [
        ([108.0], month(108.0), {}, Verdict.WRONG_BASELINE),
        ([92.0], month(92.0, regressed=True) + month(92.0, 1), {}, Verdict.PASSED),
        ([80.0] * 5, month(92.0, regressed=True) + month(92.0, 1), {}, Verdict.REGRESSED),
        ([80.0], month(92.0, regressed=True) + slow(80.0, 4, regressed=True), {}, Verdict.REGRESSED),
        ([92.0], month(100.0, 5) + month(92.0, 40, regressed=True), {}, Verdict.REGRESSED),
        ([92.0], month(92.0, 12, regressed=True) + month(84.0, 30, regressed=True), {}, Verdict.REGRESSED),
        ([97.0], month(97.0), {}, Verdict.PASSED),
        ([92.0], month(92.0, regressed=True), {"nightly": False}, Verdict.PASSED),
    ],
    ids=[
        "one that is too low is wrong as well",
        "it is said once",
        "from then on a loss below the level of the month fails",
        "and lasts",
        "a loss that began after five good nights stays red",
        "so does a month in which the level changed",
        "what does not matter is no error",
        "no other run than that of the night says it",
    ],
)
def test_a_month_is_compared_with_the_baseline(figures, history, options, verdict):
    assert judged(*figures, *[figures[0]] * (5 - len(figures)), history=history, **options).verdict is verdict
