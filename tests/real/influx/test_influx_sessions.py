"""Sessions of pytest with an InfluxDB: every record arrives, and whatever the server does, no session notices."""

import shutil
from pathlib import Path

import pytest
from over_time_services import PATIENT, Influx
from running_suites import Suite

from pytest_mlhpc.cli import main
from pytest_mlhpc.influx.cursor import waiting

pytestmark = pytest.mark.servers

TESTS = """
@script("echo rate: 4")
def test_a(run):
    assert run["rate"].value == 4

@script("echo rate: none")
def test_b(run):
    pass
"""


@pytest.fixture
def suite(tmp_path: Path, state_dir: Path) -> Suite:
    made = Suite(tmp_path / "suite", state_dir, system="local")
    made.tests(TESTS)
    (made.folder / "conftest.py").write_text(PATIENT)
    return made


def test_a_session_sends_its_records_measured_and_failed(suite: Suite, influxdb: Influx) -> None:
    result = suite.run("--mlhpc-reruns=0", environment=influxdb.environment)
    result.expect(1, passed=1, failed=1)
    rows = influxdb.ask("SELECT id, verdict FROM mlhpc_run")
    assert sorted(row["id"] for row in rows) == [record["id"] for record in result.records]
    assert [row["value"] for row in influxdb.ask("SELECT value FROM mlhpc_metric WHERE metric = 'rate'")] == [
        4
    ]
    assert waiting(suite.state).both == 0
    assert "InfluxDB" not in result.text


def test_a_session_without_its_server_is_the_same_and_says_how_to_send(
    suite: Suite, influxdb: Influx, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = {**influxdb.environment, "MLHPC_INFLUX_URL": "http://127.0.0.1:9"}
    without = suite.run("--mlhpc-reruns=0", "-k", "test_a")
    result = suite.run("--mlhpc-reruns=0", "-k", "test_a", environment=dead)
    assert (result.code, result.counts()["passed"]) == (without.code, 1)
    assert "InfluxDB: not sent: http://127.0.0.1:9 does not answer" in result.text
    assert "InfluxDB: 1 record waits; `mlhpc records push` sends what waits" in result.text
    assert "what was in 1 record file before is sent by `mlhpc records push --since DATE` only" in result.text
    for name, value in influxdb.environment.items():
        monkeypatch.setenv(name, value)
    assert main(["records", "push"]) == 0
    assert influxdb.count("mlhpc_run") == 1
    assert main(["records", "push", "--since", "1d"]) == 0  # that of the session that knew no InfluxDB, too
    assert influxdb.count("mlhpc_run") == 2


def test_runners_with_empty_disks_share_one_history(suite: Suite, influxdb: Influx) -> None:
    suite.tests('@program(["/bin/echo", "rate: 4"], RATE)\ndef test_a(run): pass\n')
    nightly = {**influxdb.environment, "MLHPC_PURPOSE": "nightly", "CI_COMMIT_BRANCH": "main"}
    accepted = suite.run("-k", "test_a", "--mlhpc-baseline=update", environment=nightly)
    accepted.expect(0, passed=1)
    for _runner in range(2):
        shutil.rmtree(suite.state)
        result = suite.run("-k", "test_a", "-o", "mlhpc_history=influx", environment=nightly)
        result.expect(
            0, f"history: 1 night from {influxdb.environment['MLHPC_INFLUX_URL']}, bucket", passed=1
        )
    assert influxdb.count("mlhpc_run") == 3
    dead = {**nightly, "MLHPC_INFLUX_URL": "http://127.0.0.1:9"}
    alone = suite.run("-k", "test_a", "-o", "mlhpc_history=influx", environment=dead)
    alone.expect(1, "history is read from the local store, as InfluxDB failed", passed=1)
    alone.expect(1, f"history: 1 night from {suite.state}", passed=1)
