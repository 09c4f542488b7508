"""`ci/slurm`: starts a real Slurm, breaks it on demand, and leaves nothing."""

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from services import (
    ROOT,
    Slurm,
    clear_away,
    clear_strays,
    command,
    control,
    end_slurm,
    given_slurm,
    leave,
    marked_processes,
    start_slurm,
    step_daemons,
    wait_until,
)

pytestmark = pytest.mark.servers


def marked(directory: Path) -> list[str]:
    """Return the command lines of processes that this cluster started."""
    return marked_processes("MLHPC_SLURM_DIRECTORY", directory)


def state_of(cluster: Slurm, job: str) -> str:
    return next((found.state for found in cluster.jobs() if found.id == job), "unknown")


def submit(cluster: Slurm, folder: Path, script: str, *options: str) -> str:
    path = folder / "job.sh"
    path.write_text(f"#!/bin/bash\n{script}\n", encoding="utf-8")
    done = cluster.run("sbatch", "--parsable", "-o", folder / "out.txt", *options, path)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# --- the cluster that all tests share


def test_the_shared_cluster_has_six_nodes_and_four_partitions(slurm: Slurm) -> None:
    states = slurm.node_states()
    partitions = slurm.run("sinfo", "-h", "-o", "%R").stdout.split()

    assert set(states) == {"node1", "node2", "node3", "node4", "gpu1", "gpu2"}
    assert set(partitions) == {"cpu", "gpu", "small", "low"}


def test_every_node_is_a_machine_of_its_own_with_room_for_16_ranks(slurm: Slurm) -> None:
    done = slurm.run("srun", "-N2", "--ntasks-per-node=16", "hostname")

    names = done.stdout.split()
    assert len(names) == 32, done.stderr
    assert len(set(names)) == 2
    assert set(names) < {"node1", "node2", "node3", "node4"}


def test_a_gpu_node_hands_out_its_four_devices(slurm: Slurm) -> None:
    done = slurm.run("srun", "-p", "gpu", "--gres=gpu:h100:4", "printenv", "CUDA_VISIBLE_DEVICES")

    assert done.stdout.strip() == "0,1,2,3", done.stderr


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--qos=short", "-t5"], "QOSMaxWallDurationPerJobLimit"),
        (["--qos=short", "-t1", "-N3"], "QOSMaxNodePerJobLimit"),
        (["-p", "small", "-t5"], "PartitionTimeLimit"),
        (["-p", "small", "-N2"], "PartitionNodeLimit"),
    ],
)
def test_what_a_limit_forbids_stays_pending_with_its_reason(
    slurm: Slurm, tmp_path: Path, options: list[str], reason: str
) -> None:
    job = submit(slurm, tmp_path, "true", *options)

    def reasons() -> list[str]:
        return [found.reason for found in slurm.jobs() if found.id == job]

    assert wait_until(lambda: reasons() == [reason]), reasons()
    slurm.run("scancel", job)


def test_the_environment_is_quoted_for_a_shell(slurm: Slurm) -> None:
    done = command("slurm", "env", "--directory", slurm.directory)

    lines = [shlex.split(line) for line in done.stdout.splitlines()]
    python = ROOT / ".venv/bin/python"
    assert lines == [
        ["export", f"SLURM_CONF={slurm.directory}/etc/slurm.conf"],
        ["export", f"MLHPC_TEST_PYTHON={python if python.exists() else sys.executable}"],
    ]


def test_jobs_are_found_though_names_and_folders_hold_separators(slurm: Slurm, tmp_path: Path) -> None:
    folder = tmp_path / "a|b\nc"
    folder.mkdir()
    slurm.run("sbatch", "--hold", "--job-name=x|y", "-o", "/dev/null", "--wrap", "true", cwd=folder)

    (job,) = [job for job in slurm.jobs() if job.folder == str(folder)]

    assert (job.state, job.reason, job.nodes, job.name) == ("PENDING", "JobHeldUser", "", "x|y")
    slurm.run("scancel", job.id)


def test_what_a_test_leaves_is_found_and_cleared_away(slurm: Slurm, tmp_path: Path) -> None:
    script = "trap '' TERM\n(setsid sleep 600 &)\nsleep 600"
    job = submit(slurm, tmp_path, script)
    assert wait_until(lambda: state_of(slurm, job) == "RUNNING")

    left = clear_away(slurm, os.environ["MLHPC_TEST"], [tmp_path], limit_s=0.0)
    strays = clear_strays(os.environ["MLHPC_TEST"], limit_s=0.0)

    assert [words.partition(" on ")[0] for words in left] == [f"job {job} (job.sh) was left RUNNING"]
    assert state_of(slurm, job) == "CANCELLED"
    assert len(strays) == 1
    assert "outlived its job" in strays[0]


# --- faults, on clusters of their own


