"""Runs to be launched, and the variables of a batch where it launches them."""

from __future__ import annotations

from typing import Any

import pods

from pytest_mlhpc.node.protocol.plan import RunPlan

PODS = {"MLHPC_SCHEDULER": "pods", "MLHPC_BATCH_NODE": "a", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5"}
SLURM = {"MLHPC_SCHEDULER": "slurm", "MLHPC_BATCH_NODE": "a", "MASTER_ADDR": "a", "MASTER_PORT": "5"}
WORKER = ["/env/bin/python", "-m", "pytest_mlhpc.node.worker.main"]


def run_plan(**changes: Any) -> RunPlan:
    """Return a training of one rank, with an interpreter of its own."""
    fields = {"workload": "resnet50", "argv": (), "cores_per_rank": 3, "python": WORKER[0]}
    return pods.run_plan("run-1", **{**fields, **changes})
