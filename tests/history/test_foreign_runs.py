"""What other tools wrote, read as runs."""

import json
import sqlite3
from pathlib import Path

import pytest

from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.history import foreign
from pytest_mlhpc.history.foreign import ForeignNames, UnreadableRun

#: As ReFrame 4.10.4 writes it, with fewer columns.
HEADER = (
    "result|job_completion_time|environ|job_completion_time_unix|job_nodelist|jobid|name|partition|"
    "triad_value|triad_unit|triad_ref|triad_lower_thres|triad_upper_thres|"
    "lat_value|lat_unit|lat_ref|lat_lower_thres|lat_upper_thres|system"
)
GOOD = "pass|2026-11-27T02:54:27|gnu|1795748067.25|n1,n2|77|Stream %n=1|cpu|180.5|MB/s|180|-0.05|None|1.8|us|1.8|None|0.1|cirrus"
FAILED_HEADER = (
    "result|job_completion_time|environ|job_completion_time_unix|job_nodelist|jobid|name|partition|system"
)
FAILED = "fail|2026-11-27T02:54:27|gnu|1795748070|n1|78|Stream %n=1|cpu|cirrus"


@pytest.fixture
def perflog(tmp_path):
    """Write a perflog as ReFrame lays it out, and return its folder."""

    def write(*lines, end="\n"):
        path = tmp_path / "perflogs" / "cirrus" / "cpu" / "Stream.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + end)
        return tmp_path / "perflogs"

    return write


def read(reader, path, **names):
    return list(reader(path, ForeignNames(**names)))


def figures(run):
    return [(one.name, one.value, one.unit, one.better) for one in run.metrics]


def test_a_perflog_of_reframe_is_read_by_its_header(perflog):
    (run, failed) = read(foreign.reframe, perflog(HEADER, GOOD, FAILED_HEADER, FAILED))
    assert (run.benchmark, run.system, run.partition, run.environment) == (
        "Stream %n=1",
        "cirrus",
        "cpu",
        "gnu",
    )
    assert (run.time_ns, run.nodes, run.job_id) == (1795748067250000000, ("n1", "n2"), "77")
    assert figures(run) == [("triad", 180.5e6, "B/s", "higher"), ("lat", pytest.approx(1.8e-6), "s", "lower")]
    assert (failed.metrics, failed.failure) == ((), "ReFrame: fail")


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ((GOOD,), "no line before it names the columns"),
        ((HEADER, GOOD + "|more"), "has 20 columns, the header 19"),
        ((HEADER, GOOD.replace("1795748067.25", "soon")), "no date"),
        ((HEADER, GOOD.replace("1795748067.25", "-1")), "its time '-1' cannot be"),
        ((HEADER, GOOD.removesuffix("cirrus")), "names no system; give --system NAME"),
    ],
)
def test_a_line_that_is_no_run_is_named_with_its_place(perflog, lines, why):
    (found,) = read(foreign.reframe, perflog(*lines))
    assert isinstance(found, UnreadableRun)
    assert found.where.endswith(f"Stream.log:{len(lines)}")
    assert why in found.why or why == "no date"


def test_a_line_without_its_end_is_still_being_written(perflog):
    assert read(foreign.reframe, perflog(HEADER, GOOD, end="")) == []


def test_a_figure_without_known_unit_or_direction_is_reported(perflog):
    folder = perflog(HEADER, GOOD.replace("MB/s", "apples").replace("-0.05", "None"))
    (run,) = read(foreign.reframe, folder)
    assert [one.name for one in run.metrics] == ["lat"]
    assert run.notes[0].startswith("triad: unit 'apples' is unknown")
    assert run.notes[0].endswith("say --unit triad=UNIT")
    (run,) = read(foreign.reframe, folder, units={"triad": "1"})
    assert figures(run)[0] == ("triad", 180.5, "1", "none")
    (run,) = read(foreign.reframe, folder, units={"triad": "1"}, better={"triad": "higher"})
    assert figures(run)[0] == ("triad", 180.5, "1", "higher")


