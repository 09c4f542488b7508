"""When a series is worse, since when, and when it is so no more."""

import random
from dataclasses import replace

import pytest
from alert_bads import night
from test_expected_nights import of

from pytest_mlhpc.alert.slower import Known, Rules, companion, regressions, subject_of
from pytest_mlhpc.history.nightly import told
from pytest_mlhpc.history.series import Point, Series
from pytest_mlhpc.judge.changes.detect import find
from pytest_mlhpc.results.record import SeriesKey

KEY = SeriesKey("cirrus", "standard", "default", "EPYC", "", "a", "rate")
NOTHING_KNOWN = Known({}, {})


def levels(*parts, seed=3, sigma=0.008):
    """Return figures of (level, nights)."""
    dice = random.Random(seed)  # noqa: S311 - test data, the same each time
    return [level * dice.gauss(1, sigma) for level, count in parts for _ in range(count)]


def watched(values, *, better="higher", regressed=(), nodes=None, judged=True):
    points = []
    for number, value in enumerate(values):
        verdict = "regressed" if number in regressed else "passed"
        where = (nodes[number],) if nodes else ()
        points.append(Point(of(number, verdict=verdict, session=str(number), nodes=where), value))
    return told(Series(KEY, "1/s", better, judged, tuple(points)), find(values))


def now_of(values):
    return night(len(values) - 0.8)


def tonight(one, reruns=(), known=NOTHING_KNOWN):
    """Return how bad the series is after its last night, None if it is not."""
    by_night = {(KEY, str(len(one.series.points) - 1)): reruns} if reruns else {}
    found = regressions([one], by_night, known, now_of(one.series.points), Rules())
    return next(iter(found.values()), None)


def after(values, opened, **changes):
    return tonight(watched(values, **changes), known=Known({subject_of(KEY): opened}, {}))


def test_a_quiet_series_is_good():
    assert tonight(watched(levels((100, 60)))) is None


def test_a_drop_that_re_runs_confirm_is_told_the_same_night():
    one = watched([*levels((100, 60)), 94.0], regressed={60})
    bad = tonight(one, reruns=(94.2, 93.8, 94.1))
    assert bad.last_ns == night(60)
    assert bad.worse_by == pytest.approx(0.06, abs=0.01)


def test_a_slow_night_that_re_runs_do_not_confirm_is_good():
    assert tonight(watched([*levels((100, 60)), 94.0]), reruns=(100.1, 99.8, 100.3)) is None


def test_of_a_regression_without_a_better_night_before_history_says_nothing():
    """The judge compares with what was accepted, and fails the test; since when it is so nobody here can know."""
    assert tonight(watched([50.0], regressed={0}), reruns=(50.1, 49.9, 50.0)) is None
    assert tonight(watched([50.0, 50.1], regressed={0, 1}), reruns=(50.1, 49.9, 50.0)) is None


def test_a_drop_that_nobody_re_ran_is_told_after_some_nights_and_dated_right():
    bad = tonight(watched(levels((100, 60), (95, 4))))
    assert abs(bad.last_ns - night(60)) <= night(1) - night(0)


def test_of_times_and_latencies_more_is_worse():
    assert tonight(watched(levels((10, 60), (11, 5)), better="lower")) is not None
    assert tonight(watched(levels((10, 60), (9, 5)), better="lower")) is None


def test_a_metric_without_a_direction_or_that_no_test_fails_by_is_never_bad():
    assert tonight(watched(levels((100, 60), (80, 5)), better="none")) is None
    assert tonight(watched(levels((100, 60), (80, 5)), judged=False)) is None


def test_an_open_regression_stays_until_its_level_is_back():
    values = levels((100, 60), (94, 6))
    opened = tonight(watched(values))
    assert after([*values, *levels((94, 40), seed=4)], opened) is not None
    assert after([*values, *levels((100, 3), seed=4)], opened) is None


def test_a_regression_that_lasts_longer_than_any_window_stays_open():
    opened = tonight(watched(levels((100, 60), (97.5, 8))))
    for seed in range(5):
        assert after([*levels((100, 60), (97.5, 8)), *levels((97.5, 80), seed=seed)], opened) is not None


def test_half_of_a_large_loss_is_not_back():
    values = levels((100, 60), (60, 6))
    opened = tonight(watched(values))
    left = after([*values, *levels((90, 14), seed=4)], opened)
    assert left.worse_by == pytest.approx(0.1, abs=0.02)


def test_what_grows_worse_is_seen():
    values = levels((100, 60), (94, 10))
    opened = tonight(watched(values))
    left = after([*values, *levels((80, 5), seed=4)], opened)
    assert left.worse_by == pytest.approx(0.2, abs=0.02)


def test_a_false_alarm_is_taken_back_after_two_good_nights():
    values = [*levels((100, 60)), 94.0]
    opened = tonight(watched(values, regressed={60}), reruns=(94.2, 93.8, 94.1))
    assert after([*values, *levels((100, 1), seed=5)], opened) is not None
    assert after([*values, *levels((100, 2), seed=5)], opened) is None


def test_what_was_accepted_is_no_history_any_more():
    values = levels((100, 60), (94, 25))
    known = Known({}, {subject_of(KEY): night(60)})
    assert tonight(watched(values), known=known) is None
    assert tonight(watched([*values, *levels((88, 5), seed=5)]), known=known) is not None


def test_a_new_book_takes_in_what_changed_two_months_ago_and_nothing_older():
    fresh = replace(NOTHING_KNOWN, fresh=True)
    assert tonight(watched(levels((100, 60), (94, 50))), known=fresh) is not None
    assert tonight(watched(levels((100, 60), (94, 70))), known=fresh) is None


def test_a_node_is_named_if_all_nights_since_ran_on_it_and_few_before():
    nodes = ["n1", "n2", "n3"] * 20 + ["n7"] * 5
    bad = tonight(watched(levels((100, 60), (94, 5)), nodes=nodes))
    assert bad.nodes == ("n7",)
    always = tonight(watched(levels((100, 60), (94, 5)), nodes=["n1"] * 65))
    assert always.nodes == ()


def test_a_companion_needs_less_evidence_but_not_none():
    values = [*levels((100, 60)), 96.5]
    assert tonight(watched(values)) is None
    assert companion(watched(values), night(59), night(60), 0.02) is not None
    assert companion(watched(levels((100, 61))), night(59), night(60), 0.02) is None


@pytest.mark.parametrize("values", [[1.0], [0.0] * 40, levels((100, 3))])
def test_series_without_enough_to_say_are_good(values):
    assert tonight(watched(values)) is None


def test_no_series_are_good():
    assert regressions([], {}, NOTHING_KNOWN, 0, Rules()) == {}
