"""PAYLOAD. Launcher `torchrun`: all ranks of one node, with torch's own rendezvous on the loopback interface."""

from __future__ import annotations

from typing import Dict, List, Mapping, Sequence, Tuple

from pytest_mlhpc.batch.plan import RunPlan
from pytest_mlhpc.launch.plain import worker_argv


def launch(
    run: RunPlan, nodes: Sequence[str], environment: Mapping[str, str]
) -> Tuple[List[str], Dict[str, str]]:
    """Return argument vector and environment of torchrun (``worker/elastic.py``) on one node.

    Port 0 lets the system choose a free one; ``--standalone`` means the same, but in torch 1.13 a fixed port, where a
    neighbour's torchrun would be joined. No restarts: a rank that died is a failed run.
    ``OMP_NUM_THREADS`` is always set, as torchrun would silently make it 1.

    Raises:
        ValueError: the run wants several nodes; that needs a launcher of the scheduler.
    """
    if len(nodes) > 1:
        raise ValueError(f"launcher torchrun starts ranks on one node, not on {len(nodes)}")
    argv = [run.python, "-m", "pytest_mlhpc.worker.elastic", "--nnodes=1", "--rdzv_backend=c10d"]
    argv += ["--rdzv_endpoint=localhost:0", f"--rdzv_id={run.run_id}"]
    argv += [f"--nproc_per_node={run.ranks}", "--max_restarts=0"]
    worker = worker_argv(run)
    if run.workload == "command":
        argv += ["--no_python", *worker]
    else:
        argv += worker[1:]  # torchrun starts its own interpreter on `-m module`
    return argv, {"OMP_NUM_THREADS": str(run.cores_per_rank), **environment}
