"""What an attempt makes of what its run says and of how it ends: the outcome, and the measurement if it is one."""

from __future__ import annotations

import pytest

from pytest_mlhpc.errors import ProvisionError
from pytest_mlhpc.jobs.attempt import Attempt
from pytest_mlhpc.jobs.planning import run_of
from pytest_mlhpc.results.lines import Message
from pytest_mlhpc.results.schema import Measurement, Metric, to_json


@pytest.fixture
def attempt(command) -> Attempt:
    return Attempt(run_of(command(), 0), 0, directory="/runs/x")


def measurement(attempt: Attempt, **changes) -> dict:
    run = attempt.run
    metric = Metric("rate", 3.0, "items/s", "higher")
    good = Measurement(
        run.run_id, run.nonce, 0, "command", "cpu", "a cpu", ("n1",), 1, 1, 0, 0, 1, 2, (metric,)
    )
    return {**to_json(good), **changes}


def metrics(**changes) -> dict:
    return {"metrics": [{"name": "rate", "value": 1.0, "unit": "items/s", "better": "higher", **changes}]}


@pytest.fixture
def receive(attempt):
    """Let a line of the run arrive."""

    def deliver(kind: str, body: dict, run_id: str = "") -> None:
        attempt.receive(Message(run_id or attempt.run.run_id, attempt.run.nonce, kind, body))

    return deliver


def test_one_measurement_and_a_clean_end_is_no_failure(attempt, receive):
    receive("measurement", measurement(attempt))
    receive("end", {"exit": [0]})
    attempt.finish(None)
    assert attempt.failure is None
    assert attempt.measurement.metric("rate").value == 3.0


def test_nothing_reported_is_no_result(attempt):
    attempt.finish(None)
    assert attempt.failure.outcome == "no_result"


def test_a_second_result_is_a_failure(attempt, receive):
    receive("measurement", measurement(attempt))
    receive("measurement", measurement(attempt))
    assert attempt.failure.outcome == "duplicate_result"


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({"run_id": "another"}, "foreign_result"),
        ({"nonce": "another"}, "foreign_result"),
        ({"unheard": 1}, "truncated_result"),
        ({"steps": "many"}, "truncated_result"),
        (metrics(value=float("nan")), "metric_invalid"),
        (metrics(unit="parsecs"), "metric_invalid"),
    ],
)
def test_a_result_that_is_not_one_has_a_name(attempt, receive, changes, outcome):
    receive("measurement", measurement(attempt, **changes))
    attempt.finish(None)
    assert attempt.failure.outcome == outcome
    assert attempt.measurement is None


def test_a_line_of_another_run_is_not_believed(attempt, receive):
    receive("measurement", measurement(attempt), run_id="another")
    assert attempt.failure.outcome == "foreign_result"


@pytest.mark.parametrize(("code", "outcome"), [(3, "worker_exit"), (-9, "worker_killed")])
def test_a_bad_end_after_a_good_result_is_a_failure(attempt, receive, code, outcome):
    receive("measurement", measurement(attempt))
    receive("end", {"exit": [0, code]})
    attempt.finish(None)
    assert attempt.failure.outcome == outcome
    assert str(abs(code)) in attempt.failure.text


def test_what_the_run_said_itself_comes_before_its_exit_code(attempt, receive):
    receive("failed", {"outcome": "loss_nan", "text": "step 3", "log": "/log"})
    receive("end", {"exit": [1]})
    attempt.finish(None)
    assert str(attempt.failure) == "loss_nan: step 3\n  log: /log"


def test_an_unknown_outcome_is_still_a_failure(attempt, receive):
    receive("failed", {"outcome": "meteor", "text": "hit"})
    assert attempt.failure.outcome == "worker_exit"


def test_the_machines_trouble_is_told_before_the_runs(attempt, receive):
    receive("failed", {"outcome": "worker_exit", "text": "1"})
    attempt.finish(ProvisionError("node_failure", "n1 died"))
    assert attempt.failure.outcome == "node_failure"