def test_a_cluster_breaks_and_comes_back(start_own_slurm: Callable[..., Slurm], tmp_path: Path) -> None:
    cluster = start_own_slurm("--accounting", "dbd")
    go = tmp_path / "go"
    job = submit(cluster, tmp_path, f"while ! test -e {go}; do sleep 0.1; done", "-w", "node1")
    lost = submit(cluster, tmp_path, f"touch {tmp_path}/began; exec sleep 600", "-w", "node2")
    assert wait_until(lambda: state_of(cluster, job) == "RUNNING")
    assert wait_until((tmp_path / "began").exists)

    cluster.stop_controller()
    assert "DOWN" in cluster.run("scontrol", "ping").stdout
    cluster.start_controller()
    assert state_of(cluster, job) == "RUNNING"
    go.touch()
    assert wait_until(lambda: state_of(cluster, job) == "COMPLETED")

    cluster.kill_node("node2")
    broken = command("slurm", "status", "--directory", cluster.directory)
    assert broken.returncode == 3
    assert [line.split() for line in broken.stdout.splitlines() if "dead" in line] == [
        ["slurmd.node2", "dead"]
    ]
    assert step_daemons(cluster.directory) == []
    cluster.run("scancel", lost)
    cluster.start_node("node2")
    assert cluster.run("srun", "-w", "node2", "hostname").stdout == "node2\n"

    cluster.stop_database()
    assert cluster.run("sacct").returncode != 0
    assert cluster.run("srun", "true").returncode == 0
    cluster.start_database()
    assert cluster.run("sacct").returncode == 0


def test_memory_limits_kill_a_step_where_cgroups_are_asked_for(
    start_own_slurm: Callable[..., Slurm], tmp_path: Path
) -> None:
    if not Path("/sys/fs/cgroup/memory/cgroup.procs").exists():
        pytest.skip("needs cgroup v1: boot with systemd.unified_cgroup_hierarchy=0")
    cluster = start_own_slurm("--accounting", "none", "--cgroup", "v1")
    eat = "x = bytearray(300 << 20); import time; time.sleep(600)"

    done = cluster.run("srun", "--mem=50M", sys.executable, "-c", eat)

    assert done.returncode != 0
    assert "oom" in done.stderr.lower()
    end_slurm(cluster)
    assert not list(Path("/sys/fs/cgroup").glob("*/slurm_node1"))


# --- up and down


@pytest.fixture
def plain_slurm(start_own_slurm: Callable[..., Slurm]) -> Slurm:
    return start_own_slurm("--accounting", "none")


def test_up_again_starts_only_what_is_missing(plain_slurm: Slurm) -> None:
    before = command("slurm", "status", "--directory", plain_slurm.directory).stdout
    plain_slurm.kill_node("gpu1")

    control("slurm", "up", directory=plain_slurm.directory)

    after = command("slurm", "status", "--directory", plain_slurm.directory)
    changed = set(before.splitlines()) ^ set(after.stdout.splitlines())
    assert after.returncode == 0, after.stdout
    assert {line.split()[0] for line in changed} == {"slurmd.gpu1"}
    other = command("slurm", "up", "--accounting", "filetxt", "--directory", plain_slurm.directory)
    assert other.returncode == 1
    assert "runs already with accounting none, not filetxt; `ci/slurm down` first" in other.stderr
    control("slurm", "down", directory=plain_slurm.directory)


def test_down_ends_jobs_that_ignore_signals_and_their_orphans(plain_slurm: Slurm, tmp_path: Path) -> None:
    script = (
        f"trap '' TERM\n(trap '' TERM; setsid sleep 600 & echo $! > {tmp_path}/orphan)\nsrun -N2 sleep 600"
    )
    submit(plain_slurm, tmp_path, script, "-N2")
    assert wait_until(lambda: len(step_daemons(plain_slurm.directory)) == 3)

    control("slurm", "down", directory=plain_slurm.directory)

    assert marked(plain_slurm.directory) == []
    assert step_daemons(plain_slurm.directory) == []
    assert clear_strays(os.environ["MLHPC_TEST"], limit_s=0.0) == []


def test_a_second_start_never_gives_a_job_id_again(plain_slurm: Slurm, tmp_path: Path) -> None:
    first = submit(plain_slurm, tmp_path, "true")
    assert wait_until(lambda: state_of(plain_slurm, first) == "COMPLETED")
    control("slurm", "down", directory=plain_slurm.directory)
    start_slurm(plain_slurm.directory, "--accounting", "none", private=True, install=False)

    second = submit(plain_slurm, tmp_path, "true")
    assert int(second) > int(first)
    assert wait_until(lambda: state_of(plain_slurm, second) == "COMPLETED")


