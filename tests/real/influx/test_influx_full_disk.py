"""Cursors on a disk that is really full: all is sent, the user is told, and each point is in the real InfluxDB once."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from full_disk import Disk, small_disk
from nights_of import store
from over_time_services import Influx
from worlds import measurement, record

from pytest_mlhpc.cli import main
from pytest_mlhpc.influx.cursor import influx_folder, restart, waiting

pytestmark = pytest.mark.servers
RECORDS = [record(number, measurement=measurement(float(number))) for number in range(30)]
LATER = 75


@pytest.fixture(params=["mounted", "limited"])
def disk(request: pytest.FixtureRequest, state_dir: Path) -> Iterator[Disk]:
    """The disk of all that belongs to InfluxDB; the store has another one."""
    with small_disk(influx_folder(state_dir), mounted=request.param == "mounted") as found:
        yield found


@pytest.fixture
def site(influxdb: Influx, monkeypatch: pytest.MonkeyPatch) -> Influx:
    """The server that `mlhpc` is pointed to."""
    for name, value in influxdb.environment.items():
        monkeypatch.setenv(name, value)
    return influxdb


def values(influxdb: Influx) -> list[float]:
    return sorted(row["value"] for row in influxdb.ask("SELECT value FROM mlhpc_metric"))


def test_all_is_sent_though_no_cursor_fits_and_each_point_is_there_once(
    site: Influx, state_dir: Path, disk: Disk, capsys: pytest.CaptureFixture[str]
) -> None:
    restart(state_dir, 0)
    store(state_dir, RECORDS)
    with disk.full():
        code = main(["records", "push"])
    said = capsys.readouterr()
    assert code == LATER
    assert said.out == "60 points sent\n"
    assert f"{disk.words}; all was sent, and some of it will be sent again" in said.err
    assert f"{influx_folder(state_dir)}/cursors/" in said.err
    assert "30 records left to send: try again later" in said.err
    assert values(site) == [float(number) for number in range(len(RECORDS))]
    assert main(["records", "push"]) == 0
    assert values(site) == [float(number) for number in range(len(RECORDS))]
    assert site.count("mlhpc_run") == len(RECORDS)
    assert waiting(state_dir).both == 0


def test_where_the_start_does_not_fit_nothing_is_sent_and_the_command_is_named(
    site: Influx, state_dir: Path, disk: Disk, capsys: pytest.CaptureFixture[str]
) -> None:
    store(state_dir, RECORDS)
    with disk.full():
        code = main(["records", "push"])
    said = capsys.readouterr().err
    assert code == 4
    assert (
        f"{disk.words}; what is recorded until it can is sent by `mlhpc records push --since DATE` only"
        in said
    )
    assert values(site) == []
    assert main(["records", "push", "--since", "2000-01-01"]) == 0
    assert values(site) == [float(number) for number in range(len(RECORDS))]
