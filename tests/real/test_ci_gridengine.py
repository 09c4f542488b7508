"""`ci/services up gridengine`: starts a real Grid Engine, breaks it on demand, and leaves nothing."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from gridengine_service import HOSTS, GridEngine, clear_away
from services import command, control, killed_up, marked_processes, wait_until

pytestmark = pytest.mark.servers

MARK = "MLHPC_SERVICE_DIRECTORY"
#: Neither ends when it is asked to, and one is in a session of its own.
DEAF = "trap '' TERM\n(trap '' TERM; setsid sleep 600 &)\nsleep 600"


def submit(cluster: GridEngine, folder: Path, script: str, *options: str) -> str:
    """Submit a script whose output goes to `out.txt` in the folder, and return the id of its job."""
    path = folder / "job.sh"
    path.write_text(f"#!/bin/bash\n{script}\n", encoding="utf-8")
    done = cluster.run("qsub", "-terse", "-j", "y", "-o", folder / "out.txt", *options, path, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def rest_of(directory: Path) -> list[str]:
    """Return what there is of a Grid Engine on this machine: processes, and mounts that they made here."""
    mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    return marked_processes(MARK, directory) + [line for line in mounts if str(directory) in line]


# --- the one that all tests share


def test_a_job_has_a_task_on_each_of_two_hosts_with_networks_of_their_own(
    gridengine: GridEngine, tmp_path: Path
) -> None:
    script = (
        "cut -d' ' -f1 $PE_HOSTFILE | while read -r host; do\n"
        "  qrsh -inherit -nostdin -noshell $host /bin/sh -c 'echo $(uname -n) $(hostname -I); exit 3'; echo ended $?\n"
        "done"
    )
    job = submit(gridengine, tmp_path, script, "-pe", "mlhpc", "2")

    account = gridengine.account(job)
    assert (account["failed"], account["exit_status"]) == ("0", "0")
    lines = (tmp_path / "out.txt").read_text(encoding="utf-8").splitlines()
    tasks = [line.strip() for line in lines if line.startswith("node")]
    assert sorted(tasks) == ["node1 10.77.0.11", "node2 10.77.0.12"]
    assert lines.count("ended 3") == 2


def test_hosts_are_given_whole_where_the_parallel_environment_says_so(
    gridengine: GridEngine, tmp_path: Path
) -> None:
    job = submit(gridengine, tmp_path, "cat $PE_HOSTFILE", "-pe", "whole", "32")

    gridengine.account(job)
    hosts = (line.split()[:2] for line in (tmp_path / "out.txt").read_text(encoding="utf-8").splitlines())
    assert sorted(hosts) == [["node1", "16"], ["node2", "16"]]


def test_a_job_beyond_its_time_is_killed_and_the_accounting_says_why(
    gridengine: GridEngine, tmp_path: Path
) -> None:
    job = submit(gridengine, tmp_path, DEAF, "-l", "h_rt=2")

    assert gridengine.account(job)["failed"].startswith("37 ")


def test_a_request_that_no_host_can_meet_is_refused_if_that_is_asked_for(
    gridengine: GridEngine, tmp_path: Path
) -> None:
    (tmp_path / "job.sh").write_text("true\n", encoding="utf-8")

    done = gridengine.run("qsub", "-w", "e", "-pe", "mlhpc", "3", tmp_path / "job.sh")

    assert done.returncode == 1
    assert "Unable to run job: error: no suitable queues" in done.stderr


def test_a_job_that_a_test_leaves_is_found_and_cleared_away(gridengine: GridEngine, tmp_path: Path) -> None:
    job = submit(gridengine, tmp_path, DEAF)
    assert wait_until(lambda: gridengine.state(job) == "r")

    left = clear_away(gridengine, [tmp_path], limit_s=0.0)

    assert left == [f"job {job} was left r"]
    assert wait_until(lambda: not gridengine.state(job))


# --- faults, and two at once


def test_a_host_a_master_and_their_network_come_back(own_gridengine: GridEngine, tmp_path: Path) -> None:
    job = submit(
        own_gridengine, tmp_path, f"until test -e {tmp_path}/go; do sleep 0.1; done", "-l", "h=node1"
    )
    assert wait_until(lambda: own_gridengine.state(job) == "r")

    own_gridengine.service.kill("qmaster")
    assert "unable to send message to qmaster" in own_gridengine.run("qstat").stderr
    own_gridengine.service.kill("node2")
    own_gridengine.service.start()
    assert own_gridengine.state(job) == "r"
    (tmp_path / "go").touch()
    assert own_gridengine.account(job)["failed"] == "0"
    assert own_gridengine.run("qrsh", "-l", "h=node2", "uname", "-n").stdout == "node2\n"

    own_gridengine.service.kill("network")
    down = own_gridengine.run("qstat")
    assert "is down; ci/services up gridengine starts it" in down.stderr
    own_gridengine.service.start()
    for host in HOSTS:
        assert own_gridengine.run("qrsh", "-l", f"h={host}", "uname", "-n").stdout == f"{host}\n"


def test_two_live_side_by_side_with_the_same_names_and_ports(
    gridengine: GridEngine, own_gridengine: GridEngine, tmp_path: Path
) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    held = submit(own_gridengine, folders[0], "true", "-h")

    assert held not in {job for job, text in gridengine.jobs().items() if str(folders[0]) in text}
    assert gridengine.account(submit(gridengine, folders[1], "true"))["failed"] == "0"
    own_gridengine.run("qdel", held)


# --- who takes it down


@pytest.fixture
def user() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_it_goes_down_with_its_jobs_when_its_last_user_is_killed(
    gridengine: GridEngine, user: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    directory = tmp_path / "grid"
    place = ("--directory", directory, "--for", str(user.pid), "--no-install")
    done = command("services", "up", "gridengine", *place)
    assert done.returncode == 0, done.stderr
    environment = {**os.environ, "PATH": f"{directory / 'bin'}:{os.environ['PATH']}"}
    (tmp_path / "job.sh").write_text(f"touch {tmp_path}/began\n{DEAF}\n", encoding="utf-8")
    argv = ["qsub", "-S", "/bin/bash", "-o", "/dev/null", "-j", "y", tmp_path / "job.sh"]
    subprocess.run(argv, env=environment, check=True, capture_output=True)
    assert wait_until((tmp_path / "began").exists)

    user.send_signal(signal.SIGKILL)

    assert wait_until(lambda: not directory.exists() and not rest_of(directory))


@pytest.mark.parametrize("moment", ["network", "qmaster", "node1"])
def test_a_start_that_is_killed_leaves_nothing_and_the_next_one_is_whole(
    gridengine: GridEngine, tmp_path: Path, moment: str
) -> None:
    directory = tmp_path / "grid"
    with killed_up("services.d/gridengine", directory, moment):
        control("services", "up", "gridengine", "--no-install", directory=directory)
        queues = subprocess.run(
            [directory / "bin/qselect", "-pe", "mlhpc"], capture_output=True, text=True, check=True
        )
        assert sorted(queues.stdout.split()) == [
            "all.q@node1",
            "all.q@node2",
            "short.q@node1",
            "short.q@node2",
        ]
    assert rest_of(directory) == []
    assert not directory.exists()


def test_a_folder_that_its_files_cannot_name_is_refused(gridengine: GridEngine, tmp_path: Path) -> None:
    directory = tmp_path / "a b"

    done = command("services", "up", "gridengine", "--no-install", "--directory", directory)
    control("services", "down", "gridengine", "--purge", directory=directory)

    assert done.returncode == 1
    assert f"'{directory}': Grid Engine's files cannot quote" in done.stderr
