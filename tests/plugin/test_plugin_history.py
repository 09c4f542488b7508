"""History as a session meets it: events that are named, InfluxDB that is asked for and cannot be had."""

from __future__ import annotations

import time

import pytest

from pytest_mlhpc.history.events import add, new_event

pytestmark = pytest.mark.servers  # sessions of pytest

SUITE = """
@script(f"echo rate: {os.environ.get('RATE', '100')}")
def test_it(run, baseline):
    assert run >= baseline
"""


def test_a_regression_names_the_event_that_was_noted_since_the_last_good_run(suite, monkeypatch):
    suite.write(SUITE)
    suite.run("--no-rerun").assert_outcomes(passed=1)
    now_ns = time.time_ns()
    add(suite.state, new_event("local", "", "driver 570 to 580", at_ns=now_ns, by="me", now_ns=now_ns))
    monkeypatch.setenv("RATE", "50")
    result = suite.run("--no-rerun")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*noted on *: driver 570 to 580 (event *)*"])


def test_influx_without_an_address_starts_nothing(suite, monkeypatch):
    monkeypatch.delenv("MLHPC_INFLUX_URL", raising=False)
    suite.write(SUITE)
    result = suite.run("--history", "influx")
    assert result.ret == 4
    assert "MLHPC_INFLUX_URL" in result.stdout.str() + result.stderr.str()
    assert suite.started() == []


def test_an_influx_that_does_not_answer_is_told_once_and_fails_nothing(suite, monkeypatch):
    monkeypatch.setenv("MLHPC_INFLUX_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("MLHPC_INFLUX_PUSH", "no")
    suite.write(SUITE)
    suite.run().assert_outcomes(passed=1)
    result = suite.run("--history", "influx")
    result.assert_outcomes(passed=1)
    said = result.stdout.str()
    assert said.count("history is read from the local store, as InfluxDB failed: ") == 1


def test_another_place_in_the_ini_file_is_refused_with_those_that_are(suite):
    suite.write(SUITE)
    suite.pytester.makeini("[pytest]\nmlhpc_history = elsewhere\n")
    result = suite.run()
    assert result.ret == 4
    result.stderr.fnmatch_lines(["*mlhpc_history: 'elsewhere' is none of local, influx*"])
