"""A spool on a disk that is really full: the session goes on, says so, and nothing is lost on the way to the real InfluxDB."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from full_disk import Disk, small_disk
from nights_of import store
from over_time_services import Influx
from worlds import measurement, record

from pytest_mlhpc.cli import main
from pytest_mlhpc.influx.publisher import Publisher
from pytest_mlhpc.influx.spool import frames, spool_of, waiting

pytestmark = pytest.mark.servers
#: More than a page of memory holds, as a tmpfs gives whole pages.
RECORDS = [record(number, measurement=measurement(float(number))) for number in range(30)]
#: Less than a record needs: one is torn.
LEFT = 400


@pytest.fixture(params=["mounted", "limited"])
def disk(request: pytest.FixtureRequest, state_dir: Path) -> Iterator[Disk]:
    """The disk of the spool; the store has another one."""
    with small_disk(spool_of(state_dir), mounted=request.param == "mounted") as found:
        yield found


@pytest.fixture
def site(influxdb: Influx, monkeypatch: pytest.MonkeyPatch) -> Influx:
    """The server that `mlhpc` is pointed to."""
    for name, value in {**influxdb.environment, "MLHPC_INFLUX_PUSH": "no"}.items():
        monkeypatch.setenv(name, value)
    return influxdb


@pytest.fixture
def publisher(site: Influx, state_dir: Path, disk: Disk) -> Publisher:
    """What a session has for InfluxDB, five of whose records came before the disk was full."""
    store(state_dir, RECORDS)
    found = Publisher(state_dir, os.environ)
    for one in RECORDS[:5]:
        found.mlhpc_record(one)
    with disk.full(LEFT):
        for one in RECORDS[5:]:
            found.mlhpc_record(one)
    return found


def whole_frames(state_dir: Path) -> int:
    return sum(frame.whole for path in waiting(spool_of(state_dir)) for frame in frames(path))


def values(influxdb: Influx) -> list[float]:
    return sorted(row["value"] for row in influxdb.ask("SELECT value FROM mlhpc_metric"))


def test_what_did_not_fit_is_told_and_comes_from_the_store(
    publisher: Publisher, influxdb: Influx, state_dir: Path, disk: Disk
) -> None:
    told: list[str] = []
    with disk.full():
        publisher.mlhpc_records_end(told.append, hurry=False)
    (text,) = told
    fitted = whole_frames(state_dir)
    assert 5 <= fitted < len(RECORDS)
    assert text.startswith(f"InfluxDB: {spool_of(state_dir)}/open/")
    assert text.endswith(
        f".lp: points for InfluxDB cannot be stored: {disk.words}; {len(RECORDS) - fitted} records are in the store only: "
        "`mlhpc records push --all` sends them"
    )
    assert main(["records", "push"]) == 0
    assert values(influxdb) == [float(number) for number in range(fitted)]
    assert main(["records", "push", "--all"]) == 0
    assert values(influxdb) == [float(number) for number in range(len(RECORDS))]
    assert influxdb.count("mlhpc_run") == len(RECORDS)
    assert waiting(spool_of(state_dir)) == []


def test_a_push_makes_room_on_a_full_disk(
    publisher: Publisher, influxdb: Influx, state_dir: Path, disk: Disk, capsys: pytest.CaptureFixture[str]
) -> None:
    with disk.full():
        publisher.mlhpc_records_end(lambda _text: None, hurry=True)
        fitted = whole_frames(state_dir)
        assert main(["records", "push"]) == 0
    assert 5 <= fitted < len(RECORDS)
    assert capsys.readouterr().err == ""
    assert values(influxdb) == [float(number) for number in range(fitted)]
    assert waiting(spool_of(state_dir)) == []
