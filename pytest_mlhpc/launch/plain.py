"""PAYLOAD. Launcher `plain`: one rank, or one program, started by itself."""

from __future__ import annotations

from typing import Dict, List, Mapping, Sequence, Tuple

from pytest_mlhpc.batch.plan import RunPlan


def launch(
    run: RunPlan, nodes: Sequence[str], environment: Mapping[str, str]
) -> Tuple[List[str], Dict[str, str]]:
    """Return argument vector and environment of the run's only process.

    Raises:
        ValueError: the run wants more than one rank or node.
    """
    if run.ranks != 1 or len(nodes) > 1:
        raise ValueError(
            f"launcher plain starts one rank on one node, not {run.ranks} on {len(nodes)}; use torchrun"
        )
    return worker_argv(run), dict(environment)


def worker_argv(run: RunPlan) -> List[str]:
    """Return the argument vector of one rank: the worker, or the program of a `command` run."""
    if run.workload == "command":
        return list(run.argv)
    return [run.python, "-m", "pytest_mlhpc.worker.main"]