def test_the_database_of_reframe_gives_the_same_runs_as_its_perflogs(perflog, tmp_path):
    case = {
        "display_name": "Stream %n=1", "system": "cirrus", "partition": "cpu", "environ": "gnu", "jobid": "77", "result": "pass",
        "job_nodelist": ["n1", "n2"], "job_completion_time_unix": 1795748067.25, "uuid": "a:0:0",
        "perfvalues": {
            "cirrus:cpu:triad": [180.5, 180, -0.05, None, "MB/s", "pass"],
            "cirrus:cpu:lat": [1.8, 1.8, None, 0.1, "us", "pass"],
        },
    }  # fmt: skip
    path = tmp_path / "results.db"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE sessions(uuid TEXT, session_start_unix REAL, json_blob TEXT)")
        blob = json.dumps({"runs": [{"testcases": [case, {"name": "no time"}]}]})
        database.executemany("INSERT INTO sessions VALUES (?, ?, ?)", [("a", 1.0, blob), ("b", 2.0, "{")])
    database.close()
    run, other, damaged = read(foreign.reframe, path)
    assert [run] == read(foreign.reframe, perflog(HEADER, GOOD))
    assert other.why == "has no 'job_completion_time_unix'"
    assert damaged.where.endswith("session b")


def test_json_lines_have_one_metric_or_several(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [
        {
            "time": "2026-11-27T02:00Z",
            "benchmark": "x",
            "metric": "rate",
            "value": 3.5,
            "unit": "MB/s",
            "commit": "abc",
        },
        {
            "time": 1795748067,
            "benchmark": "y",
            "metrics": {"One Two": {"value": 2, "better": "lower"}},
            "environment": "e",
        },
        {"time": "2026-11-27", "metric": "rate", "value": 1},
        {"time": "2026-11-27", "benchmark": "z", "metric": "rate", "value": "NaN", "unit": "MB/s"},
        [1],
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + "nonsense\n")
    first, second, nameless, nothing, array, text = read(foreign.json_lines, path, system="s")
    assert (figures(first), first.commit) == ([("rate", 3.5e6, "B/s", "higher")], "abc")
    assert (figures(second), second.environment) == ([("one_two", 2.0, "1", "lower")], "e")
    assert nameless == UnreadableRun(f"{path}:3", "has no 'benchmark'")
    assert (
        nothing.failure == "it has no figure that can be recorded: rate is 'NaN', which is no finite number"
    )
    assert array == UnreadableRun(f"{path}:5", "is no JSON object")
    assert isinstance(text, UnreadableRun)


def test_files_of_pytest_benchmark_give_the_median_time(tmp_path):
    entry = {"name": "test_a", "fullname": "t.py::test_a", "stats": {"median": 0.25}}
    found = {
        "datetime": "2026-11-27T02:00:00+00:00", "machine_info": {"node": "login1"}, "commit_info": {"id": "abc"},
        "benchmarks": [entry],
    }  # fmt: skip
    (tmp_path / "0001.json").write_text(json.dumps(found))
    (tmp_path / "0002.json").write_text("{}")
    run, damaged = read(foreign.pytest_benchmark, tmp_path)
    assert (run.benchmark, run.system, run.commit) == ("t.py::test_a", "login1", "abc")
    assert figures(run) == [("time", 0.25, "s", "lower")]
    assert damaged == UnreadableRun(str(tmp_path / "0002.json"), "has no 'datetime'")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "holds no perflog (*.log); name ReFrame's folder perflogs"),
        (b"SQLite format 3\0junk", "no results.db of ReFrame"),
    ],
)
def test_what_is_none_of_reframes_is_refused(tmp_path, content, text):
    path = tmp_path / "source"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        read(foreign.reframe, Path(path))
    assert text in str(caught.value)


JUNIT = """<?xml version="1.0"?>
<testsuites><testsuite name="pytest" timestamp="2026-11-27T02:00:00+00:00" hostname="login1">
  <testcase classname="t" name="test_a" time="0.250"><properties><property name="rate" value="3.5"/><property name="who" value="me"/></properties></testcase>
  <testcase classname="t" name="test_b" time="0.1"><failure message="assert 1 == 2">long</failure></testcase>
  <testcase classname="t" name="test_c" time="0"><skipped/></testcase>
</testsuite></testsuites>
"""


def test_junit_gives_the_time_of_each_case_and_properties_that_are_figures(tmp_path):
    (tmp_path / "a.xml").write_text(JUNIT)
    (tmp_path / "b.xml").write_text(JUNIT[:200])
    (tmp_path / "c.xml").write_text("<testsuite><testcase name='x'/></testsuite>")
    run, failed, cut, timeless = read(foreign.junit, tmp_path)
    assert (run.benchmark, run.system, run.nodes) == ("t::test_a", "login1", ("login1",))
    assert figures(run) == [("time", 0.25, "s", "lower"), ("rate", 3.5, "1", "none")]
    assert (failed.metrics, failed.failure) == ((), "failure: assert 1 == 2")
    assert isinstance(cut, UnreadableRun)
    assert timeless == UnreadableRun(str(tmp_path / "c.xml"), "has no 'timestamp'")
