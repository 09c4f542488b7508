"""Real ranks of probes, and runs as tests declare them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from probe_ranks import NAMED, Ranks, free_port
from rank_helpers import Batch, finish, start_rank

from pytest_mlhpc.batch.plan import RunPlan
from pytest_mlhpc.jobs.declare import Declaration, resolve
from pytest_mlhpc.jobs.planning import run_of
from pytest_mlhpc.system.model import Environment, NodeType, Partition, Target


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ranks]:
    """Do a run with all its ranks on this machine, and wait for their end."""

    def do(run: RunPlan, **variables: str) -> Ranks:
        port = str(free_port())
        with Batch(str(tmp_path / "channel")) as batch:
            started = [
                start_rank(
                    batch, run, tmp_path,
                    **({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(run.ranks),
                        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if run.ranks > 1 else {}),
                    **variables,
                )
                for rank in range(run.ranks)
            ]  # fmt: skip
            return Ranks(run, batch, finish(*started))

    return do


@pytest.fixture
def declare_probe() -> Callable[..., Any]:
    """Return the job spec of a probe as a test declares it, and its run, made short."""

    def make(workload: str, ranks: int, **fields: Any) -> Any:
        environment = Environment("default", "python3")
        partition = Partition(
            system="sys", name="part", scheduler="fake", launcher="auto", accelerator="cpu",
            nodes=NodeType(cores=8, memory=2**30, max=4), environments=(environment,), preset="smoke",
        )  # fmt: skip
        marked = {"steps": 2, "warmup": 1, "devices": ranks, **fields}
        launchers = {name: f"pytest_mlhpc.launch.{name}" for name in ("plain", "torchrun")}
        declared = Declaration("t.py::t", "t", workload, Target(partition, environment), marked, {})
        spec = resolve(declared, NAMED, "smoke", launchers)
        return spec, dataclasses.replace(run_of(spec, 0), run_id="run-1", nonce="nonce", cores_per_rank=1)

    return make
