"""Metrics out of a program's output, and what can be wrong with it."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import ANY

import pytest
from allocation_worlds import run_plan
from hypothesis import given
from hypothesis import strategies as st

from pytest_mlhpc.node.protocol.plan import MetricPattern
from pytest_mlhpc.node.protocol.schema import Measurement, from_json, to_json
from pytest_mlhpc.provision import command
from pytest_mlhpc.provision import output_search as search_program
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


@pytest.fixture
def left(tmp_path):
    """Return the end of a program that left these files in its folder."""

    def write(**files):
        for name, text in files.items():
            (tmp_path / name.replace("_", ".")).write_text(text)
        return FinishedProgram(0, b"a word", 0, tmp_path / "output.log", "here", 1, 2, tmp_path)

    return write


def from_file(name, key=None, pattern=None, **more):
    rate = MetricPattern("items/s", "higher", pattern, file=name, key=key or "", **more)
    return run_plan(workload="command", steps=0, metrics={"rate": rate}, artifacts=(name,))


DATA = json.dumps(
    {"results": [{"rate": 1}, {"rate": 5}], "list": [2, 4, 9], "deep": {"one": "7"}, "none": None}
)


@pytest.mark.parametrize(
    ("run", "value"),
    [
        (from_file("m.json", "results.1.rate"), 5),
        (from_file("m.json", "results.*.rate"), 3),
        (from_file("m.json", "list", reduce="max"), 9),
        (from_file("m.json", "deep.one"), 7),
        (from_file("m.json", pattern=r'"one": "(\d)"'), 7),
        (from_file("m.jsonl", "rate", reduce="sum"), 3),
        (from_file("m.csv", "rate", reduce="last"), 8),
        (from_file("m.tsv", "rate"), 6),
    ],
)
def test_a_figure_is_found_in_a_file_of_the_run(left, run, value):
    finished = left(
        m_json=DATA,
        m_jsonl='{"rate": 1}\n\n{"rate": 2}\n',
        m_csv="# step, rate\n1, 4\n2,\n3, 8\n",
        m_tsv="step\trate\n1\t6\n",
    )
    found = measure(run, finished)
    assert isinstance(found, Measurement), found
    assert found.metrics[0].value == value


@pytest.mark.parametrize(
    ("run", "outcome", "text"),
    [
        (from_file("m.json", "results.rates"), "metric_missing", "metric rate: in m.json there is no 'results.rates'; there are 0, 1"),
        (from_file("m.json", "deep.one.two"), "metric_missing", "metric rate: in m.json 'deep.one' is '7', which has no 'two'"),
        (from_file("m.json", "none"), "metric_invalid", "metric rate is 'None', which is no finite number"),
        (from_file("m.json", pattern="rate: (.*)"), "metric_missing", "the file m.json has no metric rate: nothing matches rate: (.*)"),
        (from_file("bad.json", "rate"), "metric_invalid", "metric rate: bad.json cannot be read: Expecting value"),
        (from_file("m.csv", "rates"), "metric_missing", "metric rate: in m.csv there is no column 'rates'; there are step, rate"),
        (from_file("empty.csv", "rate"), "metric_missing", "metric rate: in empty.csv there is no column 'rate'; there are none"),
        (from_file("head.csv", "rate"), "metric_missing", "head.csv has no metric rate: rate has no values"),
        (from_file("gone.csv", "rate"), "metric_missing", "the program wrote no 'gone.csv' into"),
    ],
)  # fmt: skip
def test_a_figure_that_a_file_has_not_is_named_with_what_it_has(left, run, outcome, text):
    finished = left(m_json=DATA, bad_json="", m_csv="step,rate\n1,4\n", empty_csv="", head_csv="rate\n")
    found = measure(run, finished)
    assert (found.outcome, found.text.startswith(text)) == (outcome, True), found.text
    assert found.text.endswith("; its last lines:\na word")


TESTS = """
import time
from pytest_mlhpc import Metric, program
from helper import rate_of

def sound(run):
    assert "word" in run.output, "no word"
    return True

