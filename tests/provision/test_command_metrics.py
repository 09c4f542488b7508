"""Metrics out of a program's output, and what can be wrong with it."""

import json
from pathlib import Path
from unittest.mock import ANY

import pytest
from allocation_worlds import run_plan
from hypothesis import given
from hypothesis import strategies as st

from pytest_mlhpc.node.protocol.plan import MetricPattern
from pytest_mlhpc.node.protocol.schema import Measurement, from_json, to_json
from pytest_mlhpc.provision import command
from pytest_mlhpc.provision.command import FinishedProgram, measure
from pytest_mlhpc.store.record import FAILURES, Failure


def finished(output, log=Path("/nowhere/output.log")):
    return FinishedProgram(0, output, 0, log, "here", 1, 2)


def run_with(pattern=r"rate: (\S+)", unit="items/s", **metrics):
    rate = MetricPattern(unit, "higher", pattern)
    return run_plan(workload="command", steps=0, metrics={"rate": rate, **metrics})


@pytest.mark.parametrize(
    ("pattern", "output", "outcome", "text"),
    [
        *[("rate: (.*)$", f"rate: {text}\n", "metric_invalid", "") for text in ("nan", "inf", "-inf", "fast", "1e999", "")],
        (r"rate: (\S+)", "rate: 0", "metric_invalid", "metric rate is 0 items/s, which cannot be"),
        (r"rate: (\S+)", "rate: -1", "metric_invalid", "metric rate is -1 items/s, which cannot be"),
        pytest.param(r"rate: (\S+)", "rate: 1\nrate: nan\nrate: 3\n", "metric_invalid", "", id="one bad one among good ones"),
        (
            None, '{"metric": "other", "value": 1}', "metric_missing",
            'the program\'s output has no metric rate: no line is like {"metric": "rate", "value": 1.0}',
        ),
        *[
            (None, json.dumps({"metric": "rate", "value": value}), "metric_invalid", "")
            for value in (True, None, [], {}, "NaN", 10**400)
        ],
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_is_named(pattern, output, outcome, text):
    found = measure(run_with(pattern), finished(output.encode()))
    assert (found.outcome, found.text.partition("; its last lines")[0]) == (
        outcome,
        text or found.text.partition("; its last lines")[0],
    )


@pytest.mark.parametrize(("unit", "text"), [("1", "-1"), ("1", "0"), ("B", "0"), ("items", "0")])
def test_counts_may_be_zero_and_plain_numbers_negative(unit, text):
    found = measure(run_with(unit=unit), finished(f"rate: {text}".encode()))
    assert isinstance(found, Measurement)


@pytest.fixture
def logged(tmp_path):
    """Return the end of a program with this output, which its log holds as well."""

    def write(output):
        (tmp_path / "output.log").write_bytes(output)
        return finished(output, tmp_path / "output.log")

    return write


def test_a_large_output_is_searched_in_a_process_of_its_own(logged):
    output = b"noise\n" * 100_000 + b"".join(b"rate: %d\n" % n for n in range(1, 10_002))
    (metric,) = measure(run_with(), logged(output)).metrics
    assert (metric.value, metric.first, metric.last) == (5001.0, 1.0, 10_001.0)
    assert len(metric.samples) <= 4096


@pytest.mark.parametrize(
    ("pattern", "output"),
    [
        pytest.param("(a*a*a*a*a*b)", b"a" * 10_000, id="one that takes for ever"),
        (r"((?:\d\d?)+) items/s", b"1" * 8000),
        (r"((?:\w|\d)+) items/s", b"1" * 8000),
        (r"(\d+)\d+\d? items/s", b"1" * 8000),
    ],
)
def test_a_doubtful_pattern_is_searched_where_it_can_be_ended(logged, monkeypatch, pattern, output):
    monkeypatch.setattr(command, "SEARCH_LIMIT_S", 0.2)
    text = "searching the output for rate took more than 0.2 s; simplify the patterns"
    assert measure(run_with(pattern), logged(output)) == Failure("metric_invalid", text, ANY)


def test_a_simple_pattern_starts_no_process(monkeypatch):
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    assert isinstance(measure(run_with(), finished(b"rate: 1\n" * 900)), Measurement)


def test_the_measurement_is_what_the_schema_says():
    found = measure(run_with(), finished(b"rate: 2"))
    assert from_json(Measurement, json.loads(json.dumps(to_json(found)))) == found


@given(st.binary(max_size=2000))
def test_any_output_is_a_measurement_or_a_failure_with_a_known_name(output):
    found = measure(run_with(other=MetricPattern("items/s", "higher")), finished(output))
    assert isinstance(found, Measurement) or found.outcome in FAILURES


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("163 GB/s", "metric rate is '163 GB/s': it is in GB/s, and the metric is declared in MB/s"),
        ("1.8us", "metric rate is '1.8us': it is in us, and the metric is declared in MB/s"),
        ("163 MB/s", 163e6),
        ("163MB/s", 163e6),
        ("163 apples", "metric rate is '163 apples', which is no finite number"),
    ],
)
def test_a_figure_that_carries_a_unit_is_of_the_declared_one_or_an_error(text, found):
    rate = MetricPattern("B/s", "higher", "rate: (.*)$", scale=1e6, declared="MB/s")
    made = measure(
        run_plan(workload="command", steps=0, metrics={"rate": rate}), finished(f"rate: {text}\n".encode())
    )
    value = made.metrics[0].value if isinstance(made, Measurement) else made.text.partition("; its last")[0]
    assert value == found


