"""The judge and the commands that look back get from a real InfluxDB what they get from the local store."""

import os
import shutil
from pathlib import Path

import pytest
from nights_of import nights, quiet, store
from over_time_services import Influx
from worlds import DEFINITION

from pytest_mlhpc.cli import main
from pytest_mlhpc.history.judge_inputs import JudgeHistory
from pytest_mlhpc.influx.source import influx_source
from pytest_mlhpc.store.index import Index
from pytest_mlhpc.store.record import Epoch, SeriesKey

pytestmark = pytest.mark.servers

KEY = SeriesKey("cirrus", "standard", "default", "", "suites/test_a.py::test_a", "rate")

EPOCH = Epoch(DEFINITION, "EPYC")


def filled(server: Influx, state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty nights, the last ten of them slower with another driver, in the store and in InfluxDB."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    environments = [{"driver": "570"}] * 30 + [{"driver": "580"}]
    store(state_dir, nights([*quiet(30), *quiet(10, 93.0, 2)], environments=environments))
    assert main(["records", "push", "--since", "2000-01-01"]) == 0


@pytest.mark.parametrize(
    "words",
    [
        ["history", "changes", "--json"],
        ["history", "changes"],
        ["history", "test_a"],
        ["history", "test_a", "--json", "--all"],
    ],
    ids=" ".join,
)
def test_commands_say_the_same_from_both(
    influxdb: Influx,
    state_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
) -> None:
    filled(influxdb, state_dir, monkeypatch)
    capsys.readouterr()
    code = main([*words, "--from", "local"])
    local = capsys.readouterr().out
    shutil.rmtree(state_dir)  # a runner that starts with an empty disk
    assert main([*words, "--from", "influx"]) == code
    influx = capsys.readouterr().out
    # The window of --since moves on between the two: its minute may be another one.
    assert [line for line in influx.splitlines() if "since 20" not in line or "series" not in line] == [
        line for line in local.splitlines() if "since 20" not in line or "series" not in line
    ]
    assert "driver" in local


def test_the_judge_gets_the_same_figures_until_the_server_is_killed_and_the_stores_from_then_on(
    own_influxdb: Influx, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(own_influxdb, state_dir, monkeypatch)
    index = Index(state_dir)
    local = JudgeHistory(state_dir, lambda: index, None, pytest.fail).nights(KEY, EPOCH, 0)
    reported: list[str] = []
    past = JudgeHistory(state_dir, lambda: index, influx_source(os.environ), reported.append)
    assert past.nights(KEY, EPOCH, 0) == local
    assert len(local) >= 30
    assert reported == []
    own_influxdb.service.kill("influxd")
    assert past.nights(KEY, EPOCH, 0) == past.nights(KEY, EPOCH, 0) == local
    (line,) = reported
    assert line.startswith("history is read from the local store, as InfluxDB failed: ")
    past.close()
    index.close()
