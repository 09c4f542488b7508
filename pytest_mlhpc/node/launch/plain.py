"""Launcher `plain`: one rank, or one program, started by itself."""

from __future__ import annotations

from typing import Dict, List, Mapping, Sequence, Tuple

from pytest_mlhpc.node.launch import step
from pytest_mlhpc.node.protocol.plan import RunPlan


def launch(
    run: RunPlan, nodes: Sequence[str], environment: Mapping[str, str]
) -> Tuple[List[str], Dict[str, str]]:
    """Return argument vector and environment of the run's only process; on another node than the batch's by srun.

    Raises:
        ValueError: the run wants more than one rank or node.
    """
    if run.ranks != 1 or len(nodes) > 1:
        raise ValueError(
            f"launcher plain starts one rank on one node, not {run.ranks} on {len(nodes)}; use torchrun"
        )
    if here(run, nodes, environment):
        return step.worker_argv(run), dict(environment)
    argv = step.srun(run, nodes, environment, per_node=1, cores=run.cores_per_rank)
    return argv + step.worker_argv(run), dict(environment)


def here(run: RunPlan, nodes: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return whether the only one of *nodes* is the batch's own, and nothing is asked of srun: it may start a container."""
    if not step.in_slurm(environment):
        return True
    return list(nodes) == [environment.get(step.BATCH_NODE)] and not run.launcher_options
