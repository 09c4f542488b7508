"""When a series is worse, since when, and when it is so no more."""

import random
from dataclasses import replace

import pytest
from alert_bads import bad, night, series
from test_expected_nights import of

from pytest_mlhpc.alert.slower_series import KnownIncidents, Rules, elsewhere, regressions, subject_of
from pytest_mlhpc.history.level_changes import WatchedSeries, with_causes
from pytest_mlhpc.history.series import Point, Series
from pytest_mlhpc.judge.changes import find
from pytest_mlhpc.store.record import SeriesKey

KEY = SeriesKey("cirrus", "standard", "default", "", "a", "rate")
NOTHING_KNOWN = KnownIncidents({}, {})


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
    return with_causes(WatchedSeries(Series(KEY, "1/s", better, judged, tuple(points))), find(values))


def tonight(one, reruns=(), known=NOTHING_KNOWN):
    """Return how bad the series is after its last night, None if it is not."""
    by_night = {(KEY, str(len(one.series.points) - 1)): reruns} if reruns else {}
    found = regressions([one], by_night, known, night(len(one.series.points) - 0.8), Rules())
    return next(iter(found.values()), None)


SLOW_NIGHT = [*levels((100, 60)), 94.0]
CONFIRMED, REFUTED, HALVED = (94.2, 93.8, 94.1), (100.1, 99.8, 100.3), (50.1, 49.9, 50.0)
ACCEPTED = KnownIncidents({}, {subject_of(KEY): night(60)})
FRESH = replace(NOTHING_KNOWN, fresh=True)
AGAIN = [*levels((100, 60), (94, 25)), *levels((88, 5), seed=5)]

#: Figures, what else is so of the series, what else is known -> whether the series is worse tonight.
NIGHTS = {
    "a quiet series": (levels((100, 60)), {}, {}, False),
    "a slow night that re-runs do not confirm": (SLOW_NIGHT, {}, {"reruns": REFUTED}, False),
    # The judge compares with what was accepted, and fails the test; since when it is so nobody here can know.
    "a regression without any night before": ([50.0], {"regressed": {0}}, {"reruns": HALVED}, False),
    "a regression without a better night before": (
        [50.0, 50.1],
        {"regressed": {0, 1}},
        {"reruns": HALVED},
        False,
    ),
    "more of a time": (levels((10, 60), (11, 5)), {"better": "lower"}, {}, True),
    "less of a time": (levels((10, 60), (9, 5)), {"better": "lower"}, {}, False),
    "a metric without a direction": (levels((100, 60), (80, 5)), {"better": "none"}, {}, False),
    "a metric that no test fails by": (levels((100, 60), (80, 5)), {"judged": False}, {}, False),
    "what was accepted": (levels((100, 60), (94, 25)), {}, {"known": ACCEPTED}, False),
    "what is worse than was accepted": (AGAIN, {}, {"known": ACCEPTED}, True),
    "for a new book, what changed two months ago": (levels((100, 60), (94, 50)), {}, {"known": FRESH}, True),
    "for a new book, what is older": (levels((100, 60), (94, 70)), {}, {"known": FRESH}, False),
    "the end of a better level": (levels((100, 60), (105, 30), (100, 8)), {}, {}, True),
    "the end of a better level that was accepted": (
        levels((100, 60), (105, 30), (100, 8)),
        {},
        {"known": KnownIncidents({}, {subject_of(KEY): night(97)})},
        False,
    ),
    "the end of a better week": (levels((100, 60), (105, 7), (100, 8)), {}, {}, False),
    "the end of a better level, refuted": (
        levels((100, 60), (105, 30), (100, 8)),
        {},
        {"reruns": (105.2, 104.9)},
        False,
    ),
    "the end of a better level, long ago": (levels((100, 60), (105, 30), (100, 20)), {}, {}, False),
    "one figure": ([1.0], {}, {}, False),
    "zeros": ([0.0] * 40, {}, {}, False),
    "three figures": (levels((100, 3)), {}, {}, False),
}


@pytest.mark.parametrize(("values", "series", "more", "worse"), NIGHTS.values(), ids=NIGHTS)
def test_whether_a_series_is_worse_tonight(values, series, more, worse):
    assert (tonight(watched(values, **series), **more) is not None) == worse


