"""The pass over all series: what it finds, what it leaves out, and its cache, which is never believed too much."""

import contextlib
import itertools
import os
import signal
import sqlite3
from unittest.mock import patch

import pytest
from nights_of import nights, quiet, store
from worlds import measurement, record

from pytest_mlhpc.history import level_changes
from pytest_mlhpc.history.events import Event
from pytest_mlhpc.history.level_changes import Cache, Cause, NightlyQuery, cache_path, watch, worse_by
from pytest_mlhpc.history.series import LocalSource
from pytest_mlhpc.judge.changes import Change
from pytest_mlhpc.judge.fence import Detector
from pytest_mlhpc.node.protocol.schema import MetricValue
from pytest_mlhpc.store.record import SeriesKey

KEY = SeriesKey("cirrus", "standard", "default", "", "b", "rate")
DROP = [*quiet(30), *quiet(10, 93.0, 2)]
CHANGE = Change(30, 30, 30, 100.0, 93.0, -0.07, 0.999)


def look(state_dir, chosen=None, *events, cache=None):
    with contextlib.closing(LocalSource(state_dir)) as source:
        return list(watch(source, chosen, events, cache))


def test_a_drop_is_reported_in_nights_with_its_cause_and_the_event_that_was_noted(state_dir):
    records = nights(DROP, environments=[{"driver": "570"}] * 30 + [{"driver": "580"}])
    store(state_dir, records)
    event = Event("0123abcd", "cirrus", "driver 570 to 580", records[30].created_ns - 1)
    (watched,) = look(state_dir, None, event)
    (shift,) = watched.shifts
    assert (shift.at.id, shift.causes) == (records[30].id, (Cause("driver", "570", "580"),))
    assert shift.events == watched.events == (event,)
    assert (shift.worse, shift.worse_by) == (True, pytest.approx(0.07, abs=0.01))


def test_only_first_attempts_of_the_default_branch_at_night_are_watched(state_dir):
    unwatched = [{"attempt": 1}, {"purpose": "change"}, {"branch": "topic"}]
    others = [record(number, 50.0, created_ns=number, **one) for number, one in enumerate(unwatched)]
    store(state_dir, [*nights(quiet(10)), *others])
    (watched,) = look(state_dir)
    assert len(watched.series.points) == 10
    (topic,) = look(state_dir, NightlyQuery(default_branch="topic"))
    assert [point.value for point in topic.series.points] == [50.0]


def test_metrics_by_which_no_test_fails_are_left_out_where_asked(state_dir):
    loss = MetricValue("loss", 1.0, "1", "none")
    store(state_dir, [record(1, measurement=measurement(more=(loss,)))])
    assert [one.series.key.metric for one in look(state_dir)] == ["loss", "rate"]
    assert [one.series.key.metric for one in look(state_dir, NightlyQuery(judged_only=True))] == ["rate"]


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_short_histories_have_no_change(state_dir, count):
    store(state_dir, nights(quiet(count)))
    assert [one.shifts for one in look(state_dir)] == [()] * bool(count)


def test_no_more_than_the_newest_nights_are_looked_at(state_dir, monkeypatch):
    monkeypatch.setattr(level_changes, "MOST_NIGHTS", 8)
    store(state_dir, nights(DROP))
    (watched,) = look(state_dir)
    assert (len(watched.series.points), watched.shifts) == (8, ())


@pytest.mark.parametrize(
    ("before", "after", "better", "expected"),
    [(100, 95, "higher", 0.05), (100, 95, "lower", -0.05), (100, 95, "none", 0.05), (0, 1, "lower", float("inf")),
     (0, 1, "higher", float("-inf")), (0, 0, "higher", 0.0), (-2, -1, "higher", -0.5)],
)  # fmt: skip
def test_worse_is_positive(before, after, better, expected):
    assert worse_by(before, after, better) == pytest.approx(expected)


def test_the_cache_changes_no_answer_and_saves_the_computing(state_dir):
    records = nights(DROP)
    store(state_dir, records[:-1])
    store(state_dir, nights(quiet(12), benchmark="b"), session="s2")
    cache = cache_path(state_dir)
    fresh = look(state_dir)
    with patch.object(level_changes, "find_all", side_effect=level_changes.find_all) as computing:
        assert look(state_dir, cache=cache) == look(state_dir, cache=cache) == fresh
        store(state_dir, records[-1:], session="tonight")
        assert look(state_dir, cache=cache) == look(state_dir)
    assert [len(call.args[0]) for call in computing.call_args_list] == [2, 0, 1, 2]


def test_another_detector_and_other_figures_are_other_entries(tmp_path):
    path = tmp_path / "cache.sqlite"
    with contextlib.closing(Cache(path, Detector())) as cache:
        cache.put([(KEY, [1.0, 2.0], (CHANGE,))])
        assert cache.get([KEY], [[1.0, 2.0]]) == [(CHANGE,)]
        assert cache.get([KEY], [[1.0, 2.5]]) == [None]
    with contextlib.closing(Cache(path, Detector(magnitude=0.5))) as other:
        assert other.get([KEY], [[1.0, 2.0]]) == [None]


def damage_cache(path, damage, stack):
    """Put in the place of a cache what is none, or what somebody else holds."""
    if damage == "junk":
        path.write_bytes(b"no database" * 500)
        return None
    if damage == "directory":
        path.mkdir()
        return None
    if damage != "columns":
        Cache(path, Detector()).close()
    holder = stack.enter_context(contextlib.closing(sqlite3.connect(path, isolation_level=None)))
    if damage == "columns":
        holder.execute("CREATE TABLE changes (other TEXT)")
    if damage == "locked":
        holder.execute("BEGIN EXCLUSIVE")
    return holder


@pytest.mark.parametrize("damage", ["junk", "locked", "directory", "columns", "entry"])
def test_a_cache_that_cannot_be_used_costs_nothing_but_time(tmp_path, damage, monkeypatch):
    monkeypatch.setattr("pytest_mlhpc.history.level_changes.WAIT_S", 0.01)
    path = tmp_path / "cache.sqlite"
    with contextlib.ExitStack() as stack:
        holder = damage_cache(path, damage, stack)
        cache = stack.enter_context(contextlib.closing(Cache(path, Detector())))
        cache.put([(KEY, [1.0], (CHANGE,))])
        if damage == "entry":
            holder.execute("UPDATE changes SET found = '[{\"index\": 3}]'")
        usable = damage == "junk"  # it was made anew
        assert cache.get([KEY], [[1.0]]) == [(CHANGE,) if usable else None]


def rows_from(number):
    return [(SeriesKey("s", "p", "e", "", str(number + i), "m"), [float(i)], ()) for i in range(500)]


def write_for_ever(path, pipe):
    cache = Cache(path, Detector())
    for number in itertools.count(0, 500):
        cache.put(rows_from(number))
        os.write(pipe, b"%d\n" % (number + 500))


def test_a_pass_that_is_killed_leaves_a_cache_that_the_next_one_can_use(tmp_path):
    path = tmp_path / "cache.sqlite"
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            write_for_ever(path, writing)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as progress:
        written = [int(progress.readline()) for _ in range(3)][-1]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with contextlib.closing(Cache(path, Detector())) as cache:
        keys = [SeriesKey("s", "p", "e", "", str(number), "m") for number in range(written)]
        assert cache.get(keys, [[float(number % 500)] for number in range(written)]) == [()] * written
        cache.put([(KEY, [1.0], (CHANGE,))])
        assert cache.get([KEY], [[1.0]]) == [(CHANGE,)]
