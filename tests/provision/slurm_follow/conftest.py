"""A provisioner on a cluster that does what the test says."""

from __future__ import annotations

import pytest
from scripted_slurm import World


@pytest.fixture
def world(tmp_path, monkeypatch) -> World:
    return World(tmp_path, monkeypatch)
