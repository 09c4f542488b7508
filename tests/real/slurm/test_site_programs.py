"""The programs of suites/programs on a real cluster: built by make and mpicc, started by srun, by themselves, under torchrun."""

import shutil
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[3] / "suites" / "programs"
ENVIRONMENT = {
    "python": sys.executable,
    "variables": {
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        # The cluster's nodes share this machine's cores: ranks of two nodes may be bound to one core. A rank that polls
        # without yielding there costs its peer a time slice for each of 40,000 messages.
        "OMPI_MCA_mpi_yield_when_idle": "1",
    },
}


def entry(launcher, *features, **slurm):
    return {
        "scheduler": "slurm", "launcher": launcher, "accelerator": "cpu", "features": list(features),
        "nodes": {"cores": 2, "memory": "16000MiB", "max": 4}, "environments": {"default": ENVIRONMENT},
        "time_limit": "10m", "slurm": {"partition": "cpu", "pending_limit": "1h", **slurm},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("launcher", "options"), [("srun", {"mpi": "pmix"}), ("mpirun", {})], ids=["srun with PMIx", "mpirun"]
)
def test_they_run_unchanged(suite, launcher, options):
    if not shutil.which("mpicc"):
        pytest.fail("mpicc is missing: make servers installs it")
    shutil.copytree(PROGRAMS, suite.folder / "programs")
    features = ("cc", "mpi", "python", "torchrun")
    suite.systems(cluster={"partitions": {"part": entry(launcher, *features, **options)}})
    result = suite.run("programs")
    result.expect(0, "no feature 'cuda' and no feature 'nccl-tests'", passed=6)