@pytest.mark.parametrize(
    ("pattern", "output", "unit"),
    [
        (r"rate: ([\d.]+)", "rate: 4.2 GB/s", "GB/s"),
        (r"rate: (\S+)", "rate: 4.2 [GiB/s], best of 3", "GiB/s"),
        (r"rate: (\S+) GB/sec", "rate: 4.2 GB/sec", "GB/sec"),
        (r"rate: (\S+)", "rate: 4.2 Gbps", "Gbps"),
        (r"rate: (\S+)", "rate: 4.2 seconds", "seconds"),
        (None, '{"metric": "rate", "value": 4.2, "unit": "GB/s"}', "GB/s"),
        (r"rate: (\S+)", "rate: 4.2 MB/s", ""),
        (r"rate: (\S+)", "rate: 4.2 MB/sec (max)", ""),
        (r"rate: (\S+)", "rate: 4.2 threads", ""),
        (r"rate: (\S+)", "rate: 4.2\ns: 3", ""),
        (None, '{"metric": "rate", "value": 4.2, "unit": "MB/s"}', ""),
    ],
)
@pytest.mark.parametrize("size", [0, 9000], ids=["short", "long"])
def test_a_unit_behind_a_figure_is_the_declared_one_or_an_error(logged, pattern, output, unit, size):
    rate = MetricPattern("B/s", "higher", pattern, scale=1e6, declared="MB/s")
    run = run_plan(workload="command", steps=0, metrics={"rate": rate})
    found = measure(run, logged(f"{output}\n{' ' * size}".encode()))
    if unit:
        assert f"it is in {unit}, and the metric is declared in MB/s" in found.text
    else:
        assert found.metrics[0].value == 4.2e6


@pytest.mark.parametrize(
    ("patterns", "missing"),
    [
        (("valid", r"^end \d$"), ""),
        (("valid", "absent", "gone"), "'absent' nor 'gone'"),
        (("^alid",), "'^alid'"),
    ],
)
def test_output_without_what_its_test_wants_is_a_failure(patterns, missing):
    run = run_plan(workload="command", steps=0, metrics={}, sanity=patterns)
    found = measure(run, finished(b"solution valid\nend 7\n"))
    if not missing:
        assert isinstance(found, Measurement)
    else:
        text = f"nothing in the program's output matches {missing} (sanity)"
        assert (found.outcome, found.text.partition(";")[0]) == ("sanity_failed", text)
