from __future__ import annotations

import os
from pathlib import Path

import pytest

from pytest_mlhpc.provision.slurm.cli import CliClient
from pytest_mlhpc.provision.slurm.client import SlurmUnavailable


@pytest.fixture
def answering(tmp_path):
    """Make a client whose scontrol prints this and exits with this code."""

    def make(text: str, code: int = 0) -> CliClient:
        (tmp_path / "answer").write_text(text)
        path = Path(tmp_path / "scontrol")
        path.write_text(
            f'#!/bin/sh\n[ "$*" = "show config" ] || exit 3\ncat {tmp_path}/answer >&{1 + (code > 0)}\nexit {code}\n'
        )
        path.chmod(0o755)
        return CliClient({**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"})

    return make


def test_a_cluster_has_the_name_of_its_configuration(answering):
    text = "Configuration data as of 2026\nAccountingStorageHost   = x\nClusterName             = archer2\nComm = y\n"
    assert answering(text).cluster() == "archer2"


@pytest.mark.parametrize("text", ["", "ClusterName             = (null)\n", "MyClusterName = x\n"])
def test_a_cluster_without_a_name_has_an_empty_one(answering, text):
    assert answering(text).cluster() == ""


def test_a_cluster_that_does_not_answer_is_no_cluster_without_a_name(answering):
    with pytest.raises(SlurmUnavailable, match="Unable to contact slurm controller"):
        answering(
            "slurm_load_ctl_conf error: Unable to contact slurm controller (connect failure)", 1
        ).cluster()
