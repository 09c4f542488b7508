"""Commands that stand first on PATH, limits that no busy machine reaches, and a provisioner on a scripted cluster."""

import pytest
from local_allocations import HANG_S
from scripted_slurm import World

from pytest_mlhpc.node import processes
from pytest_mlhpc.provision.slurm import pyslurm
from pytest_mlhpc.provision.slurm.commands import CliClient


@pytest.fixture(autouse=True)
def generous_limits(monkeypatch):
    monkeypatch.setattr(CliClient.__init__, "__defaults__", (None, HANG_S))
    monkeypatch.setattr(pyslurm.probe_pyslurm, "__defaults__", (HANG_S,))
    monkeypatch.setattr(processes, "DRAIN_S", HANG_S)


@pytest.fixture
def command(tmp_path):
    """Write a command that stands first, and alone with the system's, on PATH; return the environment."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def write(name, *lines):
        (folder / name).write_text("\n".join(["#!/bin/bash", *lines, ""]))
        (folder / name).chmod(0o755)
        return {"PATH": f"{folder}:/usr/bin:/bin"}

    return write


@pytest.fixture
def world(tmp_path, monkeypatch) -> World:
    return World(tmp_path, monkeypatch)
