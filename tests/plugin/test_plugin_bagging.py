"""An ensemble as a suite's test, by a real pytest on this machine: record, outcome and exit code, also where a base model dies."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.servers  # two base models, each a process that imports torch

TEST = """
    @pytest.mark.train(
        "cosmoflow", devices=2, bagging=(2, 1), input_size=16, layers=2, base_channels=4, steps=4, warmup=1, judge=False
    )
    def test_ensemble(run):
        assert run["effective_throughput"].value > 0
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
#: Names the processes of one test among all of this machine.
MARK = "MLHPC_TEST_BAGGING"
LIMIT_S = 180


def write(suite):
    (suite.pytester.path / "systems.yaml").write_text(SYSTEMS)
    suite.write(TEST)


def told(suite):
    (record,) = suite.records()
    metrics = {metric["name"]: metric["value"] for metric in record["measurement"]["metrics"]}
    return record, metrics


def test_an_ensemble_is_trained_recorded_and_passes(suite):
    write(suite)

    ended = suite.run()

    assert ended.ret == 0
    ended.assert_outcomes(passed=1)
    record, metrics = told(suite)
    assert (record["verdict"], record["measurement"]["ranks"]) == ("unjudged", 2)
    assert (metrics["base_models"], metrics["base_models_failed"]) == (2, 0)
    assert metrics["ensemble_quality"] <= metrics["base_model_quality"]
    assert "bagging=[2,1]" in record["benchmark"].replace(" ", "")


def test_a_base_model_that_is_killed_is_named_and_the_rest_counts(suite):
    write(suite)
    words = [sys.executable, "-m", "pytest", "-p", "no:randomly", "-p", "no:benchmark", "--system", "local"]
    session = subprocess.Popen(
        words,
        cwd=suite.pytester.path,
        env={**os.environ, MARK: str(suite.state)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    with session:
        try:
            os.kill(base_model(1, session, str(suite.state)), signal.SIGKILL)
            output = session.communicate(timeout=LIMIT_S)[0].decode()
        finally:
            session.kill()

    assert session.returncode == 1, output  # the test says that none may fail
    assert "base_models_failed" in output
    record, metrics = told(suite)
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


def base_model(number: int, session: subprocess.Popen[bytes], mark: str) -> int:
    """Wait for the process that trains a base model of the session with *mark*; return its pid."""
    wanted = {f"{MARK}={mark}".encode(), f"MLHPC_BASE_MODEL={number}".encode()}
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and session.poll() is None:
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if wanted <= set((process / "environ").read_bytes().split(b"\0")):
                    return int(process.name)
        time.sleep(0.05)
    pytest.fail(f"no process trains base model {number}")
