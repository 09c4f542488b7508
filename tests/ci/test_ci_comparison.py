"""What a change did, as data and as Markdown."""

import re
from dataclasses import replace

import pytest
from worlds import DEFINITION, measurement, record

from pytest_mlhpc.ci.comparison import (
    BenchmarkTrouble,
    CommitComparison,
    MetricRow,
    compare,
    fenced,
    marker,
    render,
)
from pytest_mlhpc.judge.baseline_files import Entry
from pytest_mlhpc.report.morning import Morning, MorningItem
from pytest_mlhpc.store.record import RecordedVetting


def compared(*records, accepted=100.0, nights=()):
    entry = Entry(accepted, "samples/s", "higher", 0.05, DEFINITION) if accepted else None
    return compare(records, lambda _key, _epoch: entry, lambda _key, _epoch, limit: nights[-limit:])


def test_a_figure_is_compared_with_the_accepted_one_and_with_the_last_nights():
    (found,) = compared(record(measurement=measurement(90.0)), nights=(1.0, 97.0, 99.0, 100.0, 101.0, 102.0))
    (row,) = found.rows
    less = pytest.approx(-0.1)
    assert (row.accepted, row.change, row.nightly, row.nights, row.nightly_change) == (
        100.0,
        less,
        100.0,
        5,
        less,
    )


def test_of_what_should_be_low_less_is_better():
    (found,) = compared(record(measurement=measurement(90.0, unit="s", better="lower")))
    assert found.rows[0].change == pytest.approx(0.1)


def test_a_figure_of_another_definition_than_the_accepted_one_is_compared_with_none():
    (found,) = compared(record(definition="resnet50 steps=20"))
    assert [(row.accepted, row.change) for row in found.rows] == [(None, None)]


def test_without_accepted_value_or_nights_there_is_only_the_figure():
    (found,) = compared(record(), accepted=None)
    assert (found.rows[0].change, found.rows[0].nightly_change) == (None, None)
    assert "| 100 samples/s |  |  |  |  | passed |" in render(found)


def test_each_system_and_commit_has_a_comparison_of_its_own():
    other = record(3, system="archer2", commit="a" * 40)
    found = compared(record(1, commit="a" * 40), record(2, commit="b" * 40), other)
    assert [one.system + one.commit[0] for one in found] == ["archer2a", "cirrusa", "cirrusb"]


def test_what_did_not_pass_is_listed_with_the_judges_reason():
    slow = record(1, verdict="regressed", explanation=("rate 90 samples/s: 10 % below 100",))
    broken = record(2, verdict="out_of_memory", measurement=None, failure="out_of_memory: rank 3\n  log: /x")
    (found,) = compared(slow, broken)
    texts = (
        "1 regressed, 1 out of memory",
        "rate 90 samples/s: 10 % below 100",
        "out_of_memory: rank 3",
        "MLHPC_ACCEPT",
    )
    assert [text for text in texts if text not in render(found)] == []


def test_a_note_begins_with_the_page_of_its_commit_in_the_order_of_the_morning():
    found = [
        record(1, verdict="improved", node_id="t.py::better"),
        record(2, verdict="never_scheduled", failure="never_scheduled: Priority", node_id="t.py::queued"),
        record(3, verdict="regressed", explanation=("rate: 10 % below 100",), node_id="t.py::slow"),
        record(4, verdict="suspect", node_id="t.py::perhaps"),
        record(5, vetting=RecordedVetting("quick", 9.0, unfit={"n3": "slow clock"})),
    ]
    (comparison,) = compared(*(replace(one, commit="c0ffee" * 6) for one in found))
    lines = comparison.page.lines()
    assert fenced("\n".join(lines)) in render(comparison)
    assert lines[0] == "commit c0ffeec0ffee on cirrus: 5 of 5 measured"
    begins = [line.partition(":")[0] for line in lines[1:] if not line.startswith(" ")]
    assert begins == ["regressed", "never_scheduled", "nodes out", "watching", "improved"]
    assert lines[1:3] == ["regressed: t.py::slow", "  rate: 10 % below 100"]


def test_what_is_worst_comes_first():
    found = {"c": ("passed", 0.0), "b": ("regressed", -0.1), "a": ("regressed", -0.3)}
    rows = tuple(MetricRow(name, "rate", "samples/s", how, 1.0, 1.0, by) for name, (how, by) in found.items())
    lines = [line for line in render(CommitComparison("x", "", rows)).splitlines() if line.startswith("| `")]
    assert [line[3] for line in lines] == ["a", "b", "c"]


@pytest.mark.parametrize(
    "hostile",
    [
        "/close", "a\n/close", "`/merge", "@all", "<script>alert(1)</script>", "a|b", "```\n/close\n```", "![x](http://evil/)",
    ],
)  # fmt: skip
def test_nothing_in_names_or_texts_is_obeyed(hostile):
    row = MetricRow(hostile, hostile, hostile, hostile, 1.0)
    trouble = BenchmarkTrouble(hostile, "regressed", (hostile, hostile))
    page = Morning("change", hostile, counts={hostile: 1}, act_now=(MorningItem(hostile, hostile, hostile),))
    text = render(CommitComparison(hostile, hostile, (row,), (trouble,), page))
    text = re.sub(r"(?ms)^(`{3,})text\n.*?^\1$", "", text)  # blocks of code
    assert text.count("<!--") == 1
    text = re.sub(r"`[^`\n]*`", "", text.replace(marker(hostile), ""))  # code within lines
    assert not re.search(r"(?m)^\s*/|@|<|!\[|://", text)


def test_a_comment_of_thousands_of_benchmarks_stays_readable():
    rows = tuple(MetricRow(f"test{at}", "rate", "samples/s", "passed", 1.0) for at in range(5000))
    text = render(CommitComparison("x", "", rows))
    assert "4900 more are in the job's artefacts." in text
    assert len(text) < 50_000
