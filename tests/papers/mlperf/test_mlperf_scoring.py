"""The olympic mean, and which runs it takes."""

import math

import pytest

from pytest_mlhpc.papers.mlperf.results import olympic


@pytest.mark.parametrize(
    ("times", "seconds", "dropped", "spread"),
    [
        ([9.0, 1.0, 5.0, 4.0, 6.0], 5.0, (1.0, 9.0), 0.2),
        ([3.0, 1.0, 2.0], 2.0, (1.0, 3.0), None),
        ([2.0, None, 4.0, 3.0], 3.5, (2.0, None), 1 / 7),
    ],
    ids=["of five", "of three the middle one", "a run that did not converge is the slowest"],
)
def test_fastest_and_slowest_are_left_out(times, seconds, dropped, spread):
    score = olympic(times)
    assert (score.seconds, score.dropped) == (seconds, dropped)
    assert score.counted == tuple(sorted(one for one in times if one not in dropped))
    assert score.spread == pytest.approx(spread)
    assert (score.runs, score.lost) == (len(times), times.count(None))


TOO_FEW = "{} of the 3 runs that an olympic mean takes"
TOO_MANY_LOST = "2 of {} runs did not converge; a result allows one"


@pytest.mark.parametrize(
    ("times", "why"),
    [
        *((times, TOO_FEW) for times in ([], [1.0], [1.0, 2.0], [1.0, None])),
        *(([2.0, None, 4.0, lost, 3.0], TOO_MANY_LOST) for lost in (None, math.nan, math.inf)),
    ],
)
def test_fewer_runs_that_converged_have_no_result(times, why):
    score = olympic(times)
    assert (score.seconds, score.why) == (None, why.format(len(times)))
