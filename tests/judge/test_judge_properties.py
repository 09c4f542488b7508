"""What must hold for any figures: no pass without a number, worse is never better, both directions alike."""

import itertools
import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import entry, inputs, measurement, spec

from pytest_mlhpc.judge import fence
from pytest_mlhpc.judge.changes import Attempts
from pytest_mlhpc.judge.fence import SMALLEST, make_fence
from pytest_mlhpc.judge.judge import failure_of, judge
from pytest_mlhpc.node.protocol.schema import Measurement, MetricValue
from pytest_mlhpc.store.record import Verdict

RATES = st.floats(1.0, 300.0)
HISTORY = st.lists(st.floats(80.0, 120.0), max_size=35).map(tuple)


def level(judgement):
    """0 passes, 1 is undecided, 2 fails."""
    levels = {Verdict.PASSED: 0, Verdict.IMPROVED: 0, Verdict.INCONCLUSIVE: 1}
    return levels.get(judgement.verdict, 2)


def judged(runs, history, *, allowed=4, local=False, update=False, book=None):
    """Judge runs, which are measurements or figures of one, against an entry of 100 or what *book* has."""
    attempts = [one if isinstance(one, Measurement) else measurement(one) for one in runs]
    entries = {"rate": entry()} if book is None else book
    nights = {"rate": [one if isinstance(one, Attempts) else Attempts(one) for one in history]}
    terms = {"local": local, "mode": "update" if update else "record", "reruns_allowed": allowed}
    return judge(attempts, spec(), inputs(entries, nights, **terms))


def broken_run(value):
    metric, run = MetricValue("rate", 1.0, "samples/s", "higher"), measurement()
    vars(metric)["value"] = value
    vars(run)["metrics"] = (metric,)
    return run


@given(
    value=st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -1.0]),
    history=HISTORY,
    local=st.booleans(),
    update=st.booleans(),
    book=st.sampled_from([None, {}]),
    reruns=st.lists(RATES, max_size=4),
)
def test_what_is_no_positive_number_never_passes(value, history, reruns, book, *, local, update):
    judgement = judged([broken_run(value), *reruns], history, local=local, update=update, book=book)
    assert judgement.verdict is Verdict.UNJUDGED
    assert failure_of(judgement).outcome == "metric_invalid"


@given(first=RATES, second=RATES, history=HISTORY, reruns=st.lists(RATES, max_size=4), local=st.booleans())
def test_a_worse_value_never_gets_a_better_verdict(first, second, history, reruns, local):
    better, worse = max(first, second), min(first, second)
    good = judged([better, *reruns], history, allowed=0, local=local)
    bad = judged([worse, *reruns], history, allowed=0, local=local)
    assert level(good) <= level(bad)


@given(value=st.floats(85.0, 115.0), history=HISTORY, reruns=st.lists(st.floats(70.0, 120.0), max_size=4))
def test_a_rate_and_a_time_that_mirror_each_other_get_one_verdict(value, history, reruns):
    higher = judged([value, *reruns], history)
    runs = [measurement(200.0 - one, unit="s", better="lower") for one in (value, *reruns)]
    book = {"rate": entry(unit="s", better="lower")}
    lower = judged(runs, tuple(200.0 - one for one in history), book=book)
    width = higher.metrics[0].width
    limits = (width, fence.SHARE * width, SMALLEST)
    drops = [abs(one - 100.0) / 100.0 for one in (value, *reruns)]
    near_a_limit = any(abs(drop - limit) < 1e-9 for drop in drops for limit in limits)
    assert near_a_limit or (lower.verdict, lower.reruns_wanted) == (higher.verdict, higher.reruns_wanted)


@given(values=st.lists(RATES, min_size=1, max_size=5), history=HISTORY, allowed=st.integers(0, 12))
def test_no_more_re_runs_are_wanted_than_are_allowed_and_they_come_to_an_end(values, history, allowed):
    judgement = judged(values, history, allowed=allowed)
    assert 0 <= judgement.reruns_wanted <= allowed
    assert len(values) - 1 + judgement.reruns_wanted <= 2 * fence.RERUNS
    if judgement.reruns_wanted:
        assert judgement.verdict is Verdict.INCONCLUSIVE


@given(history=st.lists(st.floats(50.0, 150.0), max_size=60))
def test_a_fence_is_never_narrower_than_the_smallest_change(history):
    assert make_fence(history, 100.0, 0.001).width >= SMALLEST


@pytest.mark.parametrize("slow", list(itertools.product([False, True], repeat=4)))
def test_the_quorum_is_three_of_four_and_stopping_early_never_changes_the_answer(slow):
    drops = [0.06 if one else 0.0 for one in slow]
    final = fence.confirmed(drops, 0.05)
    assert final is (sum(slow) >= 3)
    made: list[float] = []
    while (answer := fence.confirmed(made, 0.05)) is None:
        made = drops[: len(made) + fence.reruns_needed(made, 0.05)]
    assert answer is final


@pytest.mark.parametrize(
    ("drops", "answer"),
    [
        ([0.012] * 4, False),
        ([0.016] * 4, True),
        ([0.012, 0.013, 0.014], False),  # the fourth cannot lift the median any more
        ([0.012, 0.017, 0.050], None),
    ],
)
def test_confirmations_below_the_smallest_change_confirm_nothing(drops, answer):
    assert fence.confirmed(drops, 0.015) is answer


def nights(noise, drop_at, drop, count):
    """Judge *count* nights as a session would; return the nights that failed. Re-runs redraw the noise."""
    learnt = statistics.median(100.0 * noise() for _ in range(5))
    history: list[Attempts] = []
    failed = []
    for night in range(count):
        true = 100.0 * (1.0 - drop if night >= drop_at else 1.0)
        values = [true * noise()]
        while True:
            judgement = judged(values, history, allowed=12, book={"rate": entry(learnt)})
            if not judgement.reruns_wanted:
                break
            values += [true * noise() for _ in range(judgement.reruns_wanted)]
        regressed = judgement.verdict is Verdict.REGRESSED
        history.append(Attempts(values[0], tuple(values[1:]), regressed=regressed))
        if failure_of(judgement) is not None:
            failed.append(night)
    return failed


def test_six_thousand_nights_of_white_noise_raise_hardly_an_alarm():
    choose = random.Random(20261121)  # noqa: S311 - a simulation, the same each time
    alarms = sum(len(nights(lambda: choose.gauss(1.0, 0.01), 999, 0.0, 150)) for _ in range(40))
    assert alarms <= 6  # 0.1 per 100 nights


def test_a_drop_of_five_percent_is_found_on_its_first_night_or_the_next():
    choose = random.Random(20261122)  # noqa: S311 - a simulation, the same each time
    delays = []
    for _ in range(20):
        found = [night - 40 for night in nights(lambda: choose.gauss(1.0, 0.01), 40, 0.05, 54) if night >= 40]
        delays.append(found[0] if found else 99)
    assert statistics.median(delays) <= 1
    assert sum(delay < 14 for delay in delays) >= 0.98 * len(delays)
