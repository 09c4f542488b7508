"""A target and jobs resolved for it, as fixtures that a folder's conftest.py imports."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_mlhpc.config.model import Dataset, Environment, NodeType, Partition, Target
from pytest_mlhpc.jobs.declare import Declaration, resolve
from pytest_mlhpc.jobs.metrics import Metric
from pytest_mlhpc.jobs.spec import JobSpec
from pytest_mlhpc.node.worker.workloads.catalogue import WORKLOADS

KNOWN = {workload.name: workload for workload in WORKLOADS}
LAUNCHERS = {
    "plain": "pytest_mlhpc.node.launch",
    "spawn": "pytest_mlhpc.node.launch",
    "srun": "pytest_mlhpc.node.launch",
    "torchrun": "pytest_mlhpc.node.launch",
    "ours": "site_tools.launch",
}
RATE = (Metric("rate", r"rate: (\S+)", "items/s"),)


@pytest.fixture
def target() -> Target:
    partition = Partition(
        system="sys",
        name="part",
        scheduler="fake",
        launcher="auto",
        accelerator="cpu",
        nodes=NodeType(cores=8, memory=2**30, max=4),
        environments=(Environment("default", "python3", variables={"OMP_NUM_THREADS": "{cores_per_rank}"}),),
        preset="smoke",
    )
    datasets = {"cosmo": Dataset("cosmo", "/data/cosmo", "real")}
    return Target(partition, partition.environments[0], datasets)


@pytest.fixture
def declare(target: Target) -> Callable[..., JobSpec]:
    """Resolve a test called test_it: workload, marker fields; ``params`` are parametrized, ``preset`` is --mlhpc-preset."""

    def make(workload="cosmoflow", *, node_id="t.py::test_it", params=None, preset=None, on=target, **marked):
        folder, schemas = marked.pop("folder", Path()), marked.pop("schemas", None)
        declared = Declaration(node_id, "test_it", workload, on, marked, params or {}, folder)
        return resolve(declared, KNOWN, preset, LAUNCHERS, schemas)

    return make


@pytest.fixture
def command(declare: Callable[..., JobSpec]) -> Callable[..., JobSpec]:
    """Resolve a `command` job; its program is never started by these tests."""

    def make(number: int = 0, **marked: Any) -> JobSpec:
        given = {"command": ["./bench"], "metrics": RATE, "name": f"job{number}", **marked}
        return declare("command", node_id=f"t.py::test_{number}", **given)

    return make
