"""Launcher `torchrun`: torch's own agent starts the ranks of a node; on several nodes srun or podrun starts the agents."""

from __future__ import annotations

from typing import Dict, List, Mapping, Sequence, Tuple

from pytest_mlhpc.node.launch import plain, step
from pytest_mlhpc.node.protocol.plan import RunPlan


def launch(
    run: RunPlan, nodes: Sequence[str], environment: Mapping[str, str]
) -> Tuple[List[str], Dict[str, str]]:
    """Return argument vector and environment of torchrun (``node/worker/elastic.py``), one agent a node.

    On the batch's own node, port 0 lets the system choose a free one; ``--standalone`` means the same, but in torch 1.13
    a fixed port, where a neighbour's torchrun would be joined. On several nodes the first one's agent listens at
    MASTER_ADDR and MASTER_PORT, and an agent's number is its node's in the step, so that rank r is on node r // ranks per
    node; torch's `c10d` would number the agents as they come. No restarts: a rank that died is a failed run.
    ``OMP_NUM_THREADS`` is always set, as torchrun would silently make it 1.

    Raises:
        ValueError: several nodes that are neither Slurm's nor pods, or ranks that cannot be shared evenly by the nodes.
    """
    each = step.ranks_per_node(run, nodes)
    agent = [*run.wrapper, run.python, "-m", "pytest_mlhpc.node.worker.elastic", f"--nnodes={len(nodes)}"]
    given = step.with_threads(run, environment)
    if len(nodes) == 1 and plain.here(run, nodes, environment):
        agent += ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", f"--rdzv_id={run.run_id}"]
        return agent + _ranks(run, each), given
    argv = step.on_nodes(run, nodes, environment, per_node=1, cores=run.cores_per_rank * each)
    agent += [f"--master_addr={given['MASTER_ADDR']}", f"--master_port={given['MASTER_PORT']}"]
    return argv + agent + _ranks(run, each), {**given, "MLHPC_RANKS_FROM": environment[step.SCHEDULER]}


def _ranks(run: RunPlan, each: int) -> List[str]:
    argv = [f"--nproc_per_node={each}", "--max_restarts=0"]
    if run.workload == "command":
        return [*argv, "--no_python", *run.argv]
    return [*argv, "-m", "pytest_mlhpc.node.worker.main"]  # torchrun starts its own interpreter
