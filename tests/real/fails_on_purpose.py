"""Tests that fail, or are killed, with clusters up. Not collected by themselves: test_nothing_left.py runs them and looks around."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from gridengine_service import GridEngine
from kubernetes_service import Kubernetes
from services import Slurm, control, start_slurm, wait_until

SUBMIT = ("sbatch", "-o", "/dev/null", "-D", "/tmp", "--wrap", "trap '' TERM; setsid sleep 600 & sleep 600")


@pytest.fixture
def clean_slurm() -> None:
    """Clear nothing away: what ends the clusters is tried here."""


def note(directory: Path) -> None:
    """Tell the outer test where this cluster lies."""
    with Path(os.environ["MLHPC_TEST_CLUSTERS"]).open("a", encoding="utf-8") as file:
        file.write(f"{directory}\n")


def busy(slurm: Slurm) -> None:
    """Let a job run on it."""
    note(slurm.directory)
    assert slurm.run(*SUBMIT).returncode == 0
    assert wait_until(lambda: [job.state for job in slurm.jobs()] == ["RUNNING"])


def test_fails_with_a_busy_slurm_that_was_started_for_good(own_slurm: Slurm) -> None:
    control("slurm", "up", directory=own_slurm.directory)
    busy(own_slurm)
    pytest.fail("on purpose")


def test_is_killed_with_a_busy_slurm_that_was_started_for_good(own_slurm: Slurm) -> None:
    control("slurm", "up", directory=own_slurm.directory)
    busy(own_slurm)
    os.kill(os.getpid(), signal.SIGKILL)


def test_is_killed_while_nobody_has_the_folder_of_its_slurm(own_slurm: Slurm) -> None:
    busy(own_slurm)
    own_slurm.directory.rename(f"{own_slurm.directory}-gone")
    os.kill(os.getpid(), signal.SIGKILL)


def test_is_killed_with_a_busy_gridengine_that_was_started_for_good(own_gridengine: GridEngine) -> None:
    control("services", "up", "gridengine", directory=own_gridengine.directory)
    note(own_gridengine.directory)
    script = own_gridengine.directory / "job.sh"
    script.write_text("trap '' TERM; setsid sleep 600 & sleep 600\n", encoding="utf-8")
    assert own_gridengine.run("qsub", "-o", "/dev/null", "-j", "y", script).returncode == 0
    assert wait_until(lambda: own_gridengine.state("1") == "r")
    os.kill(os.getpid(), signal.SIGKILL)


def test_fails_as_its_slurm_does_not_come_up(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("c")
    note(directory)
    (directory / "mysql/left-half-made").mkdir(parents=True)  # refused when munged runs already
    start_slurm(directory, "--accounting", "dbd", private=True, install=False)


def test_fails_as_its_kubernetes_does_not_come_up(
    start_own_kubernetes: Callable[..., Kubernetes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = os.environ.get("MLHPC_KUBERNETES_BINARIES", "")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pytest-mlhpc/kubernetes-parts"
    (server,) = [Path(real)] if Path(real).is_dir() and real else cache.glob("server-*[0-9]")
    for program in server.iterdir():
        (tmp_path / program.name).symlink_to(program)
    (tmp_path / "kubelet").unlink()
    (tmp_path / "kubelet").write_text("#!/bin/sh\nexit 1\n")  # the last to be started
    (tmp_path / "kubelet").chmod(0o755)
    monkeypatch.setenv("MLHPC_KUBERNETES_BINARIES", str(tmp_path))
    make = tempfile.mkdtemp

    def noted(**where: str) -> str:
        directory = make(**where)
        note(Path(directory))
        return directory

    monkeypatch.setattr(tempfile, "mkdtemp", noted)
    start_own_kubernetes()
