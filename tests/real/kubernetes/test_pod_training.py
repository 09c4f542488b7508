"""The project's own suite in pods: every workload trains there, from memory and from files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_mlhpc.store.store import read_records

pytestmark = [pytest.mark.servers, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 7200.0


def test_the_whole_smoke_suite_of_one_node_runs_in_pods(kubernetes, namespace, tmp_path, state_dir):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "suites/training", "--system", "testkubernetes:cpu"),
            *("-o", f"mlhpc_baselines_dir={tmp_path / 'baselines'}", "--mlhpc-baseline=update"),
            *("-p", "no:cacheprovider", "-p", "no:randomly"),
        ],
        cwd=ROOT, env={**os.environ, "MLHPC_TEST_PYTHON": sys.executable, "COLUMNS": "160"},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    # Its nodes have one core: trainings of two ranks on each are left out, and named.
    assert "6 passed" in done.stdout
    assert "and 2 more: a node of testkubernetes:cpu has 1 core, 2 ranks asked" in done.stdout
    stored = list(read_records(state_dir))
    assert {record.verdict for record in stored} == {"new"}
    trained = [(record.measurement.workload, record.measurement.data_source) for record in stored]
    assert sorted(trained) == [
        ("cosmoflow", "files"), ("cosmoflow", "memory"), ("deepcam", "files"), ("deepcam", "memory"),
        ("language_model", "memory"), ("resnet50", "memory"),
    ]  # fmt: skip
