"""Slurm 24.11, that of Debian trixie in a root of its own: the contract of the clients, and sessions as users run them."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from running_suites import text_of
from services import Slurm, control, end_slurm, share_slurm, wait_until
from test_slurm_clients import *  # noqa: F403 - the same tests and fixtures, on the cluster of this module's `slurm`
from test_slurm_payload import *  # noqa: F403 - the same

pytestmark = [pytest.mark.slurm_versions, pytest.mark.servers]

RELEASE = ("--release", "trixie")


@pytest.fixture(scope="session")
def slurm(request: pytest.FixtureRequest) -> Iterator[Slurm]:
    """One cluster of that release for the whole session, shared by all workers."""
    yield from share_slurm(request.config, *RELEASE, name="slurm-trixie", install=True)


@pytest.fixture
def slurm_release() -> tuple[str, ...]:
    """Private clusters are of that release, too."""
    return RELEASE


def test_commands_and_jobs_are_of_the_newer_slurm(slurm):
    assert slurm.run("sbatch", "--version").stdout.startswith("slurm-wlm 24.11.")
    done = slurm.run("srun", "-N2", "sh", "-c", "squeue --version; . /etc/os-release; echo $VERSION_CODENAME")
    assert [line.rpartition(".")[0] or line for line in sorted(done.stdout.splitlines())] == [
        *["slurm-wlm 24.11"] * 2, *["trixie"] * 2,
    ]  # fmt: skip


def test_a_packed_session_trains_on_two_nodes_and_one_failing_run_does_not_hurt_the_next(suite):
    suite.tests(text_of(__file__, "packed.py.txt"))
    result = suite.run("--mlhpc-pack")
    result.expect(1, "worker_exit:", "exit code 3", passed=3, failed=1)
    assert sorted(result.verdicts()) == ["unjudged", "unjudged", "unjudged", "worker_exit"]
    assert [job.state for job in suite.jobs()] == ["COMPLETED"]
    ranks = [
        record["measurement"]["per_rank"] for record in result.records if "test_training" in record["node_id"]
    ]
    assert [len(of_a_run) for of_a_run in ranks] == [4, 4]
    assert [len({rank["host"] for rank in of_a_run}) for of_a_run in ranks] == [2, 2]


def test_arguments_and_folders_reach_the_cluster_as_they_are(slurm, tmp_path):
    folder = tmp_path / "a  b'c|$HOME\u00e9"
    folder.mkdir()
    words = ("a  b", "$x `y`", "'\"", "", "two\nlines", "-z", "\u00e9")
    code = "import os, sys; print([os.getcwd(), *sys.argv[1:]])"
    done = slurm.run("srun", sys.executable, "-I", "-X", "utf8", "-c", code, *words, cwd=folder)
    assert done.stdout == f"{[str(folder), *words]}\n", done.stderr


def test_a_folder_that_the_cluster_does_not_see_is_named(slurm):
    done = slurm.run("squeue", cwd=Path("/var/lib"))
    assert done.returncode == 1
    assert (
        done.stderr
        == "squeue: the test cluster does not see /var/lib; ci/slurm up --bind makes it see more\n"
    )


def test_the_root_that_lost_its_holder_is_made_again_and_nothing_stays_mounted(start_own_slurm):
    cluster = start_own_slurm("--accounting", "none")
    holder = int((cluster.directory / "pids/box").read_text().split()[0])
    assert " - tmpfs box " in mounts(str(holder))
    assert " - tmpfs box " not in mounts("self")

    os.kill(holder, signal.SIGKILL)
    wait_until(lambda: cluster.run("squeue").returncode)
    assert "squeue: the test cluster is down; ci/slurm up starts it" in cluster.run("squeue").stderr
    control("slurm", "up", directory=cluster.directory)
    assert cluster.run("srun", "-N4", "true").returncode == 0
    end_slurm(cluster)

    every = [entry.name for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    assert [pid for pid in every if str(cluster.directory) in mounts(pid)] == []  # each node had one there
    assert not cluster.directory.exists()


def mounts(pid: str) -> str:
    """Return what a process sees mounted; nothing once it has ended."""
    try:
        return Path(f"/proc/{pid}/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
