"""When Slurm is asked: seldom, and at once only where a file or a limit says so."""

from __future__ import annotations

import dataclasses

import pytest

from pytest_mlhpc.provision.slurm.rhythm import (
    AGAIN_FIRST_S,
    AGAIN_MOST_S,
    FIRST_S,
    LEAST_S,
    MOST_S,
    SILENT_S,
    URGENT_S,
    Situation,
    due_in,
)

QUIET = Situation(None, None, None, urgent=False, failures=0)


def due(since: float = 1e6, **what) -> float | None:
    return due_in(dataclasses.replace(QUIET, **what), since)


def test_while_all_runs_and_writes_nothing_is_asked():
    assert due() is None


def test_a_new_job_is_asked_about_after_a_few_seconds():
    assert due(youngest_wait=1.0) == FIRST_S - 1.0


def test_many_new_jobs_do_not_make_it_ask_more_often():
    assert due(since=2.0, youngest_wait=100.0) == LEAST_S - 2.0


@pytest.mark.parametrize(("waited", "pause"), [(5.0, LEAST_S), (600.0, 60.0), (86400.0, MOST_S)])
def test_the_longer_jobs_wait_the_seldomer_it_asks(waited, pause):
    assert due(since=0.0, longest_wait=waited) == pause


def test_a_batch_without_a_sign_of_life_is_asked_about():
    assert due(silence=3.0) == SILENT_S - 3.0


def test_what_a_file_says_is_asked_about_at_once_but_not_all_the_time():
    assert due(urgent=True) == 0.0
    assert due(since=0.5, urgent=True) == URGENT_S - 0.5


def test_a_pending_limit_is_looked_at_when_it_has_passed():
    assert due(since=0.0, longest_wait=100.0, limit_in=4.0) == 4.0


def test_a_pending_limit_of_a_job_that_cannot_be_found_makes_no_storm():
    assert due(since=0.1, limit_in=-50.0) == pytest.approx(URGENT_S - 0.1)


def test_while_slurm_does_not_answer_everything_waits_longer_and_longer():
    assert due(since=0.0, failures=1, urgent=True) == AGAIN_FIRST_S
    assert due(since=0.0, failures=2) == 2 * AGAIN_FIRST_S
    assert due(since=0.0, failures=50) == AGAIN_MOST_S


def test_an_outage_of_days_is_no_number_too_large():
    assert due(since=0.0, failures=5000) == AGAIN_MOST_S
