"""What all launchers share: the words of one rank, and of the job step by which Slurm starts ranks."""

from __future__ import annotations

import sys
from typing import Dict, List, Mapping, Sequence

from pytest_mlhpc.node.protocol.plan import RunPlan

#: Set by the batch where nodes come from a scheduler: its name, and the node on which the batch itself runs.
SCHEDULER, BATCH_NODE = "MLHPC_SCHEDULER", "MLHPC_BATCH_NODE"

#: The scheduler's name where nodes are pods, and the variable with the path at which ``node/batch/podrun.py`` asks for them.
PODS, HUB = "pods", "MLHPC_HUB"


#: The only option of ``podrun``: a process that ends badly ends no other.
KEEP_GOING = "--keep-going"


def worker_argv(run: RunPlan) -> List[str]:
    """Return the argument vector of one rank: wrapper, then the worker, or the program of a `command` run."""
    if run.workload == "command":
        return [*run.wrapper, *run.argv]
    return [*run.wrapper, run.python, "-m", "pytest_mlhpc.node.worker.main"]


def ranks_per_node(run: RunPlan, nodes: Sequence[str]) -> int:
    """Return how many ranks each of *nodes* gets.

    Raises:
        ValueError: the ranks cannot be shared evenly.
    """
    each, rest = divmod(run.started, len(nodes))
    if rest or not each:
        raise ValueError(f"{run.started} ranks cannot be shared evenly by {len(nodes)} nodes")
    return each


#: Words of srun by which it starts a container around each task (pyxis, enroot, CSCS' container engine).
_CONTAINER = ("--container-", "--environment=")


def needs_srun(run: RunPlan) -> bool:
    """Return whether only srun can start the run's process on the batch's own node.

    A rank gets all that the site says of srun; a program that is started once only what starts its container, as an mpirun
    of its own must not begin inside a step.
    """
    if run.once:
        return any(word.startswith(_CONTAINER) for word in run.launcher_options)
    return bool(run.launcher_options)


def used(run: RunPlan, nodes: Sequence[str]) -> Sequence[str]:
    """Return those of *nodes* on which processes are started: of a program that is started once, the first."""
    return nodes[:1] if run.once else nodes


def with_threads(run: RunPlan, environment: Mapping[str, str]) -> Dict[str, str]:
    """Return *environment* with as many OpenMP threads as a rank owns cores, unless it says otherwise."""
    return {"OMP_NUM_THREADS": str(run.cores_per_rank), **environment}


def rank_variables(rank: int, local: int, size: int) -> Dict[str, str]:
    """Return the variables from which a rank learns its number, that on its node, and how many there are (torchrun's names)."""
    return {"RANK": str(rank), "LOCAL_RANK": str(local), "WORLD_SIZE": str(size)}


def in_slurm(environment: Mapping[str, str]) -> bool:
    """Return whether the nodes are those of a Slurm job."""
    return environment.get(SCHEDULER) == "slurm"


def in_pods(environment: Mapping[str, str]) -> bool:
    """Return whether the nodes are pods."""
    return environment.get(SCHEDULER) == PODS


def on_nodes(
    run: RunPlan, nodes: Sequence[str], environment: Mapping[str, str], *, per_node: int, cores: int
) -> List[str]:
    """Return the words that start *per_node* tasks on every one of *nodes*: srun's, or podrun's where nodes are pods.

    Raises:
        ValueError: there is neither a Slurm job nor a group of pods around us, or pods are to get words for srun.
    """
    if not in_pods(environment):
        return srun(run, nodes, environment, per_node=per_node, cores=cores)
    return podrun(run, nodes, per_node=per_node)


def podrun(run: RunPlan, nodes: Sequence[str], *, per_node: int, ranks: bool = False) -> List[str]:
    """Return the words that start *per_node* tasks on each of *nodes*, which are the first pods; *ranks*: tasks are ranks.

    Raises:
        ValueError: the site has words for srun or mpirun.
    """
    if run.launcher_options not in ((), (KEEP_GOING,)):
        raise ValueError(
            f"launcher_options are for srun and mpirun, pods take none: {' '.join(run.launcher_options)}"
        )
    flags = ["--ranks"] if ranks else []
    argv = [
        sys.executable,
        "-m",
        "pytest_mlhpc.node.batch.podrun",
        run.run_id,
        str(len(nodes)),
        str(per_node),
    ]
    return [*argv, *flags, *run.launcher_options, "--"]


def srun(
    run: RunPlan, nodes: Sequence[str], environment: Mapping[str, str], *, per_node: int, cores: int
) -> List[str]:
    """Return srun's words for a step of *per_node* tasks with *cores* cores each on every one of *nodes*.

    ``--ntasks-per-node`` is always given, because ``-N2 -n4`` may be placed 3 + 1. No ``--mem``: some sites forbid it,
    and a step may use its job's memory. A site's own options come last, so that they win; ``--hint``, also that
    of the job, excludes ``--cpu-bind`` (srun(1)).

    Raises:
        ValueError: there is no Slurm job around us.
    """
    if not in_slurm(environment):
        raise ValueError(f"launcher {run.launcher!r} needs a Slurm job for {len(nodes)} nodes")
    argv = ["srun", f"--job-name={run.run_id}", f"--nodes={len(nodes)}", f"--ntasks={per_node * len(nodes)}"]
    argv += [f"--ntasks-per-node={per_node}", f"--cpus-per-task={cores}", f"--nodelist={','.join(nodes)}"]
    argv += ["--distribution=block", "--kill-on-bad-exit=1", "--wait=0", "--export=ALL", "--input=none"]
    if environment.get("SLURM_STEP_ID"):
        argv.append("--overlap")  # the batch is itself a step, which holds the CPUs
    opinion = any(word.startswith(("--cpu-bind", "--hint")) for word in run.launcher_options)
    if not opinion and not environment.get("SLURM_HINT"):
        argv.append("--cpu-bind=cores")
    return [*argv, *run.launcher_options]
