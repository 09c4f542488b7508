"""The judge's history: the same from the local store and from any other source, and of one baseline epoch."""

import contextlib
import itertools
import random
import time
from dataclasses import replace

import pytest
from nights_of import DAY, nights, quiet, store
from worlds import DEFINITION, measurement, record

from pytest_mlhpc.errors import StoreError
from pytest_mlhpc.history.events import add, new_event
from pytest_mlhpc.history.judge_inputs import JudgeHistory
from pytest_mlhpc.history.series import LocalSource
from pytest_mlhpc.judge.changes import Attempts
from pytest_mlhpc.judge.evidence import change_lines, machine_lines
from pytest_mlhpc.store.index import Index
from pytest_mlhpc.store.record import Epoch, SeriesKey
from pytest_mlhpc.store.text import iso

KEY = SeriesKey("cirrus", "standard", "default", "", "suites/test_a.py::test_a", "rate")
LOCAL = SeriesKey("cirrus", "standard", "default", "machine", KEY.benchmark, "rate")
EPOCH = Epoch(DEFINITION, "EPYC")


class Dead:
    """A source that nobody can reach."""

    def nights(self, *_, **__):
        raise StoreError("http://influx:8086: no answer")

    series = events = nights


def nights_since(past, key, epoch, accepted, **more):
    """Return the nights since a baseline was accepted."""
    return past.nights(key, epoch, past.since_ns(key, accepted), **more)


@pytest.fixture
def index(state_dir):
    with contextlib.closing(Index(state_dir)) as opened:
        yield opened


def local(state_dir, index):
    return JudgeHistory(state_dir, lambda: index, None, pytest.fail)


def other(state_dir):
    """A past that reads a source, as it would read InfluxDB."""
    index = lambda: pytest.fail("the local index was asked")  # noqa: E731
    return contextlib.closing(JudgeHistory(state_dir, index, LocalSource(state_dir), pytest.fail))


def values(nights):
    return [night.value for night in nights]


def test_a_night_has_its_re_runs_and_says_whether_the_test_failed(state_dir, index):
    at = {"created_ns": time.time_ns() - DAY}
    again = [record(number, 96.0 + number, attempt=number, verdict="regressed", **at) for number in (1, 2)]
    later = {"created_ns": time.time_ns(), "session": "01890000-0000-7000-8000-bbbbbbbbbbbb"}
    store(state_dir, [record(0, 96.0, verdict="regressed", **at), *again, record(3, **later)])
    expected = [Attempts(96.0, (97.0, 98.0), regressed=True), Attempts(100.0)]
    assert nights_since(local(state_dir, index), KEY, EPOCH, "") == expected


def test_a_night_on_a_busy_machine_is_none(state_dir, index):
    store(state_dir, [record(1, verdict="inconclusive"), record(2), record(3, verdict="suspect")])
    assert values(nights_since(local(state_dir, index), KEY, EPOCH, "")) == [100.0, 100.0]


def test_both_ways_give_the_same_nights(state_dir, index):
    choose = random.Random(3)  # noqa: S311 - test data, the same each time
    records = [
        record(
            number, branch=choose.choice(["main", "main", "topic"]), verdict=choose.choice(["passed", "regressed", "improved"]),
            attempt=choose.choice([0, 0, 0, 1]), purpose=choose.choice(["nightly", "nightly", "manual", "change"]),
            definition=choose.choice([DEFINITION, DEFINITION, "resnet50 steps=20"]),
            fingerprint=choose.choice(["", "machine"]),
            measurement=measurement(50 + choose.random(), calibration_before=choose.choice([None, 40.0, 60.0])),
        )
        for number in range(800)
    ]  # fmt: skip
    store(state_dir, records)
    since = iso(records[40].created_ns)
    with other(state_dir) as past:
        for key, reference in itertools.product((KEY, LOCAL), (None, 55.0)):
            found = nights_since(local(state_dir, index), key, EPOCH, since, reference=reference)
            assert found == nights_since(past, key, EPOCH, since, reference=reference)
            assert len(found) > 30


