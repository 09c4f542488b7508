"""The local store as a source of history: what the records say, in order, each once."""

import contextlib
import json
import random
import shutil
from collections import defaultdict

import pytest
from nights_of import store
from worlds import SECOND, measurement, record

from pytest_mlhpc.history.series import LocalSource, Point, night_of
from pytest_mlhpc.node.protocol.schema import MetricValue
from pytest_mlhpc.store.record import RecordedVetting


@pytest.fixture
def source(state_dir):
    with contextlib.closing(LocalSource(state_dir)) as opened:
        yield opened


def odd_record(number, choose):
    """A record with something in every field that a night has."""
    rate = MetricValue("rate", choose.uniform(1, 9), "samples/s", "higher")
    loss = MetricValue("loss", choose.uniform(1, 9), "1", "none")
    environment = {"host": "n7", "commit": "c0ffee", "name": "ü'\"</script>"}
    environment["driver"] = choose.choice(["570", "580"])
    changes = {
        "nodes": choose.choice([(), ("n1", "n2")]),
        "commit": choose.choice(["", "abc"]),
        "owner": choose.choice(["", "ada, ü"]),
        "partition_owner": choose.choice(["", "@hpc/ops"]),
        "job_id": choose.choice(["", "4711"]),
        "pipeline": choose.choice(["", "31"]),
        "failure": choose.choice(["", "time_limit: no end\n  log: /x"]),
        "vetting": choose.choice([None, RecordedVetting("quick", 1.0, ("n1",), {"n3": "ECC errors"})]),
        "system": choose.choice(["cirrus", "archer2"]),
        "benchmark": choose.choice(["a[x=1]", "b c,=ü"]),
        "attempt": choose.choice([0, 0, 1]),
        "node_hours": choose.random(),
        "measurement": choose.choice([
            None, measurement(more=(loss,), environment=environment, calibration_before=choose.choice([None, 40.0])),
            measurement(name="time", unit="s", better="lower", more=(rate,), environment=environment),
        ]),
    }  # fmt: skip
    return record(number, created_ns=choose.randrange(50) * SECOND, **changes)


def test_nights_and_series_are_what_the_records_say(state_dir, source):
    choose = random.Random(7)  # noqa: S311 - test data, the same each time
    records = [odd_record(number, choose) for number in range(300)]
    store(state_dir, records)
    records.sort(key=lambda one: (one.created_ns, one.id))
    assert list(source.nights()) == [night_of(one) for one in records]

    expected = defaultdict(tuple)
    for one in records:
        for metric in one.measurement.metrics if one.measurement else ():
            night = night_of(one)
            expected[night.series(metric.name)] += (Point(night, metric.value),)
    found = {one.key: one.points for one in source.series()}
    assert found == expected
    keys = [(key.system, key.partition, key.benchmark, key.metric) for key in found]
    assert keys == sorted(keys)


def test_only_the_time_asked_for_is_reported(state_dir, source):
    store(state_dir, [record(number, float(number), created_ns=number) for number in range(5)])
    assert [night.created_ns for night in source.nights(1, 4)] == [1, 2, 3]
    (series,) = source.series(1, 4)
    assert [point.value for point in series.points] == [1.0, 2.0, 3.0]
    assert not [*source.series(5), *source.nights(5)]


def test_series_of_one_system_or_benchmark(state_dir, source):
    store(state_dir, [record(1), record(2, system="other"), record(3, benchmark="b")])
    assert [one.key.system for one in source.series(system="other")] == ["other"]
    assert [one.key.benchmark for one in source.series(benchmark="b")] == ["b"]
    assert list(source.series(system="b")) == []


def test_an_empty_store_has_no_history(source):
    assert not [*source.nights(), *source.series()]


def test_a_record_that_is_there_twice_counts_once(state_dir, source):
    store(state_dir, [record(1), record(2)])
    (path,) = state_dir.glob("records/*/s1.jsonl")
    shutil.copy(path, path.with_name("copy.jsonl"))
    assert [night.id[-1] for night in source.nights()] == ["1", "2"]
    (series,) = source.series()
    assert [point.night.id[-1] for point in series.points] == ["1", "2"]


def test_many_nights_come_in_portions_and_none_is_lost_between(state_dir, source, monkeypatch):
    monkeypatch.setattr("pytest_mlhpc.history.series._PORTION", 3)
    store(state_dir, [record(number, created_ns=number // 4) for number in range(20)])
    assert [int(night.id[-2:]) for night in source.nights()] == list(range(20))


def test_unit_direction_and_whether_it_is_judged_are_the_newest(state_dir, source):
    old = record(1, measurement=measurement(1.0, unit="s", better="lower"))
    store(state_dir, [old, record(2, 2.0, judged=()), record(3, 3.0)])
    (series,) = source.series()
    assert (series.unit, series.better, series.judged) == ("samples/s", "higher", True)
    assert [point.value for point in series.points] == [2.0, 3.0]


def test_what_no_database_can_hold_is_reported_and_stops_nothing(state_dir):
    store(state_dir, [record(1, branch="half of a pair: \ud800"), record(2, created_ns=1 << 70), record(3)])
    problems = []
    with contextlib.closing(LocalSource(state_dir, problems.append)) as source:
        assert [night.id[-1] for night in source.nights()] == ["1", "3"]
    (problem,) = problems
    assert "skipped, left as it is" in problem


def test_records_of_older_versions_are_read_and_those_of_newer_ones_named(state_dir):
    store(state_dir, [record(1), record(2), record(3)])
    (path,) = state_dir.glob("records/*/s1.jsonl")
    old, new, ours = (json.loads(line) for line in path.read_text().splitlines())
    for later in ("vetting", "node_hours", "nodes", "judged", "energy_j", "overrides"):
        old.pop(later, None)
    path.write_text("".join(json.dumps(one) + "\n" for one in (old, {**new, "schema": 99}, ours)))
    problems = []
    with contextlib.closing(LocalSource(state_dir, problems.append)) as source:
        assert [(night.id[-1], night.judged) for night in source.nights()] == [("1", ()), ("3", ("rate",))]
    assert ["schema 99 is newer" in problem for problem in problems] == [True]


def test_neither_side_of_a_comparison_is_part_of_history(state_dir, source):
    night = record(1, created_ns=SECOND, measurement=measurement())
    sides = [
        record(
            number, created_ns=number * SECOND, attempt=number, purpose="against", measurement=measurement()
        )
        for number in (2, 3)
    ]
    store(state_dir, [night, *sides])
    assert [one.id for one in source.nights()] == [night.id]
    assert [point.night.id for series in source.series() for point in series.points] == [night.id]
