"""``mlhpc screen --job`` on a real Slurm: it enters a running job, names its slow rank, and leaves no trace in it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from services import wait_until


@pytest.fixture
def job(slurm, tmp_path):
    """The id of a running job of four ranks on two nodes; it ends with the test."""
    shutil.copy(Path(__file__).with_name("ranks.py.txt"), tmp_path / "ranks.py")
    for rank in range(4):
        (tmp_path / f"{rank}.step").write_text("0")
    script = tmp_path / "job.sh"
    script.write_text(
        f"#!/bin/bash\n#SBATCH --nodes=2 --ntasks=4 --ntasks-per-node=2 --partition=cpu --time=20\n"
        f"srun {sys.executable} {tmp_path}/ranks.py {tmp_path}\n"
    )
    done = slurm.run("sbatch", "--parsable", f"--output={tmp_path}/out", script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    number = done.stdout.strip()
    steps = [tmp_path / f"{rank}.step" for rank in range(4)]
    assert wait_until(lambda: all(int(step.read_text() or 0) > 3 for step in steps)), (
        tmp_path / "out"
    ).read_text()
    yield number
    (tmp_path / "end").touch()
    slurm.run("scancel", number)


def screen(slurm, *words):
    return slurm.run(sys.executable, "-m", "pytest_mlhpc.cli", "screen", "--python", sys.executable, *words)


def test_the_slow_rank_of_a_running_job_is_named(slurm, job):
    done = screen(slurm, "--seconds", "15", "--job", job)
    assert done.returncode == 0, done.stderr
    first, *lines = done.stderr.splitlines()
    assert f"screened job {job} for" in first
    assert "4 ranks on" in first
    (slow,) = [line for line in lines if "one slow rank" in line]
    assert ": rank 2 " in slow
    assert "they sleep while it works" in slow
    assert slurm.run("squeue", "-h", "-j", job, "-o", "%T").stdout.strip() == "RUNNING"


def test_a_job_that_has_ended_cannot_be_looked_at(slurm, job):
    slurm.run("scancel", job)
    assert wait_until(lambda: not slurm.run("squeue", "-h", "-j", job, "-t", "RUNNING").stdout.strip())
    done = screen(slurm, "--seconds", "1", "--job", job)
    assert done.returncode == 2
    assert f"job {job}" in done.stderr


def test_a_job_that_slurm_does_not_know_is_refused(slurm):
    done: subprocess.CompletedProcess[str] = screen(slurm, "--seconds", "1", "--job", "999999")
    assert done.returncode == 2
    assert "Slurm knows no job 999999" in done.stderr
