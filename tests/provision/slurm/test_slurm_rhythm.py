"""When Slurm is asked: seldom, and soon where files say nothing any more."""

import pytest

from pytest_mlhpc.provision.slurm.rhythm import LEAST_S, SILENT_S, Situation, due_in

CALM = {"youngest_wait": None, "longest_wait": None, "silence": None, "urgent": False, "failures": 0}


def situation(**changed):
    return Situation(**{**CALM, **changed})


def asked_at(silences, last):
    """Return at which of *silences* (seconds without heartbeat) a query is made, the last one having been at *last*."""
    asked = []
    for silence in silences:
        due = due_in(situation(silence=silence), silence - last)
        if due is not None and due <= 0:
            asked.append(silence)
            last = silence
    return asked


def every_half_second(until):
    return [0.5 * number for number in range(int(2 * until) + 1)]


def test_nothing_is_asked_while_batches_run_and_beat():
    assert due_in(situation(), 1000.0) is None


def test_a_batch_that_beats_every_five_seconds_is_not_asked_about():
    assert asked_at(every_half_second(6), last=-1000.0) == []


@pytest.mark.parametrize("last", [-1000.0, 0.0, 2.0, 7.0, 11.0])
def test_a_silent_batch_is_asked_about_when_two_beats_are_missed_whenever_the_last_query_was(last):
    assert asked_at(every_half_second(15), last)[0] == SILENT_S


def test_a_batch_that_stays_silent_is_asked_about_at_the_usual_pace_and_not_at_every_look():
    assert asked_at(every_half_second(45), last=-1000.0) == [
        SILENT_S + LEAST_S * number for number in range(4)
    ]


def test_a_query_made_just_before_the_silence_was_too_long_is_not_made_again_at_once():
    assert asked_at(every_half_second(20), last=SILENT_S - 0.5) == []


@pytest.mark.parametrize(
    ("waited", "pause"), [(5, 10), (50, 10), (300, 30), (600, 60), (1200, 120), (36000, 120)]
)
def test_queries_for_waiting_jobs_grow_rarer(waited, pause):
    assert due_in(situation(longest_wait=float(waited)), 0.0) == pause


def test_a_reason_in_a_file_is_followed_within_two_seconds():
    assert due_in(situation(urgent=True, longest_wait=3600.0), 0.0) == 2


@pytest.mark.parametrize(("failures", "pause"), [(1, 5), (2, 10), (4, 40), (5, 60), (50, 60)])
def test_a_scheduler_that_does_not_answer_is_left_alone_for_longer_and_longer(failures, pause):
    assert due_in(situation(failures=failures, urgent=True), 0.0) == pause
