"""When Slurm is queried: seldom, and at once only because of a file, a limit or a silence."""

from __future__ import annotations

import pytest

from pytest_mlhpc.provision.scheduler import poll

CALM = {"youngest_wait": None, "longest_wait": None, "silence": None, "urgent": False, "failures": 0}


def due(since, **changes):
    """Return in how many seconds a query is due, the last one having been *since* seconds ago."""
    return poll.next_poll_in(poll.PollState(**{**CALM, **changes}), since)


def queries_at(until, last):
    """Return at which seconds of a silence a query is made, by one who looks twice a second and asked at *last*."""
    made = []
    for silence in [0.5 * number for number in range(int(2 * until) + 1)]:
        next_in = due(silence - last, silence=silence)
        if next_in is not None and next_in <= 0:
            made.append(silence)
            last = silence
    return made


@pytest.mark.parametrize(
    ("since", "situation", "seconds"),
    [
        pytest.param(1e6, {}, None, id="while all runs and writes nothing is asked"),
        pytest.param(1e6, {"youngest_wait": 1.0}, poll.FIRST_POLL_S - 1.0, id="a new job is asked about after a few seconds"),
        pytest.param(2.0, {"youngest_wait": 100.0}, poll.MIN_POLL_S - 2.0, id="many new jobs do not make it ask more often"),
        pytest.param(0.0, {"longest_wait": 5.0}, poll.MIN_POLL_S, id="a job that waits 5 s"),
        pytest.param(0.0, {"longest_wait": 50.0}, 10, id="a job that waits 50 s"),
        pytest.param(0.0, {"longest_wait": 300.0}, 30, id="a job that waits 5 minutes"),
        pytest.param(0.0, {"longest_wait": 600.0}, 60, id="a job that waits 10 minutes"),
        pytest.param(0.0, {"longest_wait": 1200.0}, 120, id="a job that waits 20 minutes"),
        pytest.param(0.0, {"longest_wait": 86400.0}, poll.MAX_POLL_S, id="a job that waits a day"),
        pytest.param(1e6, {"silence": 3.0}, poll.SILENT_BATCH_S - 3.0, id="a batch without a sign of life is asked about"),
        pytest.param(1e6, {"urgent": True}, 0.0, id="what a file says is asked about at once"),
        pytest.param(0.5, {"urgent": True}, poll.URGENT_POLL_S - 0.5, id="but not all the time"),
        pytest.param(0.0, {"urgent": True, "longest_wait": 3600.0}, 2, id="a reason in a file is followed in 2 s"),
        pytest.param(0.0, {"longest_wait": 100.0, "limit_in": 4.0}, 4.0, id="a pending limit is looked at once it has passed"),
        pytest.param(0.5, {"limit_in": -50.0}, poll.URGENT_POLL_S - 0.5, id="a limit of a job that cannot be found makes no storm"),
        pytest.param(0.0, {"failures": 1, "urgent": True}, poll.MIN_RETRY_S, id="after a failure it waits"),
        pytest.param(0.0, {"failures": 2}, 2 * poll.MIN_RETRY_S, id="after two failures twice as long"),
        pytest.param(0.0, {"failures": 4}, 40, id="after four failures eight times as long"),
        pytest.param(0.0, {"failures": 5, "urgent": True}, 60, id="after five failures a minute"),
        pytest.param(0.0, {"failures": 5000}, poll.MAX_RETRY_S, id="an outage of days is no number too large"),
    ],
)  # fmt: skip
def test_a_query_is_due(since, situation, seconds):
    assert due(since, **situation) == seconds


@pytest.mark.parametrize("last", [-1000.0, 0.0, 2.0, 7.0, 11.0])
def test_a_silent_batch_is_asked_about_when_two_beats_are_missed_whenever_the_last_query_was(last):
    assert queries_at(15, last)[0] == poll.SILENT_BATCH_S


@pytest.mark.parametrize(
    ("until", "last", "queries"),
    [
        pytest.param(6, -1000.0, [], id="a batch that beats every five seconds is not asked about"),
        pytest.param(45, -1000.0, [poll.SILENT_BATCH_S + poll.MIN_POLL_S * n for n in range(4)], id="a silent one at the usual pace"),
        pytest.param(20, poll.SILENT_BATCH_S - 0.5, [], id="a query just before the silence was too long is not made again at once"),
    ],
)  # fmt: skip
def test_a_silence_leads_to_queries(until, last, queries):
    assert queries_at(until, last) == queries
