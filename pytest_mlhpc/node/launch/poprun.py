"""Launcher `poprun`: Graphcore's PopRun, which is OpenMPI's mpirun that also hands out IPUs; one instance a rank.

Its arguments are those that Graphcore's examples use (graphcore/examples): ``--num-instances``, ``--num-replicas``,
``--ipus-per-replica``, ``--host``, ``--mpi-global-args``, ``--mpi-local-args``. Which partition of IPUs, how instances lie on
NUMA nodes and all else is a site's, by ``launcher_options``.
"""

from __future__ import annotations

import shlex
from typing import Dict, List, Mapping, Sequence, Tuple

from pytest_mlhpc.node.launch import mpirun, plain, step
from pytest_mlhpc.node.protocol.plan import RunPlan

#: Variables of PopRun's own that ranks on other nodes need as well (Graphcore's examples).
FORWARDED = (*mpirun.FORWARDED, "OPAL_PREFIX", "CPATH", "IPUOF_VIPU_API_TIMEOUT", "POPLAR_ENGINE_OPTIONS")


def launch(
    run: RunPlan, nodes: Sequence[str], environment: Mapping[str, str]
) -> Tuple[List[str], Dict[str, str]]:
    """Return argument vector and environment of one poprun for all ranks; rank r is on node r // ranks per node.

    Each rank drives ``ipu_replicas`` replicas on ``ipus_per_replica`` IPUs each (``node/worker/workloads/fields/compiled_devices.py``).

    Raises:
        ValueError: ranks that cannot be shared evenly by the nodes; arguments of the site that would replace ours.
    """
    step.ranks_per_node(run, nodes)
    given = {**step.with_threads(run, environment), "MLHPC_RANKS_FROM": "openmpi"}
    replicas = run.ranks * int(run.parameters.get("ipu_replicas") or 1)
    argv = ["poprun", f"--num-instances={run.ranks}", f"--num-replicas={replicas}"]
    argv.append(f"--ipus-per-replica={int(run.parameters.get('ipus_per_replica') or 1)}")
    if len(nodes) > 1 or not plain.here(run, nodes, environment):
        argv.append(f"--host={','.join(nodes)}")
    if any(word.startswith("--mpi-local-args") for word in run.launcher_options):
        raise ValueError(
            "launcher_options: --mpi-local-args is ours, it forwards variables; name them under `variables`"
        )
    if step.in_pods(environment) and not any(
        word.startswith("--mpi-global-args") for word in run.launcher_options
    ):
        argv.append("--mpi-global-args=--allow-run-as-root")  # containers have no other user
    wanted = {*FORWARDED, *run.variables, *(name for name in given if name.startswith("MLHPC_"))}
    forwarded = [word for name in sorted(wanted) if name in given for word in ("-x", name)]
    argv.append(f"--mpi-local-args={shlex.join(forwarded)}")
    return [*argv, *run.launcher_options, *step.worker_argv(run)], given