class TestIt:
    @program("x", Metric("rate", extract=lambda run: rate_of(run.json("m.json")), unit="items/s"),
        Metric("words", extract=lambda run: [len(run.output.split()), len(run.errors)], unit="1", better="none"),
        sanity=[sound, "a"], artifacts="m.json")
    def test_it(self, run): pass

@program("x", Metric("rate", extract=lambda run: run.json("m.json")["lost"], unit="items/s"))
def test_raises(run): pass

@program("x", Metric("rate", extract=lambda run: None, unit="items/s"))
def test_none(run): pass

@program("x", Metric("rate", extract=lambda run: time.sleep(60), unit="items/s"))
def test_hangs(run): pass

@program("x", Metric("rate", extract=lambda run: print("noise") or "3 items/s", unit="items/s"), sanity=lambda run: run.output == "other")
def test_unsound(run): pass

@program("x", Metric("rate", extract=lambda run: print("noise") or "3 items/s", unit="items/s"))
def test_prints(run): pass

@program("x", Metric("rate", extract=lambda run: print("noise") or "3 s", unit="items/s"))
def test_other_unit(run): pass
"""


@pytest.fixture
def called(left, tmp_path):
    """Call the functions of a test and return what was measured, or the failure."""

    def call(test, *names, checks=False):
        folder = tmp_path / "package"
        folder.mkdir()
        (folder / "test_functions.py").write_text(TESTS)
        (folder / "helper.py").write_text("def rate_of(data):\n    return data['results'][1]['rate']\n")
        metrics = {name: MetricPattern("items/s", "higher", extract=True) for name in names or ("rate",)}
        run = run_plan(
            workload="command", steps=0, metrics=metrics, artifacts=("m.json",), checks=checks,
            functions=f"{folder}/test_functions.py::{test}",
        )  # fmt: skip
        finished = left(m_json=DATA, errors_log="four")
        (tmp_path / "output.log").write_text("a word")
        return measure(run, finished)

    return call


def test_functions_of_a_test_find_figures_and_say_whether_the_run_is_sound(called):
    found = called("TestIt::test_it", "rate", "words", checks=True)
    assert isinstance(found, Measurement), found
    assert [metric.samples for metric in found.metrics] == [(5.0,), (2.0, 4.0)]


@pytest.mark.parametrize(
    ("test", "outcome", "text"),
    [
        ("test_raises", "metric_invalid", "metric rate: its function failed: KeyError: 'lost' (test_functions.py:16: "),
        ("test_none", "metric_invalid", "metric rate: its function failed: TypeError: it returned None, expected a number or a list"),
        ("test_unsound", "sanity_failed", "<lambda> returned nothing that is true"),
        ("test_other_unit", "metric_invalid", "metric rate is '3 s': it is in s, and the metric is declared in items/s"),
        ("test_gone", "metric_invalid", "/test_functions.py::test_gone: AttributeError: module 'test_functions' has no attribute"),
    ],
)  # fmt: skip
def test_a_function_that_fails_is_named_with_its_line(called, test, outcome, text):
    found = called(test, checks=test == "test_unsound")
    assert (found.outcome, text in found.text) == (outcome, True), found.text


def test_what_a_function_prints_is_no_answer(called):
    assert called("test_prints").metrics[0].value == 3


def test_a_function_that_takes_for_ever_is_ended(called, monkeypatch):
    monkeypatch.setattr(command, "FUNCTIONS_LIMIT_S", 1.0)
    found = called("test_hangs")
    assert found.text.startswith("calling the functions of the test took more than 1 s")


def test_an_endless_search_ends_itself_where_the_session_that_asked_was_killed(tmp_path):
    (tmp_path / "log").write_text("a" * 40 + "b")
    request = {"path": str(tmp_path / "log"), "patterns": {"rate": "(a|aa)+$"}, "limit_s": 0}
    ended = subprocess.run(
        [sys.executable, "-I", "-S", search_program.__file__],
        input=json.dumps(request),
        text=True,
        check=False,
    )
    assert ended.returncode == -signal.SIGALRM
