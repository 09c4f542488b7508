"""torchrun as the launcher starts it: what it leaves on a node."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pytest_mlhpc.worker.elastic import own_folder

pytestmark = pytest.mark.servers

LIMIT_S = 300


def start(folder: Path, script: str) -> subprocess.Popen[bytes]:
    """Start two ranks of a shell script, which may write only below *folder*."""
    agent = ["-m", "pytest_mlhpc.worker.elastic", "--nnodes=1", "--nproc_per_node=2", "--max_restarts=0"]
    meeting = ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "--rdzv_id=run"]
    return subprocess.Popen(
        [sys.executable, *agent, *meeting, "--no_python", "sh", "-c", script],
        env={**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize(("script", "code"), [("true", 0), ("exit 3", 1)], ids=["ended", "failed"])
def test_nothing_is_left_in_the_folder_of_temporary_files(tmp_path, script, code):
    assert start(tmp_path, script).wait(LIMIT_S) == code
    assert list(tmp_path.glob("torchelastic_*")) == []


def test_nothing_is_left_where_it_was_told_to_end(tmp_path):
    process = start(tmp_path, f"touch {tmp_path}/begun; exec sleep {LIMIT_S}")
    until = time.monotonic() + LIMIT_S
    while not (tmp_path / "begun").exists():
        assert time.monotonic() < until
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) != 0
    assert list(tmp_path.glob("torchelastic_*")) == []


def test_a_folder_that_the_environment_names_stays(tmp_path):
    environment = {"PET_LOG_DIR": str(tmp_path)}
    with own_folder(environment):
        assert environment == {"PET_LOG_DIR": str(tmp_path)}
    assert tmp_path.is_dir()
