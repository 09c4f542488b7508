"""Slurm 24.11, that of Debian trixie in a root of its own: the contract of the clients, and sessions as users run them."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator

import pytest
from services import Slurm, share_slurm
from test_slurm_clients import *  # noqa: F403 - the same tests and fixtures, on the cluster of this module's `slurm`

pytestmark = [pytest.mark.slurm_versions, pytest.mark.servers]

RELEASE = ("--release", "trixie")

#: All four want two nodes for themselves, and share one job.
PACKED = """\
    @pytest.mark.train("cosmoflow", nodes=2, devices=4, steps=6, warmup=2, judge=False)
    @pytest.mark.parametrize(("launcher", "name"), [("srun", "by_srun"), ("torchrun", "by_torchrun")])
    def test_training(run):
        assert run["loss"].last > 0

    @script("exit 3", nodes=2, devices=4, launcher="srun", exclusive=True)
    def test_bad(run): pass

    @script("echo $SLURMD_NODENAME; echo rate: 4", nodes=2, devices=4, launcher="srun", exclusive=True)
    def test_after_it(run):
        assert run["rate"].value == 4
"""


@pytest.fixture(scope="session")
def slurm(request: pytest.FixtureRequest) -> Iterator[Slurm]:
    """One cluster of that release for the whole session, shared by all workers."""
    yield from share_slurm(request.config, *RELEASE, name="trixie-", install=True)


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
    suite.tests(PACKED)
    result = suite.start("--pack").end(limit_s=300)
    result.expect(1, "worker_exit:", "exit code 3", passed=3, failed=1)
    assert sorted(result.verdicts()) == ["unjudged", "unjudged", "unjudged", "worker_exit"]
    assert [job.state for job in suite.jobs()] == ["COMPLETED"]
    ranks = [
        record["measurement"]["per_rank"] for record in result.records if "test_training" in record["node_id"]
    ]
    assert [len(of_a_run) for of_a_run in ranks] == [4, 4]
    assert [len({rank["host"] for rank in of_a_run}) for of_a_run in ranks] == [2, 2]


def test_a_job_that_somebody_cancels_is_told_as_cancelled(suite):
    suite.gated("one")
    session = suite.start()
    session.begun("one")
    suite.slurm.run("scancel", session.job("RUNNING").id)
    result = session.end()
    result.expect(1, "cancelled_outside:", error=1)
    assert result.verdicts() == ["cancelled_outside"]


def test_ctrl_c_cancels_the_job(suite):
    suite.gated("one")
    session = suite.start()
    session.begun("one")
    session.signal(signal.SIGINT)
    session.end().expect(2, "KeyboardInterrupt")
    assert [job.state for job in suite.jobs()] == ["CANCELLED"]


def test_the_python_of_that_release_runs_the_payload(suite):
    suite.tests("""\
        @script("cat /etc/debian_version; echo rate: 4")
        def test_program(run):
            assert run["rate"].value == 4
    """)
    systems = suite.folder / "systems.yaml"
    systems.write_text(
        systems.read_text().replace(f'"python": "{sys.executable}"', '"python": "/usr/bin/python3"')
    )
    suite.run().expect(0, passed=1)
    (payload,) = (suite.state / "payload").glob("*.zip")
    (script,) = (suite.state / "runs").rglob("job.sh")
    assert str(payload) in script.read_text()
