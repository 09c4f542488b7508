"""Trainings by torch's MPI backend: Debian trixie's torch 2.6 with its Open MPI 5, started by mpirun and by Slurm 24.11's srun."""

from collections.abc import Iterator
from pathlib import Path

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
    # They share its network, too, where other tests' clusters come and go: Open MPI takes each interface that is up when it
    # begins, and waits for ever for one that is gone.
    "OMPI_MCA_btl_tcp_if_include": "lo",
}

TRAININGS = """\
@pytest.mark.parametrize("backend", ["gloo", "mpi"])
@pytest.mark.parametrize("nodes", [1, 2])
@train("cosmoflow", devices_per_node=2, global_batch=8, steps=3, warmup=1, judge=False)
def test_cosmoflow(run):
    assert run["loss"].last > 0

@pytest.mark.parametrize("backend", ["gloo", "mpi"])
@pytest.mark.parametrize("nodes", [1, 2])
@train("resnet50", devices_per_node=2, global_batch=16, image_size=32, steps=1, warmup=1, judge=False)
def test_resnet50(run):
    assert run["loss"].last > 0

@pytest.mark.parametrize("backend", ["gloo", "mpi"])
@train("deepcam", devices_per_node=2, global_batch=4, batch_norm_group="all", steps=2, warmup=1, judge=False)
def test_normalised_together(run):
    assert run["all_gather_count"].value > 10
"""

#: Workload and ranks -> how far losses of MPI may be from those of gloo. A sum of two has one order; of four, MPI's is another.
#: Batch normalisation of four samples enlarges that some hundred times with each update: ResNet-50 is compared after one, which
#: changes its loss by a tenth.
TOLERANCE = {
    ("cosmoflow", 2): 0.0, ("cosmoflow", 4): 1e-5, ("resnet50", 2): 0.0, ("resnet50", 4): 1e-3, ("deepcam", 2): 0.0,
}  # fmt: skip

#: Longest wait for trainings one after the other on a busy machine, in seconds.
LIMIT_S = 1800.0


@pytest.fixture(scope="session")
def slurm(request: pytest.FixtureRequest) -> Iterator[Slurm]:
    """One cluster of that release for the whole session, shared by all workers."""
    yield from share_slurm(request.config, "--release", "trixie-mpi", name="slurm-trixie-mpi", install=True)


def interface():
    """Return the interface of the default route: mpirun's own daemons do not take the loopback."""
    rows = [row.split() for row in Path("/proc/net/route").read_text().splitlines()[1:]]
    return next((row[0] for row in rows if row[1] == "00000000"), "")


def partition(launcher, **slurm):
    return {
        "scheduler": "slurm", "launcher": launcher, "accelerator": "cpu",
        "nodes": {"cores": 2, "memory": "16000MiB", "max": 4},
        "environments": {"default": {"python": PYTHON, "variables": {**VARIABLES, "PRTE_MCA_prte_if_include": interface()}}},
        "preset": "smoke", "time_limit": "20m", "max_jobs": 1,
        "slurm": {"partition": "cpu", "pending_limit": "1h", **slurm},
    }  # fmt: skip


def losses(record):
    """Return the losses of each rank, warm-up included."""
    return [rank["losses"] for rank in record["measurement"]["per_rank"]]


@pytest.mark.timeout(LIMIT_S + 600)
def test_mpi_trains_as_gloo_does_by_mpirun_and_by_srun(suite):
    suite.systems(
        cluster={"partitions": {"mpirun": partition("mpirun"), "srun": partition("srun", mpi="pmix")}}
    )
    suite.tests(TRAININGS)
    result = suite.start("--mlhpc-pack", "-k", "not (srun and gloo)").end(LIMIT_S)
    result.expect(0, passed=15)
    found = {
        (
            record["measurement"]["workload"],
            len(losses(record)),
            record["partition"],
            record["parameters"]["backend"],
        ): record
        for record in result.records
    }
    assert [record["measurement"]["environment"]["backend"] for record in found.values()] == [
        key[3] for key in found
    ]
    assert {record["measurement"]["environment"]["torch"] for record in found.values()} == {"2.6.0+debian"}
    for (workload, ranks, launcher, backend), record in found.items():
        if backend == "mpi":
            gloo = losses(found[workload, ranks, "mpirun", "gloo"])
            expected = [pytest.approx(of_rank, rel=TOLERANCE[workload, ranks], abs=0.0) for of_rank in gloo]
            assert losses(record) == expected, (workload, ranks, launcher)


def test_ranks_that_srun_starts_without_pmix_are_told_so(suite):
    suite.systems(cluster={"partitions": {"part": partition("srun", mpi="none")}})
    suite.tests(TRAININGS)
    result = suite.run("-k", "cosmoflow and 1-mpi")
    result.expect(
        1, "too_few_ranks", "MPI calls this rank 0 of 1, the launcher", "or srun with --mpi for it", failed=1
    )
