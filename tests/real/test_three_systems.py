"""One suite file, unchanged, on this machine, on a real Slurm and on a real Kubernetes; one table compares them."""

import os
import subprocess
import sys

from services import ROOT, START_LIMIT_S

SYSTEMS = ("local", "testcluster:cpu", "testkubernetes:cpu")


def run(*words: str) -> str:
    """Run a module of this interpreter in the checkout; it must end well."""
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, env={**os.environ, "MLHPC_TEST_PYTHON": sys.executable, "COLUMNS": "120"},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=START_LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_one_suite_file_runs_on_three_systems_and_one_table_compares_them(
    slurm, kubernetes, namespace, tmp_path, monkeypatch
):
    monkeypatch.delenv("CI", raising=False)  # there, a first run on an unknown machine is a failure
    systems = [word for system in SYSTEMS for word in ("--system", system)]
    printed = run(
        "pytest", "suites/training/test_cosmoflow.py", "-k", "memory", *systems, "-p", "no:cacheprovider", "--mlhpc-preset", "smoke",
        "-o", f"mlhpc_baselines_dir={tmp_path / 'baselines'}", "--mlhpc-baseline=update",
    )  # fmt: skip
    assert "3 passed" in printed
    assert printed.count(" new") >= 2  # those of `local` stay with the machine
    table = run("pytest_mlhpc.cli", "compare", "local", "testcluster", "testkubernetes")
    heads = [line.split() for line in table.splitlines() if line.rstrip().endswith("testkubernetes:cpu")]
    rows = [line for line in table.splitlines() if "throughput [samples/s]" in line]
    assert heads == [["local:cpu", "testcluster:cpu", "testkubernetes:cpu"]], table
    assert [row.count("(1)") for row in rows] == [3, 3], table  # each figure of one run on each system