def test_two_clusters_live_side_by_side_though_the_first_ports_are_taken(
    start_own_slurm: Callable[..., Slurm],
) -> None:
    with socket.socket() as busy:
        with contextlib.suppress(OSError):  # taken already: as good
            busy.bind(("127.0.0.1", 17003))
            busy.listen()
        one, two = start_own_slurm("--accounting", "none"), start_own_slurm("--accounting", "none")

    for cluster in (one, two):
        assert cluster.run("srun", "-N4", "true").returncode == 0
    port = json.loads((one.directory / "state.json").read_text(encoding="utf-8"))["port"]
    third = Path(f"{one.directory}x")
    done = command("slurm", "up", "--port", str(port), "--accounting", "none", "--directory", third)
    control("slurm", "down", "--purge", directory=third)
    assert done.returncode == 1
    assert f"--port {port}: a port from {port} to {port + 7} is in use" in done.stderr
    end_slurm(one)
    assert two.run("srun", "-N4", "true").returncode == 0


# --- who takes it down


@pytest.fixture
def user() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def test_a_cluster_goes_down_with_the_last_of_its_users_even_if_that_is_killed(
    plain_slurm: Slurm, user: subprocess.Popen[bytes]
) -> None:
    directory = plain_slurm.directory
    control("slurm", "up", "--for", str(user.pid), directory=directory)

    leave("slurm", plain_slurm.directory)
    assert plain_slurm.run("srun", "true").returncode == 0
    user.send_signal(signal.SIGKILL)
    user.wait()

    assert wait_until(lambda: not directory.exists())
    assert wait_until(lambda: not marked(directory))


def test_a_cluster_that_somebody_started_for_good_is_used_and_goes_on(
    plain_slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    control("slurm", "up", directory=plain_slurm.directory)

    leave("slurm", plain_slurm.directory)

    assert plain_slurm.run("srun", "true").returncode == 0
    assert given_slurm({"SLURM_CONF": f"{plain_slurm.directory}/etc/slurm.conf"}) == Slurm(
        plain_slurm.directory, False
    )
    control("slurm", "down", directory=plain_slurm.directory)


def test_the_configuration_of_a_site_is_not_taken_for_a_test_cluster(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/slurm.conf").touch()

    assert given_slurm({"SLURM_CONF": f"{tmp_path}/etc/slurm.conf"}) is None


# --- another release, in a root of its own (what takes its Slurm is in slurm/test_slurm_versions.py)


@pytest.mark.parametrize("release", ["trixie", "trixie-mpi"])
def test_a_root_is_not_made_unless_that_is_wanted(tmp_path: Path, release: str) -> None:
    done = command(
        "slurm",
        "up",
        "--release",
        release,
        "--no-install",
        "--roots",
        tmp_path,
        "--directory",
        tmp_path / "c",
    )

    assert done.returncode == 4
    assert (
        f"no Debian {release} in {tmp_path}/{release}-2; `ci/slurm install --release {release}` makes it"
        in done.stderr
    )
    assert list(tmp_path.iterdir()) == []


def test_cgroups_and_another_release_do_not_go_together(tmp_path: Path) -> None:
    done = command("slurm", "up", "--release", "trixie", "--cgroup", "v1", "--directory", tmp_path / "c")

    assert done.returncode == 1
    assert "--cgroup v1 goes with this machine's own Slurm" in done.stderr


def test_a_making_that_was_cut_off_is_removed_and_one_that_fails_is_not_used(tmp_path: Path) -> None:
    if shutil.which("debootstrap", path="/usr/sbin:/usr/bin") is None:
        pytest.skip("needs debootstrap: apt-get install debootstrap")
    rest = tmp_path / "trixie-2.making/usr/rest"
    rest.parent.mkdir(parents=True)
    rest.touch()
    mirror = f"file://{tmp_path}/no-mirror"

    done = command("slurm", "install", "--release", "trixie", "--roots", tmp_path, "--mirror", mirror)

    assert done.returncode == 4, done.stderr
    assert f"`debootstrap --variant=minbase trixie {rest.parents[1]} {mirror}` failed" in done.stderr
    assert not rest.exists()
    assert not (tmp_path / "trixie-2").exists()


def test_a_root_that_cannot_be_added_to_is_not_used_and_leaves_what_it_was_copied_from(
    tmp_path: Path,
) -> None:
    if shutil.which("debootstrap", path="/usr/sbin:/usr/bin") is None:
        pytest.skip("needs debootstrap: apt-get install debootstrap")
    (tmp_path / "trixie-2/proc").mkdir(parents=True)  # without a program in it

    done = command(
        "slurm", "install", "--release", "trixie-mpi", "--roots", tmp_path, "--mirror", "file:///none"
    )

    assert done.returncode == 4, done.stderr
    assert "apt-get" in done.stderr
    assert not (tmp_path / "trixie-mpi-2").exists()
    assert [path.name for path in (tmp_path / "trixie-2").iterdir()] == ["proc"]
