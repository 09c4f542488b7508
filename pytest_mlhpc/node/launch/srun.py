"""Launcher `srun`: every rank is one task of a job step."""

from __future__ import annotations

from typing import Dict, List, Mapping, Sequence, Tuple

from pytest_mlhpc.node.launch import step
from pytest_mlhpc.node.protocol.plan import RunPlan


def launch(
    run: RunPlan, nodes: Sequence[str], environment: Mapping[str, str]
) -> Tuple[List[str], Dict[str, str]]:
    """Return argument vector and environment of one srun for all ranks; rank r is on node r // ranks per node.

    Raises:
        ValueError: no Slurm job, or ranks that cannot be shared evenly by the nodes.
    """
    each = step.ranks_per_node(run, nodes)
    argv = step.srun(run, nodes, environment, per_node=each, cores=run.cores_per_rank)
    label = (
        ["--label"] if run.workload == "command" else []
    )  # ranks of ours have a channel for what they print
    return [*argv, *label, *step.worker_argv(run)], {
        **step.with_threads(run, environment),
        "MLHPC_RANKS_FROM": "slurm",
    }
