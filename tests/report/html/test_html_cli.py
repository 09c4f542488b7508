"""`mlhpc report`: from the store to a file; what it says, and how it ends."""

from __future__ import annotations

import time

import pytest
from page_content import content_of
from worlds import entry, measurement, record

from pytest_mlhpc.cli import main
from pytest_mlhpc.judge.baselines import BaselineBook
from pytest_mlhpc.results.record import SeriesKey
from pytest_mlhpc.results.store import Store

DAY_NS = 86_400 * 10**9


@pytest.fixture
def stored(state_dir):
    """Twelve nightly runs of one benchmark, and a broken one."""
    now = time.time_ns()
    store = Store(state_dir, "s1")
    for number in range(12):
        store.append(
            record(
                number + 1,
                created_ns=now - (12 - number) * DAY_NS,
                measurement=measurement(100.0 + number % 3),
            )
        )
    store.append(
        record(
            90,
            created_ns=now - DAY_NS // 2,
            verdict="out_of_memory",
            failure="out_of_memory: rank 1",
            measurement=None,
        )
    )
    store.close()


@pytest.fixture
def report(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def call(*words, code=0):
        found = main(["report", "--html", "out.html", *words])
        told = capsys.readouterr()
        assert found == code, told.err
        return told

    return call


def test_a_page_is_made_of_what_was_recorded(stored, report, tmp_path):
    told = report()
    assert told.out.startswith("out.html: 1 benchmarks, 1 rows, ")
    (bench,) = content_of((tmp_path / "out.html").read_text())["benches"]
    assert bench["kind"].count("3") == 1  # broken
    assert [row["metric"] for row in bench["rows"]] == ["rate"]


def test_it_can_be_written_to_standard_output(stored, report, capsys):
    assert main(["report", "--html", "-"]) == 0
    assert content_of(capsys.readouterr().out)["benches"]


def test_accepted_values_and_events_are_on_it(stored, report, tmp_path, state_dir):
    book = BaselineBook(tmp_path / "baselines", state_dir)
    made = record()
    key = SeriesKey(
        made.system, made.partition, made.environment, made.device_model, "", made.benchmark, "rate"
    )
    book.put(key, entry(101.0))
    book.save()
    assert main(["event", "add", "--system", "cirrus", "driver 570 to 580"]) == 0
    report()
    found = content_of((tmp_path / "out.html").read_text())
    assert found["benches"][0]["rows"][0]["band"][0] == 101
    assert [mark[3] for mark in found["marks"]] == ["driver 570 to 580"]


def test_nothing_recorded_writes_nothing_and_ends_with_5(report, tmp_path):
    assert "nothing is recorded" in report(code=5).err
    assert not (tmp_path / "out.html").exists()


def test_nothing_of_the_chosen_system_leaves_an_older_page_alone(stored, report, tmp_path):
    (tmp_path / "out.html").write_text("older")
    report("--system", "elsewhere", code=5)
    assert (tmp_path / "out.html").read_text() == "older"


def test_a_page_that_cannot_be_written_is_named(stored, report, tmp_path):
    (tmp_path / "out.html").mkdir()
    assert "out.html: cannot be written: Is a directory" in report(code=3).err
    assert not list(tmp_path.glob(".out.html.*"))


def test_a_damaged_baseline_file_is_a_usage_error_that_names_the_line(stored, report, tmp_path):
    (tmp_path / "baselines").mkdir()
    (tmp_path / "baselines/cirrus.yaml").write_text("schema: 1\nsystem: [\n")
    assert "cirrus.yaml:" in report(code=4).err


def test_a_time_that_is_none_is_refused(stored, report):
    assert "yesterdayish" in report("--since", "yesterdayish", code=4).err
