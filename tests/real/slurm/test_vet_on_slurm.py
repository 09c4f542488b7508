"""`srun mlhpc vet` on the nodes of a real Slurm: one process on each, and the first one's verdict is srun's exit code."""

import json
import sys
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from services import Slurm

ROOT = Path(__file__).resolve().parents[3]
SCRIPTED = ROOT / "tests/node/vet"


def vet(slurm: Slurm, folder: Path, script: dict[str, Any], **settings: Any) -> CompletedProcess[str]:
    """Vet four nodes by srun with scripted checks and children."""
    path = folder / "settings.json"
    path.write_text(json.dumps({"out": str(folder / "vet"), "budget_s": 600.0, **settings}))
    variables = [f"MLHPC_SCRIPT={json.dumps(script)}", f"PYTHONPATH={SCRIPTED}:{ROOT}"]
    # Quiet: whether it had to wait for nodes, which other tests may hold, is not of interest.
    srun = ["srun", "--quiet", "-p", "cpu", "-N4", "--ntasks-per-node=1", sys.executable]
    return slurm.run("env", *variables, *srun, SCRIPTED / "scripted_main.py", path, cwd=folder)


def fitness(folder: Path) -> dict[str, str]:
    verdict = json.loads((folder / "vet/verdict.json").read_text())
    return {node["host"]: node["fitness"] for node in verdict["nodes"]}


def reasons(folder: Path, host: str) -> str:
    verdict = json.loads((folder / "vet/verdict.json").read_text())
    return next(node["reason"] for node in verdict["nodes"] if node["host"] == host)


def test_equal_nodes_are_all_fit(slurm, tmp_path):
    done = vet(slurm, tmp_path, {})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].startswith("GO 4/4 nodes")
    assert fitness(tmp_path) == dict.fromkeys(["node1", "node2", "node3", "node4"], "fit")


def test_a_slow_first_node_is_named_and_srun_can_leave_it_out(slurm, tmp_path):
    done = vet(slurm, tmp_path, {"node1": {"speed": 0.8}}, need=3)
    assert done.returncode == 0, done.stderr
    assert [host for host, found in fitness(tmp_path).items() if found != "fit"] == ["node1"]
    shown = slurm.run("bash", "-c", ". vet/env.sh; echo $MLHPC_MASTER_ADDR $MLHPC_EXCLUDE", cwd=tmp_path)
    assert shown.stdout.split() == ["node2", "node1"]
    without = ["-p", "cpu", "-N3", "--exclude=./vet/exclude.txt"]
    job = slurm.run("srun", *without, "printenv", "SLURMD_NODENAME", cwd=tmp_path)
    assert sorted(job.stdout.split()) == ["node2", "node3", "node4"], job.stderr


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ({"hang": "second"}, "the check second did not end within 5 s"),
        # At the end, which the leader asks for: checks begin before it is found, and whom it has not seen "never came".
        ({"stop_agent": "end"}, "its agent was lost"),
    ],
)
def test_a_node_that_hangs_or_is_killed_is_named_and_the_exit_code_is_the_leaders(
    slurm, tmp_path, script, words
):
    done = vet(slurm, tmp_path, {"node3": script}, need=3, no_load=True)
    assert [host for host, found in fitness(tmp_path).items() if found != "fit"] == ["node3"]
    assert words in reasons(tmp_path, "node3")
    killed = "stop_agent" in script
    assert done.returncode == (128 + 9 if killed else 0)
    assert done.stdout.splitlines()[-1].startswith("GO 3/4 nodes")


def test_the_command_itself_vets_real_nodes_and_names_no_name_that_resolves(slurm, tmp_path):
    mlhpc = [sys.executable, "-m", "pytest_mlhpc.cli", "vet"]
    done = slurm.run(
        "srun", "-p", "cpu", "-N2", "--ntasks-per-node=1", *mlhpc, "quick", "--no-load", "--need", "2", "--output", "vet",
        "--unknown", "warn", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("GO 2/2 nodes")
    assert set(fitness(tmp_path)) == set((tmp_path / "vet/nodelist.txt").read_text().split())


@pytest.mark.slow
def test_the_command_itself_computes_and_exchanges_on_real_nodes(slurm, tmp_path):
    mlhpc = [sys.executable, "-m", "pytest_mlhpc.cli", "vet"]
    done = slurm.run(
        "srun", "-p", "cpu", "-N4", "--ntasks-per-node=1", *mlhpc, "quick", "--output", "vet", "--unknown", "warn", "--budget", "150",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode in {0, 1}, (
        done.stdout + done.stderr
    )  # figures of four nodes on one busy machine differ
    verdict = json.loads((tmp_path / "vet/verdict.json").read_text())
    for node in verdict["nodes"]:
        checks = {one["check"] for one in node["findings"]}
        assert checks >= {"gemm", "memory", "hash", "all_reduce", "pairs"}, node["host"]
