"""What an attempt makes of what its run says and of how it ends: the outcome, and the measurement if it is one."""

import pytest

from pytest_mlhpc.errors import ProvisionError
from pytest_mlhpc.jobs.job import Attempt
from pytest_mlhpc.jobs.plan import run_plan
from pytest_mlhpc.node.protocol.lines import Message
from pytest_mlhpc.node.protocol.schema import Measurement, MetricValue, to_json


@pytest.fixture
def attempt(command):
    return Attempt(run_plan(command(), 0), 0, directory="/runs/x")


def measurement(attempt, **changes):
    run = attempt.run
    metric = MetricValue("rate", 3.0, "items/s", "higher")
    good = Measurement(
        run.run_id, run.nonce, 0, "command", "cpu", "a cpu", ("n1",), 1, 1, 0, 0, 1, 2, (metric,)
    )
    return {**to_json(good), **changes}


def metrics(**changes):
    return {"metrics": [{"name": "rate", "value": 1.0, "unit": "items/s", "better": "higher", **changes}]}


@pytest.fixture
def fail(attempt):
    """Let lines of the run arrive, and its allocation end; return the failure."""

    def deliver(*lines, error=None, run_id=""):
        for kind, body in lines:
            content = measurement(attempt, **body) if kind == "measurement" else body
            attempt.receive(Message(run_id or attempt.run.run_id, attempt.run.nonce, kind, content))
        attempt.finish(error)
        return attempt.failure

    return deliver


MEASURED = ("measurement", {})


def test_one_measurement_and_a_clean_end_is_no_failure(attempt, fail):
    assert fail(MEASURED, ("end", {"exit": [0]})) is None
    assert attempt.measurement.metric("rate").value == 3.0


@pytest.mark.parametrize(
    ("lines", "error", "failure"),
    [
        pytest.param([], None, "no_result: ", id="nothing reported"),
        pytest.param([MEASURED, MEASURED], None, "duplicate_result: ", id="a second result"),
        pytest.param(
            [MEASURED, ("end", {"exit": [0, 3]})],
            None,
            "worker_exit: a process ended with exit code 3",
            id="a bad end after a good result",
        ),
        pytest.param(
            [MEASURED, ("end", {"exit": [0, -9]})],
            None,
            "worker_killed: a process was killed by signal 9",
            id="a signal after a good result",
        ),
        pytest.param(
            [("failed", {"outcome": "loss_nan", "text": "step 3", "log": "/log"}), ("end", {"exit": [1]})],
            None,
            "loss_nan: step 3\n  log: /log",
            id="what the run said itself comes before its exit code",
        ),
        pytest.param(
            [("failed", {"outcome": "meteor", "text": "hit"})], None, "worker_exit: ", id="an unknown outcome"
        ),
        pytest.param(
            [("failed", {"outcome": "worker_exit", "text": "1"})],
            ProvisionError("node_failure", "n1 died"),
            "node_failure: n1 died",
            id="the machine's trouble is told before the run's",
        ),
    ],
)
def test_a_failure_has_its_name(fail, lines, error, failure):
    assert str(fail(*lines, error=error)).startswith(failure)


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
def test_a_result_that_is_not_one_has_a_name(attempt, fail, changes, outcome):
    assert fail(("measurement", changes)).outcome == outcome
    assert attempt.measurement is None


def test_a_line_of_another_run_is_not_believed(fail):
    assert fail(MEASURED, run_id="another").outcome == "foreign_result"
