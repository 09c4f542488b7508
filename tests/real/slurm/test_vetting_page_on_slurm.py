"""The script of docs/vetting.md is submitted to a real Slurm as it stands there, with fewer nodes and without computing."""

import re
import sys
from pathlib import Path

import pytest
from services import Slurm

from pytest_mlhpc.node.vet.place import own_addresses

ROOT = Path(__file__).resolve().parents[3]


def run_the_page(slurm: Slurm, folder: Path, vet: str) -> tuple[int, str]:
    """Run the script with *vet* in the place of `mlhpc` and words in that of torchrun; return code and output."""
    text = (ROOT / "docs/vetting.md").read_text()
    [script] = re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (folder / "job.sh").write_text(script.replace("need=6", "need=2"))
    (folder / "bin").mkdir()
    for name, body in (("mlhpc", vet), ("torchrun", 'echo "trains on $SLURMD_NODENAME: $*"')):
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / "bin" / name).chmod(0o755)
    address = own_addresses("localhost")[0]  # names of test nodes are this machine's loopback
    export = f"--export=ALL,ADDRESS={address},PATH={folder / 'bin'}:/usr/bin:/bin,PYTHONPATH={ROOT}"
    done = slurm.run(
        "sbatch", "--wait", "-p", "cpu", "--nodes=3", "--nodelist=node[1-3]", "--cpus-per-task=1", "--time=5", "--output=out.txt", export,
        "job.sh", cwd=folder,
    )  # fmt: skip
    return done.returncode, (folder / "out.txt").read_text()


VET = f'exec {sys.executable} -m pytest_mlhpc.cli "$@" --no-load --unknown warn'


@pytest.mark.parametrize(
    ("before", "nodes"),
    [
        pytest.param("", {"node1", "node2"}, id="all fit"),
        pytest.param(
            '[ $SLURMD_NODENAME = node1 ] && export TMPDIR=/no/such; set -- "$@" --for job; export MASTER_ADDR=$ADDRESS; ',
            {"node2", "node3"},
            id="the first unfit",
        ),
    ],
)
def test_the_script_runs_on_nodes_that_are_fit(slurm, tmp_path, before, nodes):
    code, output = run_the_page(slurm, tmp_path, before + VET)
    assert code == 0, output
    assert re.search(rf"^GO {3 if 'node1' in nodes else 2}/3 nodes, ", output, re.MULTILINE), output
    trained = dict(re.findall(r"^trains on (\w+): (.*)$", output, re.MULTILINE))
    assert set(trained) == nodes, output
    assert all(f"--rdzv-endpoint={min(nodes)}:29400" in words for words in trained.values())


def test_the_script_ends_before_the_run_where_too_few_are_fit(slurm, tmp_path):
    before = '[ $SLURMD_NODENAME = node3 ] || export TMPDIR=/no/such; set -- "$@" --for job; export MASTER_ADDR=$ADDRESS; '
    code, output = run_the_page(slurm, tmp_path, before + VET)
    assert code == 1
    assert "NO-GO: 1/3 nodes fit, 2 needed" in output
    assert "trains on" not in output
