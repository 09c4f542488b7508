"""The olympic mean, and which runs it takes."""

from __future__ import annotations

import math

import pytest

from pytest_mlhpc.mlperf.scoring import olympic


def test_fastest_and_slowest_are_left_out():
    score = olympic([9.0, 1.0, 5.0, 4.0, 6.0])
    assert score.seconds == 5.0
    assert score.dropped == (1.0, 9.0)
    assert score.kept == (4.0, 5.0, 6.0)
    assert score.spread == pytest.approx(0.2)


def test_three_runs_are_enough_for_the_middle_one():
    assert olympic([3.0, 1.0, 2.0]).seconds == 2.0
    assert olympic([3.0, 1.0, 2.0]).spread is None


@pytest.mark.parametrize("times", [[], [1.0], [1.0, 2.0], [1.0, None]])
def test_fewer_runs_have_no_result(times):
    score = olympic(times)
    assert score.seconds is None
    assert score.why == f"{len(times)} of the 3 runs that an olympic mean takes"


def test_one_run_that_did_not_converge_is_the_slowest():
    score = olympic([2.0, None, 4.0, 3.0])
    assert score.seconds == 3.5
    assert score.dropped == (2.0, None)
    assert (score.runs, score.lost) == (4, 1)


@pytest.mark.parametrize("other", [None, math.nan, math.inf])
def test_two_that_did_not_converge_leave_no_result(other):
    score = olympic([2.0, None, 4.0, other, 3.0])
    assert score.seconds is None
    assert score.why == "2 of 5 runs did not converge; a result allows one"
