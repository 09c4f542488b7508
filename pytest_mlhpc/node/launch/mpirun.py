"""Launcher `mpirun`: OpenMPI (4 and 5) starts the ranks on the nodes that we name."""

from __future__ import annotations

from typing import Dict, List, Mapping, Sequence, Tuple

from pytest_mlhpc.node.launch import step
from pytest_mlhpc.node.protocol.plan import RunPlan

#: Variables that a rank on another node needs, beside those of the run; OpenMPI forwards only what it is asked to.
FORWARDED = (
    "PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONUNBUFFERED", "OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


def launch(
    run: RunPlan, nodes: Sequence[str], environment: Mapping[str, str]
) -> Tuple[List[str], Dict[str, str]]:
    """Return argument vector and environment of one mpirun for all ranks; rank r is on node r // ranks per node.

    OpenMPI would bind each of two ranks to a single core: without options of the site for it ranks are not bound.

    Raises:
        ValueError: ranks that cannot be shared evenly by the nodes.
    """
    each = step.ranks_per_node(run, nodes)
    given = {**step.with_threads(run, environment), "MLHPC_RANKS_FROM": "openmpi"}
    argv = ["mpirun", "-n", str(run.started), "-N", str(each)]
    argv += ["--host", ",".join(f"{node}:{each}" for node in nodes)]
    if not any(word.lstrip("-") in ("bind-to", "map-by", "rankfile", "rf") for word in run.launcher_options):
        argv += ["--bind-to", "none"]
    for name in sorted({*FORWARDED, *run.variables, *(name for name in given if name.startswith("MLHPC_"))}):
        if name in given:
            argv += ["-x", name]
    return [*argv, *run.launcher_options, *step.worker_argv(run)], given
