"""One suite, unchanged, on this machine, on a real Slurm and on a real Kubernetes; one table compares them."""

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from services import ROOT, START_LIMIT_S

SYSTEMS = ("local", "testcluster:cpu", "testkubernetes:cpu")


def run(*words: str, folder: Path = ROOT) -> str:
    """Run a module of this interpreter in *folder*; it must end well."""
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=folder, env={**os.environ, "MLHPC_TEST_PYTHON": sys.executable, "COLUMNS": "120"},
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


#: What each system has of what the programs require. Nodes of the cluster are this machine; pods have its /usr.
FEATURES = {
    "local": ["cc", "dd", "fio", "hpcc", "lammps", "mpi", "python", "torchrun"],
    "testcluster": ["cc", "dd", "fio", "hpcc", "lammps", "mpi", "python", "torchrun"],
    "testkubernetes": ["cc", "dd", "fio", "python", "torchrun"],
}
#: Tests of suites/programs, and on how many of the three systems each has figures; nccl-tests need GPUs.
MEASURED = {
    "test_triad": 3, "test_dd": 3, "test_fio": 3, "test_json_lines": 3, "test_torch_benchmark": 3, "test_ddp": 3,
    "test_hpcc": 2, "test_melt": 2, "test_exchange[within]": 2, "test_exchange[between]": 1,
}  # fmt: skip


def write_systems(folder: Path) -> None:
    """Write the systems of the checkout with the features of FEATURES, and programs on PATH."""
    systems = yaml.safe_load((ROOT / "systems.yaml").read_text())["systems"]
    systems["local"] = {
        "partitions": {"cpu": {"scheduler": "local", "launcher": "mpirun", "accelerator": "cpu"}}
    }
    for name, features in FEATURES.items():
        partition = systems[name]["partitions"]["cpu"]
        variables = {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
            "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_mpi_yield_when_idle": "1",  # ranks of two nodes share this machine's cores
        }  # fmt: skip
        environment = {"python": sys.executable, "variables": variables}
        size = {"cores": 2, "memory": "3GiB", "max": 1 if name == "local" else 2}
        changes = {"features": features, "nodes": size, "environments": {"default": environment}}
        systems[name] = {**systems[name], "partitions": {"cpu": {**partition, **changes}}}
    systems["testcluster"]["partitions"]["cpu"]["slurm"]["mpi"] = "pmix"
    compiler = {
        "name": "compiler",
        "host_path": "/etc/alternatives",
        "mount": "/etc/alternatives",
        "read_only": True,
    }
    systems["testkubernetes"]["partitions"]["cpu"]["kubernetes"]["volumes"].append(compiler)
    (folder / "systems.yaml").write_text(yaml.safe_dump({"schema": 1, "systems": systems}))


@pytest.mark.slow
def test_the_programs_run_on_three_systems_and_a_table_compares_like_with_like(
    slurm, kubernetes, namespace, tmp_path, monkeypatch
):
    monkeypatch.delenv("CI", raising=False)
    write_systems(tmp_path)
    shutil.copytree(ROOT / "suites" / "programs", tmp_path / "suites" / "programs")
    systems = [word for system in SYSTEMS for word in ("--system", system)]
    options = ("-p", "no:cacheprovider", "--mlhpc-baseline=record")
    printed = run("pytest", "suites", *systems, *options, folder=tmp_path)
    assert f"{sum(MEASURED.values())} passed" in printed
    assert "local:cpu gives at most 1 node, 2 asked" in printed
    words = ("compare", *SYSTEMS, "--format", "csv")
    table = run("pytest_mlhpc.cli", *words, folder=tmp_path)
    found: dict[str, set[str]] = {}
    for row in csv.DictReader(table.splitlines()):
        test = row["benchmark"].rpartition("::")[2]
        found.setdefault(test, set()).update({row["system"]} if row["median"] else ())
        assert row["measured_definition"] in {"", row["definition"]}
    assert {test: len(systems) for test, systems in found.items()} == MEASURED
