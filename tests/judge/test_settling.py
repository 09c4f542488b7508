"""Series without accepted baseline: new for eight nights, judged by their level afterwards."""

import math

import pytest
from worlds import DEFINITION, inputs, measurement, spec

from pytest_mlhpc.judge.changes import Attempts
from pytest_mlhpc.judge.judge import failure_of, judge
from pytest_mlhpc.judge.rules import settle
from pytest_mlhpc.node.protocol.schema import MetricValue
from pytest_mlhpc.store.record import Epoch, Verdict

METRIC = MetricValue("rate", 100.0, "samples/s", "higher")
EPOCH = Epoch(DEFINITION, "EPYC")
EIGHT = [100.0, 100.4, 99.6, 100.2, 99.8, 100.1, 99.9, 100.0]


def nights(*values):
    return [Attempts(value) for value in values]


@pytest.mark.parametrize(
    ("history", "count", "level"),
    [
        ([], 0, None),
        (nights(*EIGHT[:7]), 7, None),
        (nights(*EIGHT), 8, 100.0),
        (nights(*EIGHT, 50.0, 50.0), 8, 100.0),
        ([*nights(math.nan, -1.0, *EIGHT[:7]), Attempts(90.0, regressed=True)], 7, None),
        (nights(*[100.0] * 4, *[80.0] * 4), 8, None),
        (nights(*[100.0] * 4, *[80.0] * 8), 8, 80.0),
        (nights(*[100.0] * 7, 20.0), 8, 100.0),
        ([Attempts(90.0, (100.0, 100.2))] * 8, 8, 100.0),
    ],
    ids=[
        "no night",
        "one night too few",
        "eight nights agree",
        "later nights do not move it",
        "no figures and failed nights are no clean nights",
        "a level that changed within them is waited for",
        "the first eight that agree count",
        "one outlier among them does not matter",
        "a night counts as the median of its attempts",
    ],
)
def test_a_level_is_settled_by_the_first_eight_clean_nights_that_agree(history, count, level):
    found = settle(history, METRIC, EPOCH)
    assert (found.nights, found.entry and found.entry.value) == (count, level)


def test_the_settled_entry_is_of_the_epoch_and_has_the_spread_and_the_tolerance_of_the_metric():
    entry = settle(
        nights(*EIGHT), MetricValue("rate", 1.0, "samples/s", "higher", tolerance=0.2), EPOCH
    ).entry
    assert (entry.epoch, entry.tolerance, entry.runs, entry.accepted_by) == (EPOCH, 0.2, 8, "")
    assert 0.001 < entry.spread < 0.01


def judged(value, history, *, mode="record", **options):
    terms = {"mode": mode, "reruns_allowed": 0, **options}
    return judge([measurement(value)], spec(), inputs({}, {"rate": history}, **terms))


@pytest.mark.parametrize(
    ("history", "nightly", "settling"),
    [
        ([], True, 1),
        ([], False, 0),
        (nights(*EIGHT[:2]), True, 3),
        (nights(*[100.0] * 4, *[80.0] * 4), True, 8),
    ],
)
def test_until_then_it_is_new_each_night_and_says_how_many_there_are(history, nightly, settling):
    (metric,) = judged(100.0, history, nightly=nightly).metrics
    assert (metric.verdict, metric.settling) == (Verdict.NEW, settling)


@pytest.mark.parametrize(
    ("value", "verdict", "failure"),
    [(101.0, Verdict.PASSED, None), (80.0, Verdict.REGRESSED, "regressed"), (130.0, Verdict.IMPROVED, None)],
)
def test_from_then_on_it_is_judged_without_being_accepted(value, verdict, failure):
    judgement = judged(value, nights(*EIGHT))
    assert (judgement.verdict, judgement.metrics[0].baseline) == (verdict, 100.0)
    assert getattr(failure_of(judgement), "outcome", None) == failure


def test_where_a_baseline_must_be_there_nights_do_not_stand_in_for_it():
    assert failure_of(judged(100.0, nights(*EIGHT), mode="fail")).outcome == "no_baseline"


def test_on_this_machine_the_first_run_decides_not_its_nights():
    (metric,) = judged(100.0, nights(*EIGHT), local=True).metrics
    assert (metric.verdict, metric.settling) == (Verdict.NEW, None)
