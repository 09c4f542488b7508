"""Rows of the report: figures beside their nights, bands, change points, what is left out."""

import math

import pytest
from made_nights import DAY_NS, FIRST_NS, benchmark, definition, night, series
from page_content import nights, page_of

from pytest_mlhpc.history.events import new_event
from pytest_mlhpc.judge.baseline_files import Entry
from pytest_mlhpc.store.text import iso


def steady(count, level=100.0):
    return [level * (1 + 0.004 * ((number * 7) % 5 - 2)) for number in range(count)]


def only_row(*made, **more):
    (bench,) = page_of(*made, **more).benches
    (row,) = bench.rows
    return bench, row


def test_each_night_has_its_figure_and_gaps_and_infinities_have_none():
    bench, row = only_row(series(nights(4), [1.0, math.nan, 3.0, math.inf]), more=[night(1)])
    assert row.values == (1.0, None, 3.0, None)
    assert [one.id for one in bench.nights] == ["r0", "r1", "r2", "r3"]


def test_one_night_makes_a_row_without_change_points():
    _bench, row = only_row(series(nights(1), [5.0]))
    assert (row.values, row.shifts, row.newest) == ((5.0,), (), 5.0)


@pytest.mark.parametrize(
    ("fields", "benches"),
    [
        ({"device_model": ""}, [(1, "passed passed passed worker_killed")]),
        (
            {"device_model": "", "benchmark": benchmark("test_other")},
            [(1, "passed passed passed"), (0, "worker_killed")],
        ),
    ],
    ids=[
        "of its benchmark, though it knows no device",
        "of a bench of its own where its benchmark never ran",
    ],
)
def test_a_failure_stands_among_the_nights(fields, benches):
    broken = night(9, verdict="worker_killed", failure="worker_killed: rank 3", **fields)
    found = page_of(series(nights(3), [1.0, 2.0, 3.0]), more=[broken]).benches
    assert [(len(one.rows), " ".join(each.verdict for each in one.nights)) for one in found] == benches
    assert found[-1].nights[-1].failure == "worker_killed: rank 3"


def accepted(nights, unit="samples/s", **changes):
    """An accepted value of their series."""
    return {
        nights[0].series("effective_throughput"): Entry(100.0, unit, "higher", 0.05, definition(), **changes)
    }


BEFORE = {"date": iso(FIRST_NS - DAY_NS), "reason": "learned"}


def test_the_band_is_the_judges_fence_of_nights_that_passed():
    made = nights(40)
    band = only_row(series(made, steady(40)), entries=accepted(made, **BEFORE))[1].band
    assert (band.value, band.reason) == (100.0, "learned")
    assert band.width == 0.05  # what matters, as forty quiet nights do not make it less


def test_the_band_is_the_entrys_tolerance_after_an_event():
    made = nights(40)
    event = new_event("cirrus", "", "driver 570 to 580", at_ns=FIRST_NS + 36 * DAY_NS, by="me", now_ns=0)
    page = page_of(series(made, steady(40)), entries=accepted(made, **BEFORE), events=[event])
    assert page.benches[0].rows[0].band.width == 0.05
    assert [mark.text for mark in page.marks] == ["driver 570 to 580"]


def test_an_accepted_value_in_another_unit_is_not_drawn():
    made = nights(10)
    assert only_row(series(made, steady(10)), entries=accepted(made, "items/s"))[1].band is None


def test_a_change_point_names_its_nights_and_what_else_changed_there():
    made = [night(number, changes={"driver": "570" if number < 30 else "580"}) for number in range(60)]
    values = [value * (1.0 if number < 30 else 0.9) for number, value in enumerate(steady(60))]
    _bench, row = only_row(series(made, values))
    (shift,) = row.shifts
    assert (shift.first <= 30 <= shift.last, shift.worse) == (True, True)
    assert abs(shift.size + 0.1) < 0.01
    assert "driver 570 -> 580" in shift.causes


@pytest.mark.parametrize(
    ("made", "watched"),
    [
        ([*nights(2), night(2, attempt=1), night(3, purpose="change", branch="feature")], 2),
        (nights(4, fingerprint="8 cores", system="local", purpose="manual"), 4),
    ],
    ids=["neither re-runs nor runs of branches", "manual runs of this machine"],
)
def test_all_is_shown_and_watched_are(made, watched):
    bench, row = only_row(series(made, [1.0, 2.0, 3.0, 4.0]))
    assert bench.watched == tuple(number < watched for number in range(4))
    assert row.newest == float(watched)


def test_what_changed_between_two_nights_is_listed_once():
    newer = {"driver": "580", "nccl": "2.28"}
    made = [night(0), night(1, changes=newer), night(2, changes=newer)]
    bench, _row = only_row(series(made, [1.0, 2.0, 3.0]))
    arrow = "\N{RIGHTWARDS ARROW}"
    assert bench.changed == {1: (f"driver: 570 {arrow} 580", f"nccl: absent {arrow} 2.28")}


def test_a_row_has_the_same_id_in_every_report():
    assert len({only_row(series(nights(count), [1.0] * count))[1].id for count in (2, 3)}) == 1


def test_rows_that_are_judged_come_first():
    made = nights(3)
    (bench,) = page_of(series(made, [1, 2, 3], "aaa", "s", "lower"), series(made, [1, 2, 3])).benches
    assert [row.metric for row in bench.rows] == ["effective_throughput", "aaa"]


def test_a_page_of_too_many_figures_keeps_those_that_are_judged(monkeypatch):
    monkeypatch.setattr("pytest_mlhpc.report.html.page_data.MOST_FIGURES", 5)
    made = nights(3)
    memory = series(made, [1, 2, 3], "peak_memory", "B", "lower")
    page = page_of(memory, series(made, [1, 2, 3]))
    assert [row.metric for row in page.benches[0].rows] == ["effective_throughput"]
    assert "6 figures are more than a page holds" in page.notes[0]
    chosen = page_of(memory, metrics=frozenset({"peak_memory"}))
    assert [row.metric for row in chosen.benches[0].rows] == ["peak_memory"]
