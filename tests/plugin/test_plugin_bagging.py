"""An ensemble as a suite's test, by a real pytest on this machine: record, outcome and exit code, also where a base model dies."""

import os
import signal

import pytest
from inner_sessions import data
from running_suites import LIMIT_S, wait_for

pytestmark = pytest.mark.servers  # base models are processes that import torch


#: In the environment of the process that trains the second base model.
SECOND = "MLHPC_BASE_MODEL=1"


@pytest.fixture(scope="module")
def session(shared_suite):
    """Train two ensembles, one after the other; kill a base model of the second. Return exit code and output."""
    shared_suite.file("systems.yaml", data("suites/one_size.yaml"))
    shared_suite.write(data("suites/ensembles.py.txt"))
    with shared_suite.start("-rA", "test_suite.py") as process:
        wait_for(lambda: shared_suite.records() or process.poll() is not None)
        wait_for(lambda: shared_suite.processes(SECOND) or process.poll() is not None)
        for pid in shared_suite.processes(SECOND):
            os.kill(pid, signal.SIGKILL)
        output, _ = process.communicate(timeout=LIMIT_S)
    return process.returncode, output


@pytest.fixture(scope="module")
def to_quality(shared_suite):
    """Train an ensemble that reaches its target, and one that misses it. Return the output."""
    shared_suite.file("systems.yaml", data("suites/one_size.yaml"))
    shared_suite.write(data("suites/ensembles_to_quality.py.txt"), name="test_to_quality.py")
    with shared_suite.start("-rA", "test_to_quality.py") as process:
        output, _ = process.communicate(timeout=4 * LIMIT_S)
    return output


def metrics_of(record):
    return {metric["name"]: metric["value"] for metric in record["measurement"]["metrics"]}


def test_an_ensemble_is_trained_recorded_and_passes(session, shared_suite):
    assert "PASSED test_suite.py::test_whole[local:cpu]" in session[1], session[1]
    record = shared_suite.record("test_whole")
    metrics = metrics_of(record)
    assert (record["verdict"], record["measurement"]["ranks"]) == ("unjudged", 2)
    assert (metrics["base_models"], metrics["base_models_failed"]) == (2, 0)
    assert metrics["ensemble_quality"] <= metrics["base_model_quality"]
    assert "bagging=[2,1]" in record["definition"].replace(" ", "")


def test_a_base_model_that_is_killed_is_named_and_the_rest_counts(session, shared_suite):
    code, output = session
    assert code == 1, output  # the test says that none may fail
    assert "base_models_failed" in output
    record = shared_suite.record("test_killed")
    metrics = metrics_of(record)
    assert (metrics["base_models"], metrics["base_models_failed"]) == (1, 1)
    assert metrics["ensemble_quality"] == metrics["base_model_quality"]
    alive, dead = record["measurement"]["per_rank"]
    assert alive.get("failed") is None
    assert dead["failed"].startswith(
        "base model 1 failed: worker_killed: the process that trained it was killed by SIGKILL"
    )
    (event,) = alive["events"]
    assert (event["key"], event["metadata"]["base_model"]) == ("base_model_failed", 1)
    assert (
        record["measurement"]["samples"] == sum(rank["samples"] for rank in (alive, dead)) == alive["samples"]
    )


def test_an_ensemble_that_reaches_its_target_is_recorded_with_its_rounds(to_quality, shared_suite):
    assert "PASSED test_to_quality.py::test_reached[local:cpu]" in to_quality, to_quality
    record = shared_suite.record("test_reached")
    metrics = metrics_of(record)
    assert metrics["quality"] == metrics["ensemble_quality"] <= 0.124
    assert metrics["ensemble_rounds"] == metrics["epochs"] >= 1
    assert metrics["time_to_train"] > metrics["training_time"] > 0
    assert "until=quality" in record["definition"]
    keys = [event["key"] for event in record["measurement"]["per_rank"][0]["events"]]
    assert keys.count("eval_error") == metrics["ensemble_rounds"]


def test_an_ensemble_that_misses_its_target_fails_as_one_model_does(to_quality, shared_suite):
    assert "target_missed: rank " in to_quality, to_quality
    assert "the ensemble's eval_error is 0." in to_quality
    assert shared_suite.record("test_missed")["verdict"] == "target_missed"
