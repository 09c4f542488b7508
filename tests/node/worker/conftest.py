"""Real ranks of probes, and runs as tests declare them."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from probe_ranks import NAMED, Ranks, run_ranks
from rank_server import RankServer

from pytest_mlhpc.config.model import Environment, NodeType, Partition, Target
from pytest_mlhpc.jobs.declare import Declaration, resolve
from pytest_mlhpc.jobs.plan import run_plan


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Compute with one thread: threads that wait for each other on a busy machine cost many times what they save."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def rank_server() -> Iterator[RankServer]:
    """Return what starts ranks, one for the whole session."""
    with RankServer() as server:
        yield server


@pytest.fixture
def ranks(rank_server: RankServer, tmp_path: Path) -> Callable[..., Ranks]:
    """Do a run with all its ranks on this machine, and wait for their end."""
    return functools.partial(run_ranks, rank_server, tmp_path)


@pytest.fixture
def declare_probe() -> Callable[..., Any]:
    """Return the job spec of a probe as a test declares it, and its run, made short."""

    def make(workload: str, ranks: int, **fields: Any) -> Any:
        environment = Environment("default", "python3")
        partition = Partition(
            system="sys", name="part", scheduler="fake", launcher="auto", accelerator="cpu",
            nodes=NodeType(cores=8, memory=2**30, max=4), environments=(environment,), preset="smoke",
        )  # fmt: skip
        marked = {"steps": 2, "warmup": 1, "devices_per_node": ranks, **fields}
        launchers = dict.fromkeys(("plain", "torchrun"), "pytest_mlhpc.node.launch")
        declared = Declaration("t.py::t", "t", workload, Target(partition, environment), marked, {})
        spec = resolve(declared, NAMED, "smoke", launchers)
        return spec, dataclasses.replace(
            run_plan(spec, 0), run_id="run-1", nonce="nonce", secret="hidden", cores_per_rank=1
        )

    return make
