"""`srun mlhpc vet --for job` on a real Slurm: what would stop the job is named with its node, as the user's to mend."""

import json
import sys
from pathlib import Path
from typing import Any

from services import Slurm

from pytest_mlhpc.node.vet.place import own_addresses

#: The rendezvous as an address that other nodes can reach: test nodes resolve each other's names to their one machine's loopback.
MASTER = f"export MASTER_ADDR={own_addresses('localhost')[0]} GLOO_SOCKET_IFNAME=lo"

VET = f"{MASTER}; exec {sys.executable} -m pytest_mlhpc.cli vet quick --for job --no-load --unknown warn --output vet"


def vet(slurm: Slurm, folder: Path, *options: str, script: str) -> Any:
    """Vet by srun with a shell script on each node, which ends with the command."""
    return slurm.run("srun", "-p", "cpu", *options, "bash", "-c", script, cwd=folder)


def said(folder: Path, host: str, check: str) -> list[dict[str, Any]]:
    """Return what a check said of a node that is no good news."""
    verdict = json.loads((folder / "vet/verdict.json").read_text())
    return [
        finding
        for node in verdict["nodes"]
        if node["host"] == host
        for finding in node["findings"]
        if finding["check"] == check and finding["severity"] not in {"PASS", "INFO"}
    ]


def test_a_node_whose_temporary_folder_is_missing_is_left_out_as_the_user_s_problem(slurm, tmp_path):
    script = f"[ $SLURMD_NODENAME = node2 ] && export TMPDIR=/no/such/folder; {VET} --need 2"
    done = vet(slurm, tmp_path, "-N3", "--ntasks-per-node=1", script=script)
    assert done.returncode == 0, done.stdout + done.stderr
    [finding] = said(tmp_path, "node2", "job_tmp")
    assert (finding["severity"], finding["origin"]) == ("CRITICAL", "user_problem")
    assert "[user_problem] /no/such/folder has 0 B free" in done.stdout
    assert (tmp_path / "vet/exclude.txt").read_text().split() == ["node2"]


def test_a_variable_that_differs_on_one_node_is_named_by_vote(slurm, tmp_path):
    script = f"[ $SLURMD_NODENAME = node3 ] && export NCCL_ALGO=Ring; {VET}"
    done = vet(slurm, tmp_path, "-N3", "--ntasks-per-node=1", script=script)
    assert done.returncode == 0, done.stdout + done.stderr
    [finding] = said(tmp_path, "node3", "job_environment")
    assert (finding["severity"], finding["rule"]) == ("WARNING", "vote")
    assert "NCCL_ALGO=Ring" in finding["reason"]
    assert not said(tmp_path, "node1", "job_environment")


def test_tasks_that_are_bound_to_one_core_are_critical(slurm, tmp_path):
    options = ("-N1", "--ntasks-per-node=2", "--overcommit")
    done = vet(slurm, tmp_path, *options, script=f"taskset -cp 0 $$ >/dev/null; {VET}")
    assert done.returncode == 1, done.stdout + done.stderr
    [host] = [node["host"] for node in json.loads((tmp_path / "vet/verdict.json").read_text())["nodes"]]
    [finding] = said(tmp_path, host, "job_binding")
    assert finding["rule"] == "job.cores_per_cpu_rank"
    assert "2 of 2 ranks share 1 cores" in finding["reason"], "both tasks were seen"
    assert done.stdout.splitlines()[-1].startswith("NO-GO")


def test_an_allocation_that_ends_too_early_is_critical_on_the_node_that_asks(slurm, tmp_path):
    done = vet(slurm, tmp_path, "-N1", "-t", "10", script=f"{VET} --hours 2")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "hours are left, and the run takes 2" in done.stdout
