"""Trainings by torch's MPI backend: Debian trixie's torch 2.6 with its Open MPI 5, started by mpirun and by Slurm 24.11's srun."""

from collections.abc import Iterator

import pytest
from services import Slurm, share_slurm

pytestmark = [pytest.mark.slurm_versions, pytest.mark.servers]

#: Debian's own, by the name that this machine's Python does not cover in the cluster's root.
PYTHON = "/usr/bin/python3.13"

VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",  # the cluster's nodes share this machine's cores
}

TRAININGS = """\
@pytest.mark.parametrize("backend", ["gloo", "mpi"])
@pytest.mark.parametrize("nodes", [1, 2])
@train("cosmoflow", devices_per_node=2, global_batch=8, steps=3, warmup=1, judge=False)
def test_cosmoflow(run):
    assert run["loss"].last > 0

@pytest.mark.parametrize("backend", ["gloo", "mpi"])
@pytest.mark.parametrize("nodes", [1, 2])
@train("resnet50", devices_per_node=2, global_batch=16, image_size=32, steps=2, warmup=1, judge=False)
def test_resnet50(run):
    assert run["loss"].last > 0
"""

#: Losses of two ranks are the same: a sum of two has one rounding. Of four, MPI adds in another order than gloo.
TOLERANCE = {1: 0.0, 2: 1e-5}

#: Longest wait for trainings one after the other on a busy machine, in seconds.
LIMIT_S = 1800.0


@pytest.fixture(scope="session")
def slurm(request: pytest.FixtureRequest) -> Iterator[Slurm]:
    """One cluster of that release for the whole session, shared by all workers."""
    yield from share_slurm(request.config, "--release", "trixie-mpi", name="slurm-trixie-mpi", install=True)


def partition(launcher, **slurm):
    return {
        "scheduler": "slurm", "launcher": launcher, "accelerator": "cpu",
        "nodes": {"cores": 2, "memory": "16000MiB", "max": 4},
        "environments": {"default": {"python": PYTHON, "variables": VARIABLES}},
        "preset": "smoke", "time_limit": "20m", "max_jobs": 1,
        "slurm": {"partition": "cpu", "pending_limit": "1h", **slurm},
    }  # fmt: skip


def losses(record):
    return [rank["losses"] for rank in record["measurement"]["per_rank"]]


@pytest.mark.timeout(LIMIT_S + 600)
def test_mpi_trains_as_gloo_does(suite):
    suite.systems(
        cluster={"partitions": {"mpirun": partition("mpirun"), "srun": partition("srun", mpi="pmix")}}
    )
    suite.tests(TRAININGS)
    result = suite.start("--mlhpc-pack", "-k", "not (srun and gloo)").end(LIMIT_S)
    result.expect(0, passed=12)
    found = {
        (record["workload"], record["partition"], record["parameters"]["backend"], record["nodes"]): record
        for record in result.records
    }
    import json, pathlib
    pathlib.Path("/tmp/m/mpi-roots/records.json").write_text(json.dumps(result.records, indent=1))