def test_a_drop_that_re_runs_confirm_is_told_the_same_night():
    bad = tonight(watched(SLOW_NIGHT, regressed={60}), reruns=CONFIRMED)
    assert bad.last_ns == night(60)
    assert bad.worse_by == pytest.approx(0.06, abs=0.01)


def test_a_drop_that_nobody_re_ran_is_told_after_some_nights_and_dated_right():
    bad = tonight(watched(levels((100, 60), (95, 4))))
    assert abs(bad.last_ns - night(60)) <= night(1) - night(0)


def after(values, opened):
    """Return how bad a series is that was so before."""
    return tonight(watched(values), known=KnownIncidents({subject_of(KEY): opened}, {}))


@pytest.mark.parametrize(
    ("before", "since", "worse_by"),
    [
        ((94, 6), (94, 40), 0.06),
        ((60, 6), (90, 14), 0.1),
        ((94, 10), (80, 5), 0.2),
        ((97.5, 8), (97.5, 80), 0.025),
    ],
    ids=["its level stays", "half of a large loss is back", "it grows worse", "it lasts long"],
)
def test_an_open_regression_stays_though(before, since, worse_by):
    values = levels((100, 60), before)
    opened = tonight(watched(values))
    for seed in range(4, 7):
        left = after([*values, *levels(since, seed=seed)], opened)
        assert left.worse_by == pytest.approx(worse_by, abs=0.02)


def test_a_regression_is_over_when_its_level_is_back():
    values = levels((100, 60), (94, 6))
    assert after([*values, *levels((100, 3), seed=4)], tonight(watched(values))) is None


def test_a_false_alarm_is_taken_back_after_two_good_nights():
    opened = tonight(watched(SLOW_NIGHT, regressed={60}), reruns=CONFIRMED)
    assert after([*SLOW_NIGHT, *levels((100, 1), seed=5)], opened) is not None
    assert after([*SLOW_NIGHT, *levels((100, 2), seed=5)], opened) is None


def test_a_node_is_named_if_all_nights_since_ran_on_it_and_few_before():
    nodes = ["n1", "n2", "n3"] * 20 + ["n7"] * 5
    for where, named in ((nodes, ("n7",)), (["n1"] * 65, ())):
        assert tonight(watched(levels((100, 60), (94, 5)), nodes=where)).nodes == named


def test_the_same_benchmark_elsewhere_needs_less_evidence_but_not_none():
    values = [*levels((100, 60)), *levels((97.3, 2), seed=5)]
    assert not regressions([watched(values)], {}, NOTHING_KNOWN, night(61.2), Rules(), 1e-6)
    told = bad(series("a", "rate", "alps"), since=60)
    assert [one.subject.system for one in elsewhere([watched(values)], {}, [told], 0.015)] == ["cirrus"]
    assert elsewhere([watched(levels((100, 62)))], {}, [told], 0.015) == []
    assert elsewhere([watched(values)], {}, [bad(series("a", "rate"), since=60)], 0.015) == []


@pytest.mark.parametrize(
    ("rerun", "text"),
    [
        ((), "noise looks like this less than once in"),
        (CONFIRMED, "confirmed by re-runs, noise looks like this less"),
    ],
)
def test_a_loss_says_how_often_noise_looks_like_it(rerun, text):
    assert text in tonight(watched([*SLOW_NIGHT[:-1], *levels((90, 3)), 90.0]), reruns=rerun).reason


def test_more_series_and_fewer_false_alarms_ask_for_more_certainty():
    one = watched([*levels((100, 60)), *levels((96.6, 3), seed=5)])
    quiet = replace(one, series=replace(one.series, points=one.series.points[:60]), changes=(), shifts=())
    others = [
        replace(quiet, series=replace(quiet.series, key=replace(KEY, benchmark=f"b{at}")))
        for at in range(300)
    ]
    now = night(62.2)
    assert regressions([one], {}, NOTHING_KNOWN, now, Rules())
    assert not regressions([one, *others], {}, NOTHING_KNOWN, now, Rules(), false_alarms=0.001)


def test_no_series_are_good():
    assert regressions([], {}, NOTHING_KNOWN, 0, Rules()) == {}
