"""`ci/services` itself: what it starts goes down with its user, and it says what it does not know."""

import subprocess
import sys
from pathlib import Path

import pytest
from over_time_services import Influx
from services import command, marked_processes, wait_until

MARK = "MLHPC_SERVICE_DIRECTORY"


def test_an_unknown_service_is_refused_with_the_names_of_all() -> None:
    done = command("services", "up", "influx")
    assert done.returncode == 2
    assert "no service influx" in done.stderr
    assert "influxdb" in done.stderr


def test_what_was_never_started_has_no_environment(tmp_path: Path) -> None:
    done = command("services", "env", "influxdb", "--directory", tmp_path / "none")
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
    influx_server: object, tmp_path: Path
) -> None:
    directory = tmp_path / "server"
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as user:
        place = ("--directory", directory, "--for", str(user.pid), "--no-install")
        done = command("services", "up", "influxdb", *place)
        up = marked_processes(MARK, directory)
        user.kill()
    assert done.returncode == 0, done.stderr
    assert up
    assert wait_until(lambda: not directory.exists() and not marked_processes(MARK, directory))
