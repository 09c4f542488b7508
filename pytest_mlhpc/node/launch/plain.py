"""Launcher `plain`: one rank, or a program once on the first of its nodes, started by itself."""

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
    if run.started != 1 or (len(nodes) > 1 and not run.once):
        raise ValueError(
            f"launcher plain starts one rank on one node, not {run.started} on {len(nodes)}; use torchrun"
        )
    if here(run, nodes, environment):
        return step.worker_argv(run), dict(environment)
    argv = step.srun(run, nodes[:1], environment, per_node=1, cores=run.cores_per_rank)
    return argv + step.worker_argv(run), dict(environment)


def here(run: RunPlan, nodes: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return whether the batch itself can start the run's only process: it is on that node, and srun is not needed."""
    if not step.in_slurm(environment):
        return True
    return list(step.used(run, nodes)) == [environment.get(step.BATCH_NODE)] and not step.needs_srun(run)
