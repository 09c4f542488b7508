"""Metrics out of a program's output, and what can be wrong with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_mlhpc.batch.plan import MetricPattern, RunPlan
from pytest_mlhpc.provision.command import Finished, measure
from pytest_mlhpc.results.failures import FAILURES, Failure
from pytest_mlhpc.results.schema import Measurement, from_json, to_json


def finished(
    output: bytes = b"", folder: Path = Path("/nowhere"), code: int = 0, dropped: int = 0
) -> Finished:
    return Finished(code, output, dropped, folder / "output.log", "here", 1, 2)


def run_plan(**metrics: MetricPattern) -> RunPlan:
    return RunPlan("run-1", "n", 0, "command", {}, 1, 1, 1, "cpu", "plain", 5.0, 0, 0, metrics=metrics)


def rate(
    pattern: str | None = r"rate: (\S+)", unit: str = "items/s", better: str = "higher"
) -> MetricPattern:
    return MetricPattern(unit, better, pattern)


def outcome(run: RunPlan, output: bytes) -> tuple[str, str]:
    found = measure(run, finished(output))
    assert isinstance(found, Failure)
    return found.outcome, found.text


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "fast", "1e999", ""])
def test_what_is_no_finite_number_is_invalid(text):
    assert outcome(run_plan(rate=rate("rate: (.*)$")), f"rate: {text}\n".encode())[0] == "metric_invalid"


@pytest.mark.parametrize("text", ["0", "-1"])
def test_a_rate_of_zero_or_less_is_invalid(text):
    assert outcome(run_plan(rate=rate()), f"rate: {text}".encode()) == (
        "metric_invalid",
        f"metric rate is {text} items/s, which cannot be",
    )


@pytest.mark.parametrize(("unit", "text"), [("1", "-1"), ("1", "0"), ("B", "0"), ("items", "0")])
def test_counts_may_be_zero_and_plain_numbers_negative(unit, text):
    found = measure(run_plan(rate=rate(unit=unit)), finished(f"rate: {text}".encode()))
    assert isinstance(found, Measurement)


def test_one_bad_sample_among_good_ones_is_not_hidden():
    assert outcome(run_plan(rate=rate()), b"rate: 1\nrate: nan\nrate: 3\n")[0] == "metric_invalid"


def test_a_missing_json_line_is_named():
    assert outcome(run_plan(rate=rate(None)), b'{"metric": "other", "value": 1}') == (
        "metric_missing",
        'metric rate is not in the output: no line is like {"metric": "rate", "value": 1.0}',
    )


@pytest.mark.parametrize("value", [True, None, [], {}, "NaN", 10**400])
def test_a_json_value_that_is_no_number_is_invalid(value):
    line = json.dumps({"metric": "rate", "value": value}).encode()
    assert outcome(run_plan(rate=rate(None)), line)[0] == "metric_invalid"


def test_a_large_output_is_searched_in_a_process_of_its_own(tmp_path):
    output = b"noise\n" * 100_000 + b"".join(b"rate: %d\n" % n for n in range(1, 10_002))
    (tmp_path / "output.log").write_bytes(output)
    found = measure(run_plan(rate=rate()), finished(output, tmp_path))
    assert isinstance(found, Measurement)
    (metric,) = found.metrics
    assert (metric.value, metric.first, metric.last) == (5001.0, 1.0, 10_001.0)
    assert len(metric.samples) <= 4096


def test_a_pattern_that_takes_for_ever_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr("pytest_mlhpc.provision.command.SEARCH_LIMIT_S", 0.5)
    output = b"a" * 10_000
    (tmp_path / "output.log").write_bytes(output)
    found = measure(run_plan(rate=rate("(a*a*a*a*a*b)")), finished(output, tmp_path))
    assert isinstance(found, Failure)
    assert found.outcome == "metric_invalid"
    assert found.text == "searching the output for rate took more than 0.5 s; simplify the patterns"


@pytest.mark.parametrize(
    "pattern", [r"((?:\d\d?)+) items/s", r"((?:\w|\d)+) items/s", r"(\d+)\d+\d? items/s"]
)
def test_a_short_output_is_searched_where_it_can_be_ended_if_the_pattern_is_doubtful(
    tmp_path, monkeypatch, pattern
):
    monkeypatch.setattr("pytest_mlhpc.provision.command.SEARCH_LIMIT_S", 0.2)
    output = b"1" * 8000
    (tmp_path / "output.log").write_bytes(output)
    found = measure(run_plan(rate=rate(pattern)), finished(output, tmp_path))
    assert isinstance(found, Failure)
    assert "took more than 0.2 s" in found.text


def test_a_simple_pattern_starts_no_process(monkeypatch):
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    assert isinstance(measure(run_plan(rate=rate()), finished(b"rate: 1\n" * 900)), Measurement)


def test_the_measurement_is_what_the_schema_says():
    found = measure(run_plan(rate=rate()), finished(b"rate: 2"))
    assert from_json(Measurement, json.loads(json.dumps(to_json(found)))) == found


@given(st.binary(max_size=2000))
def test_any_output_is_a_measurement_or_a_failure_with_a_known_name(output):
    found = measure(run_plan(rate=rate(), other=rate(None)), finished(output))
    assert isinstance(found, Measurement) or found.outcome in FAILURES
