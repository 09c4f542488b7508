"""What goes into InfluxDB comes out again: history is the same from there as from the store."""

import dataclasses
import json
from pathlib import Path

import pytest
from nights_of import store
from over_time_services import Influx
from worlds import measurement, record

from pytest_mlhpc.history.series import LocalSource
from pytest_mlhpc.influx.credentials import server_of
from pytest_mlhpc.influx.schema import lines_of
from pytest_mlhpc.influx.source import InfluxSource
from pytest_mlhpc.node.protocol.schema import MetricValue
from pytest_mlhpc.store.record import Record, RecordedVetting

pytestmark = pytest.mark.servers

HOSTILE = json.loads(Path(__file__).with_name("hostile_texts.json").read_text(encoding="utf-8"))


def local(state_dir: Path, records: list[Record]) -> LocalSource:
    store(state_dir, records)
    return LocalSource(state_dir)


def pushed(influxdb: Influx, folder: Path, records: list[Record]) -> InfluxSource:
    influxdb.push(map(lines_of, records), folder)
    return InfluxSource(server_of(influxdb.environment))


def hostile_record(number: int, text: str) -> Record:
    """Return a record in which every text is this one; each third has no measurement."""
    measured = measurement(100.0 + number, environment={"driver": text, text: "x"}, calibration_before=3.0)
    texts = dict.fromkeys(["system", "branch", "commit", "environment", "failure"], text)
    names = {
        "benchmark": text,
        "definition": f"w name={text}",
        "node_id": f"t.py::{text}",
        "nodes": (text, "n2"),
    }
    vetted = RecordedVetting("quick", 1.0, unfit={text: text})
    return record(
        number,
        **texts,
        **names,
        judged=("rate",),
        vetting=vetted,
        measurement=measured if number % 3 else None,
    )


def test_hostile_names_and_texts_come_back_as_they_were(
    influxdb: Influx, state_dir: Path, tmp_path: Path
) -> None:
    records = [hostile_record(number, text) for number, text in enumerate(HOSTILE)]
    ours, influx = local(state_dir, records), pushed(influxdb, tmp_path, records)
    assert list(influx.nights()) == list(ours.nights())
    assert list(influx.series()) == list(ours.series())
    assert len(list(influx.nights())) == len(HOSTILE)
    influx.close()
    ours.close()


def test_neither_side_of_a_comparison_comes_back(influxdb: Influx, tmp_path: Path) -> None:
    night, side = (
        record(number, purpose=purpose, measurement=measurement())
        for number, purpose in ((1, "nightly"), (2, "against"))
    )
    influx = pushed(influxdb, tmp_path, [night, side])
    assert [one.id for one in influx.nights()] == [night.id]
    assert [point.night.id for series in influx.series() for point in series.points] == [night.id]
    influx.close()


def test_time_spans_and_filters_give_the_same_from_both(
    influxdb: Influx, state_dir: Path, tmp_path: Path
) -> None:
    start = 1_800_000_000_000_000_000
    moments = [start + step * 400_000_001 for step in range(40)]  # several in each second
    records = [
        record(
            number,
            created_ns=moment,
            system=("a", "b")[number % 2],
            measurement=measurement(
                float(number),
                more=(MetricValue(f"m{number % 3}", number / 7, "s", "lower", first=1.0, last=2.0),),
            ),
        )
        for number, moment in enumerate(moments)
    ]
    ours, influx = local(state_dir, records), pushed(influxdb, tmp_path, records)
    for since, until in (
        (0, None),
        (moments[5], moments[20]),
        (moments[5] + 1, moments[20] + 1),
        (moments[39], None),
    ):
        assert list(influx.nights(since, until)) == list(ours.nights(since, until))
        assert list(influx.series(since, until)) == list(ours.series(since, until))
        assert list(influx.series(since, until, system="a")) == list(ours.series(since, until, system="a"))
    assert list(influx.series(benchmark="no such")) == []
    influx.close()
    ours.close()


def test_records_of_one_moment_do_not_replace_each_other(influxdb: Influx, tmp_path: Path) -> None:
    """A clock that was set back, or a scheduler that knows whole seconds only."""
    records = [record(number, created_ns=1_800_000_000_000_000_000) for number in range(300)]
    influx = pushed(influxdb, tmp_path, records)
    assert influxdb.count("mlhpc_run") == 300
    assert [night.id for night in influx.nights()] == sorted(one.id for one in records)
    influx.close()


def test_the_same_record_twice_is_one_point(influxdb: Influx, tmp_path: Path) -> None:
    pushed(influxdb, tmp_path, [record(1), record(2), record(1)]).close()
    pushed(influxdb, tmp_path, [record(2)]).close()
    assert influxdb.count("mlhpc_run") == 2
    assert influxdb.count("mlhpc_metric") == 2


def test_an_empty_database_has_no_history(influxdb: Influx) -> None:
    source = InfluxSource(server_of(influxdb.environment))
    assert list(source.nights()) == []
    assert list(source.series()) == []
    source.close()


def test_nights_of_a_newer_schema_are_left_out_and_named(influxdb: Influx, tmp_path: Path) -> None:
    lines = [line.replace("schema=2i", "schema=3i") for line in lines_of(record(1))]
    reported: list[str] = []
    influxdb.push([lines, lines_of(record(2))], tmp_path)
    source = InfluxSource(server_of(influxdb.environment), reported.append)
    assert [night.id for night in source.nights()] == [record(2).id]
    assert len(reported) == 1
    assert "schema 3 is newer than 2" in reported[0]
    source.close()


def test_fields_that_an_older_version_did_not_write_have_their_defaults(
    influxdb: Influx, tmp_path: Path
) -> None:
    line = lines_of(dataclasses.replace(record(1), measurement=None))[0]
    key, _, moment = line.replace("\\ ", "_").partition(" ")[0], "", line.rpartition(" ")[2]
    old = f'{key} schema=2i,id="x",created_ns=1800000001000000000i {moment}'
    influxdb.push([[old]], tmp_path)
    source = InfluxSource(server_of(influxdb.environment))
    (night,) = source.nights()
    assert (night.id, night.nodes, night.unfit, night.changes, night.branch) == ("x", (), {}, {}, "")
    source.close()
