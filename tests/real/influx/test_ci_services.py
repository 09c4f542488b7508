"""`ci/services` itself: what it starts goes down with its user, and it says what it does not know."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from over_time_services import Influx
from running_suites import wait_for
from services import ROOT


def services(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "ci/services"), *words],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


def test_an_unknown_service_is_refused_with_the_names_of_all() -> None:
    done = services("up", "influx")
    assert done.returncode == 2
    assert "no service influx" in done.stderr
    assert "influxdb" in done.stderr


def test_what_was_never_started_has_no_environment(tmp_path: Path) -> None:
    done = services("env", "influxdb", "--directory", str(tmp_path / "none"))
    assert done.returncode == 1
    assert "`ci/services up influxdb`" in done.stderr


@pytest.mark.servers
def test_a_killed_server_is_started_again_on_its_data_and_ports(own_influxdb: Influx) -> None:
    own_influxdb.ask('CREATE DATABASE "kept"')
    own_influxdb.service.kill("influxd")
    own_influxdb.service.start()
    names = [row["name"] for row in own_influxdb.ask("SHOW DATABASES")]
    assert "kept" in names


@pytest.mark.servers
def test_a_server_goes_down_with_the_last_process_that_wants_it(
    influx_server: object, tmp_path: Path, running: Callable[[Path], list[str]]
) -> None:
    directory = tmp_path / "server"
    user = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    done = services("up", "influxdb", "--directory", str(directory), "--for", str(user.pid), "--no-install")
    assert done.returncode == 0, done.stderr
    assert running(directory)
    user.kill()
    user.communicate()
    wait_for(lambda: not directory.exists())
    wait_for(lambda: not running(directory))


@pytest.fixture
def running() -> Callable[[Path], list[str]]:
    """Return the programs of a service that live: each has its directory in its environment."""

    def running(directory: Path) -> list[str]:
        wanted, found = f"MLHPC_SERVICE_DIRECTORY={directory}".encode(), []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdecimal() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(os.fsdecode((entry / "cmdline").read_bytes()))
            except OSError:
                continue
        return found

    return running
