"""Launcher `podrun`: every rank is a process that a pod's agent starts; the program learns its rank from RANK.

For programs that are no torch programs, or start themselves: `torchrun` is what torch programs expect.
"""

from __future__ import annotations

from typing import Dict, List, Mapping, Sequence, Tuple

from pytest_mlhpc.node.launch import step
from pytest_mlhpc.node.protocol.plan import RunPlan


def launch(
    run: RunPlan, nodes: Sequence[str], environment: Mapping[str, str]
) -> Tuple[List[str], Dict[str, str]]:
    """Return argument vector and environment of one podrun for all ranks; rank r is on pod r // ranks per pod.

    Raises:
        ValueError: no group of pods, or ranks that cannot be shared evenly by them.
    """
    each = step.ranks_per_node(run, nodes)
    if not step.in_pods(environment):
        raise ValueError(
            f"launcher podrun needs several pods, this is {environment.get(step.SCHEDULER) or 'none'}"
        )
    argv = step.podrun(run, nodes, per_node=each, ranks=True)
    return argv + step.worker_argv(run), step.with_threads(run, environment)
