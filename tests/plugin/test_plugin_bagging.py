"""An ensemble as a suite's test, by a real pytest on this machine: record, outcome and exit code, also where a base model dies."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest
from running_suites import LIMIT_S, wait_for

pytestmark = pytest.mark.servers  # base models are processes that import torch

TESTS = """
ensemble = pytest.mark.train(
    "cosmoflow", devices=2, bagging=(2, 1), input_size=16, layers=2, base_channels=4, steps=4, warmup=1, judge=False
)
@ensemble
def test_whole(run):
    assert run["effective_throughput"].value > 0
    assert run["base_models_failed"].value == 0

@ensemble
def test_killed(run):
    assert run["base_models_failed"].value == 0
"""
#: As this machine is for a user, but of one size everywhere: each rank has a core.
SYSTEMS = """
schema: 1
systems:
  local:
    description: this machine
    partitions:
      cpu: {scheduler: local, accelerator: cpu, preset: smoke, nodes: {cores: 2}, max_jobs: 1}
"""
#: Names the processes of one session among all of this machine.
MARK = "MLHPC_TEST_BAGGING"


@pytest.fixture(scope="module")
def session(shared_suite):
    """Train two ensembles, one after the other; kill a base model of the second. Return exit code and output."""
    shared_suite.file("systems.yaml", SYSTEMS)
    shared_suite.write(TESTS)
    environment = {**os.environ, MARK: str(shared_suite.state)}
    with shared_suite.start("-rA", env=environment) as process:
        wait_for(lambda: shared_suite.records() or process.poll() is not None)
        wait_for(lambda: base_models(1, str(shared_suite.state)) or process.poll() is not None)
        for pid in base_models(1, str(shared_suite.state)):
            os.kill(pid, signal.SIGKILL)
        output, _ = process.communicate(timeout=LIMIT_S)
    return process.returncode, output


@pytest.fixture
def trained(session, shared_suite):
    """Return the record of a test and its metrics."""

    def record_of(test: str):
        (record,) = [one for one in shared_suite.records() if f"::{test}[" in one["node_id"]]
        return record, {metric["name"]: metric["value"] for metric in record["measurement"]["metrics"]}

    return record_of


def base_models(number: int, mark: str) -> list[int]:
    """Return the processes that train a base model of the session with *mark*."""
    variables = {f"{MARK}={mark}".encode(), f"MLHPC_BASE_MODEL={number}".encode()}
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if variables <= set((process / "environ").read_bytes().split(b"\0")):
                found.append(int(process.name))
    return found


def test_an_ensemble_is_trained_recorded_and_passes(session, trained):
    assert "PASSED test_suite.py::test_whole[local:cpu]" in session[1], session[1]
    record, metrics = trained("test_whole")
    assert (record["verdict"], record["measurement"]["ranks"]) == ("unjudged", 2)
    assert (metrics["base_models"], metrics["base_models_failed"]) == (2, 0)
    assert metrics["ensemble_quality"] <= metrics["base_model_quality"]
    assert "bagging=[2,1]" in record["benchmark"].replace(" ", "")


def test_a_base_model_that_is_killed_is_named_and_the_rest_counts(session, trained):
    code, output = session
    assert code == 1, output  # the test says that none may fail
    assert "base_models_failed" in output
    record, metrics = trained("test_killed")
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
