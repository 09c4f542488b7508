"""Events and what became of alerts in a real InfluxDB: sent by the commands that note them, each once."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from nights_of import nights, quiet, store
from over_time_services import Influx

from pytest_mlhpc.cli import main
from pytest_mlhpc.history.events import events, known_events
from pytest_mlhpc.influx.cursor import restart, waiting
from pytest_mlhpc.influx.source import influx_source

pytestmark = pytest.mark.servers
STANDING = 'SELECT "text" FROM mlhpc_event WHERE removed = false'


@pytest.fixture
def watched(influxdb: Influx, state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Influx:
    """A store whose newest night has a new driver and is slower, and `mlhpc` that knows the server."""
    monkeypatch.chdir(tmp_path)
    for name, value in influxdb.environment.items():
        monkeypatch.setenv(name, value)
    restart(state_dir, 0)
    drivers = [{"driver": "570"}] * 44 + [{"driver": "580"}]
    made = nights(quiet(44) + quiet(3, 80.0), benchmark="a", purpose="nightly", environments=drivers)
    store(state_dir, made)
    return influxdb


def texts(influx: Influx, kind: str = "") -> list[str]:
    """Return what the events say that were not removed, oldest first."""
    where = f" AND kind = '{kind}'" if kind else ""
    return [row["text"] for row in influx.ask(STANDING + where)]


def test_an_alert_that_opens_and_is_acknowledged_is_in_influxdb_when_its_command_ends(
    watched: Influx, state_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["alert", "send"]) == 0
    (opened,) = texts(watched, "alert_opened")
    assert opened.startswith("cirrus: a 20 % slower")
    assert watched.count("mlhpc_run") == 47
    (name,) = {row["id"] for row in watched.ask("SELECT id FROM mlhpc_event WHERE \"kind\" = 'alert_opened'")}
    assert main(["alert", "ack", name, "--until", "7d", "--reason", "vendor knows"]) == 0
    assert main(["alert", "ack", name, "--off"]) == 0
    (ack,) = watched.ask(
        'SELECT "by", until_ns, at_ns FROM mlhpc_event WHERE "kind" = \'alert_acknowledged\''
    )
    assert round((ack["until_ns"] - ack["at_ns"]) / (86_400 * 10**9)) == 7
    assert len(texts(watched, "alert_unacknowledged")) == 1
    capsys.readouterr()
    for _ in range(2):
        before = watched.count("mlhpc_event")
        assert main(["alert", "send"]) == 0
        assert main(["records", "push", "--since", "2000-01-01"]) == 0
        assert watched.count("mlhpc_event") == before
    assert waiting(state_dir).both == 0


def test_a_driver_that_nights_began_to_run_with_is_in_influxdb_at_the_time_of_the_first(
    watched: Influx, state_dir: Path
) -> None:
    assert main(["alert", "send", "--at", "2000-01-01"]) == 0  # an older book, which looks further back
    book = state_dir / "alerts/book.json"
    found = json.loads(book.read_text())
    book.write_text(json.dumps({**found, "last_ns": time.time_ns() - 5 * 86_400 * 10**9}))
    assert main(["alert", "send"]) == 0
    assert texts(watched, "environment") == ["driver 570 -> 580"]
    rows = watched.ask("SELECT at_ns FROM mlhpc_event WHERE \"kind\" = 'environment'")
    runs = watched.ask("SELECT created_ns, changes FROM mlhpc_run")
    first = min(row["created_ns"] for row in runs if "580" in row["changes"])
    assert [row["at_ns"] for row in rows] == [first]
    assert rows[0]["time"] // 10**9 == first // 10**9


def test_events_that_are_noted_moved_and_removed_are_so_in_influxdb(watched: Influx) -> None:
    event = "history", "event"
    assert main([*event, "add", "--system", "cirrus:standard", "driver 'a, b = c' \\ to \"580\""]) == 0
    assert main([*event, "add", "--system", "cirrus", "--until", "2099-01-01", "new disks"]) == 0
    assert texts(watched, "maintenance") == ["new disks"]
    (change,) = watched.ask("SELECT id, text FROM mlhpc_event WHERE \"kind\" = 'change'")
    assert change["text"].replace("%5C", "\\") == "driver 'a, b = c' \\ to \"580\""
    assert main([*event, "remove", change["id"]]) == 0
    assert texts(watched) == ["new disks"]
    assert watched.count("mlhpc_event") == 2
    assert main(["records", "push", "--since", "2000-01-01"]) == 0
    assert texts(watched) == ["new disks"]


def test_a_runner_with_an_empty_disk_has_the_epochs_and_maintenances_of_the_others(
    watched: Influx, state_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add = ["history", "event", "add", "--system"]
    assert main([*add, "cirrus:standard", "--on", "2026-01-02T03:00Z", 'driver "570" to 580']) == 0
    assert main([*add, "cirrus", "--on", "2026-02-01", "--until", "2026-02-02", "new pumps"]) == 0
    assert main([*add, "cirrus", "a mistake"]) == 0
    noted = events(state_dir)
    assert main(["history", "event", "remove", noted[-1].id]) == 0
    assert main(["alert", "send"]) == 0
    with contextlib.closing(influx_source(os.environ)) as source:
        assert known_events(tmp_path / "empty", source) == noted[:2]
    capsys.readouterr()
    for folder in (state_dir, tmp_path / "empty"):
        main(["history", "changes", "--from", "influx", "--state-dir", str(folder), "--since", "2000-01-01"])
    first, second = re.split(r"(?=^\d+ series)", capsys.readouterr().out, flags=re.MULTILINE)[1:]
    assert first == second


def test_a_command_whose_server_is_away_notes_and_says_what_waits(
    watched: Influx, state_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["records", "push"]) == 0
    with monkeypatch.context() as patch:
        patch.setenv("MLHPC_INFLUX_URL", "http://127.0.0.1:9")
        assert main(["history", "event", "add", "--system", "cirrus", "driver"]) == 0
        said = capsys.readouterr().err
        assert "InfluxDB: not sent: http://127.0.0.1:9 does not answer" in said
        assert "InfluxDB: 1 event waits; `mlhpc records push` sends what waits" in said
        patch.setenv("MLHPC_INFLUX_PUSH", "no")
        assert main(["history", "event", "add", "--system", "cirrus", "kernel"]) == 0
        assert capsys.readouterr().err == ""
    assert str(waiting(state_dir)) == "2 events"
    assert main(["records", "push"]) == 0
    assert sorted(texts(watched)) == ["driver", "kernel"]


SENDING = """
import os, signal, sys
from pytest_mlhpc.alert import book
from pytest_mlhpc.cli import main
from pytest_mlhpc.history.events import events, known_events

left = int(sys.argv[1])
def deadly(real):
    def call(*arguments, **named):
        global left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **named)
    return call

book.replace_file, book.append_journal = deadly(book.replace_file), deadly(book.append_journal)
sys.exit(main(["alert", "send", "--state-dir", sys.argv[2]]))
"""


@pytest.mark.parametrize("number", [1, 2, 3])
def test_an_alert_whose_command_is_killed_at_the_journal_is_there_once_after_the_next(
    watched: Influx, state_dir: Path, number: int
) -> None:
    command = [sys.executable, "-c", SENDING, str(number), str(state_dir)]
    done = subprocess.run(command, check=False, timeout=600, capture_output=True, env=dict(os.environ))
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert texts(watched) == []
    assert main(["alert", "send"]) == 0
    assert len(texts(watched, "alert_opened")) == 1
