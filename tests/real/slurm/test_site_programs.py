"""The programs of suites/programs on a real cluster and on this machine: built, started by MPI, by themselves, under torchrun."""

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

FEATURES = ("cc", "dd", "fio", "hpcc", "lammps", "mpi", "python", "torchrun")


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
    expect_all(suite, entry(launcher, *FEATURES, **options))


def test_they_run_unchanged_on_this_machine(suite):
    usual = entry("mpirun", *FEATURES)
    one = {**usual["nodes"], "max": 1}
    here = {name: value for name, value in usual.items() if name != "slurm"}
    expect_all(suite, {**here, "scheduler": "local", "nodes": one}, "test_exchange[cluster:part-between]")


def expect_all(suite, partition, *elsewhere):
    """Run all programs on *partition*, but those *elsewhere* that need another node."""
    for program in ("mpicc", "fio", "hpcc", "lmp"):
        if not shutil.which(program):
            pytest.fail(f"{program} is missing: make servers installs it")
    shutil.copytree(PROGRAMS, suite.folder / "programs")
    suite.systems(cluster={"partitions": {"part": partition}})
    without = [word for name in elsewhere for word in ("--deselect", f"programs/test_mpi.py::{name}")]
    result = suite.run("programs", *without)
    result.expect(0, "no feature 'cuda' and no feature 'nccl-tests'", passed=10 - len(elsewhere))
