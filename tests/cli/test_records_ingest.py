"""`mlhpc records ingest`: what it stores and says; the forms of its sources are in tests/history/test_foreign_runs.py."""

import json
import subprocess
import sys

import pytest
from cli_calls import mlhpc  # noqa: F401 - a fixture

from pytest_mlhpc.store.store import read_records


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A file of 60 nights, 20 of them with a tenth less, and what stands beside them."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "nights.jsonl"
    path.write_text("".join(map(line_of, range(60))))
    return path


def line_of(night):
    value = (90 if night >= 40 else 100) + night % 3 / 10
    time = f"2026-{8 + night // 30:02d}-{1 + night % 30:02d}T03:00Z"
    return (
        json.dumps({"time": time, "benchmark": "x", "metric": "rate", "value": value, "unit": "MB/s"}) + "\n"
    )


def test_nights_of_another_tool_have_a_history_at_once(mlhpc, source):
    said = mlhpc("records", "ingest", "--jsonl", source, "--system", "cirrus").out
    assert said.startswith(
        "60 records stored, 0 there already: 1 benchmark of cirrus, 2026-08-01T03:00:00Z to 2026-09-30"
    )
    assert "  mlhpc history changes --since 2026-08-01\n" in said
    found = mlhpc("history", "changes", "--since", "2026-08-01", code=1).out
    assert "rate: 10" in found
    assert "since 2026-09-11 03:00 UTC" in found


def test_a_run_is_stored_once_however_often_it_is_read(mlhpc, source, state_dir):
    mlhpc("records", "ingest", "--jsonl", source, "--system", "cirrus")
    with source.open("a") as file:
        file.write(line_of(59) + line_of(5).replace("100", "101"))
    said = mlhpc("records", "ingest", "--jsonl", source, "--system", "cirrus").out
    assert said.startswith("1 record stored, 61 there already")
    records = list(read_records(state_dir))
    assert len({record.id for record in records}) == len(records) == 61
    assert {(record.purpose, record.verdict) for record in records} == {("nightly", "unjudged")}
    assert len({record.session for record in records}) == 2


def test_what_was_left_out_is_said(mlhpc, source):
    source.write_text(
        '{"time": "2026-11-27", "benchmark": "x", "metrics": {"n": {"value": 1}, "a": {"value": 1, "unit": "apples"}}}\n'
        + "x\n" * 8
    )
    said = mlhpc("records", "ingest", "--jsonl", source, "--system", "s", code=1).out
    assert (
        "recorded, and not watched, as it is not known which direction is better: n; say --better METRIC=higher"
        in said
    )
    assert "left out 1 time: a: unit 'apples' is unknown" in said
    assert "nights.jsonl:2: " in said
    assert "not read: 3 more" in said


def test_programs_get_one_object(mlhpc, source):
    found = json.loads(mlhpc("records", "ingest", "--jsonl", source, "--system", "s", "--json").out)
    assert (found["stored"], found["known"], found["benchmarks"], found["systems"]) == (60, 0, ["x"], ["s"])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "name one source: --reframe PATH, --jsonl FILE, --pytest-benchmark PATH or --junit PATH"),
        (("--jsonl", "nights.jsonl", "--reframe", "nights.jsonl"), "name one source"),
        (("--jsonl", "nihgts.jsonl"), "there is no nihgts.jsonl"),
        (("--jsonl", "nights.jsonl", "--system", "local"), "give the other tool's machine a name of its own"),
        (
            ("--jsonl", "nights.jsonl", "--better", "rate=up"),
            "--better 'rate=up': write METRIC=higher|lower|none",
        ),
        (("--jsonl", "nights.jsonl", "--unit", "rate"), "--unit 'rate': write METRIC=UNIT"),
    ],
)
def test_what_cannot_be_read_is_a_usage_error(mlhpc, source, words, text):
    assert text in mlhpc("records", "ingest", *words, code=2).err


def test_what_was_killed_at_any_record_is_completed_by_the_next_call(source, state_dir, mlhpc):
    argv = [
        sys.executable,
        "-m",
        "pytest_mlhpc.cli",
        "records",
        "ingest",
        "--jsonl",
        str(source),
        "--system",
        "s",
    ]
    source.write_text(
        "".join(line_of(night).replace("x", f"x{copy}") for copy in range(40) for night in range(60))
    )
    for least in (1, 500, 1000):
        with subprocess.Popen(argv, stdout=subprocess.DEVNULL) as process:
            while process.poll() is None and lines_in(state_dir) < least:
                pass
            process.kill()
    assert lines_in(state_dir) >= 1000
    mlhpc("records", "ingest", "--jsonl", source, "--system", "s")
    records = list(read_records(state_dir))
    assert len({record.id for record in records}) == len(records) == 2400


def lines_in(state_dir):
    return sum(path.read_bytes().count(b"\n") for path in state_dir.glob("records/*/*.jsonl"))


def test_a_source_without_any_run_is_said_to_have_none(mlhpc, source):
    source.write_text("")
    assert mlhpc("records", "ingest", "--jsonl", source).out == "no run was found in it\n"