def test_an_event_starts_a_new_epoch(state_dir, index):
    records = nights(quiet(20))
    store(state_dir, records)
    for system, partition in (("cirrus", ""), ("other", ""), ("cirrus", "elsewhere")):
        at_ns = records[15].created_ns if (system, partition) == ("cirrus", "") else time.time_ns()
        add(state_dir, new_event(system, partition, "driver", at_ns=at_ns, by="me", now_ns=time.time_ns()))
    figures = [one.measurement.metrics[0].value for one in records if one.measurement]
    assert values(nights_since(local(state_dir, index), KEY, EPOCH, "")) == figures[15:]
    with other(state_dir) as past:
        assert values(nights_since(past, KEY, EPOCH, "")) == figures[15:]


def test_figures_of_another_definition_are_of_another_epoch(state_dir, index):
    records = nights(quiet(20))
    changed = [replace(one, definition="resnet50 steps=20") for one in records[15:]]
    store(state_dir, [*records[:15], *changed])
    figures = [one.measurement.metrics[0].value for one in records]
    for past in (
        local(state_dir, index),
        JudgeHistory(state_dir, lambda: index, LocalSource(state_dir), pytest.fail),
    ):
        assert values(nights_since(past, KEY, EPOCH, "")) == figures[:15]
        assert values(nights_since(past, KEY, Epoch("resnet50 steps=20", "EPYC"), "")) == figures[15:]
        assert nights_since(past, KEY, Epoch(DEFINITION, "EPYC 2"), "") == []
        assert past.newest(KEY) == Epoch("resnet50 steps=20", "EPYC")
        assert past.newest(LOCAL) is None
        past.close()


def test_an_event_to_come_changes_nothing_yet(state_dir, index):
    store(state_dir, nights(quiet(5)))
    now_ns = time.time_ns()
    add(state_dir, new_event("cirrus", "", "maintenance", at_ns=now_ns + DAY, by="me", now_ns=now_ns))
    assert len(nights_since(local(state_dir, index), KEY, EPOCH, "")) == 5
    assert local(state_dir, index).noted("cirrus", "standard", 0) == []


def test_a_source_that_fails_is_reported_once_and_the_local_store_asked(state_dir, index):
    store(state_dir, nights(quiet(5)))
    add(state_dir, noted := new_event("cirrus", "", "driver", at_ns=1, by="me", now_ns=2))
    reported = []
    past = JudgeHistory(state_dir, lambda: index, Dead(), reported.append)
    assert len(nights_since(past, KEY, EPOCH, "")) == len(nights_since(past, KEY, EPOCH, "")) == 5
    assert reported == [
        "history is read from the local store, as InfluxDB failed: http://influx:8086: no answer"
    ]
    assert past.events() == (noted,)


def test_what_was_noted_since_the_last_good_run_is_named(state_dir, index):
    now_ns = time.time_ns()
    for days in (9, 3, 2, 1):
        event = new_event("cirrus", "", f"{days} days ago", at_ns=now_ns - days * DAY, by="me", now_ns=now_ns)
        add(state_dir, event)
    past = local(state_dir, index)
    noted = past.noted("cirrus", "standard", now_ns - 5 * DAY)
    assert [line.partition(": ")[2][:10] for line in noted] == ["3 days ago", "2 days ago", "1 days ago"]
    assert past.noted("other", "standard", 0) == []


def test_the_last_good_run_is_named_from_both(state_dir, index):
    driver = measurement(100.0, environment={"driver": "580", "host": "n1"})
    good = record(2, created_ns=time.time_ns() - DAY, measurement=driver, commit="c0ffee", nodes=("n1",))
    bad = {"verdict": "regressed", "created_ns": time.time_ns()}
    older = record(1, created_ns=time.time_ns() - 2 * DAY)
    store(state_dir, [older, good, record(3, **bad), record(4, **bad)])
    assert local(state_dir, index).last_good(KEY, EPOCH) == good
    with other(state_dir) as past:
        found = past.last_good(KEY, EPOCH)
        assert past.last_good(LOCAL, EPOCH) is None
    assert (found.id, found.commit, found.created_ns) == (good.id, good.commit, good.created_ns)
    assert change_lines(driver, "c0ffee", found) == change_lines(driver, "c0ffee", good)
    assert machine_lines([driver], found.measurement) == machine_lines([driver], driver)
