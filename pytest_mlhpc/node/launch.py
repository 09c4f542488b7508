"""Launchers: a run plan and good nodes become an argument vector and an environment, nothing else.

plain: one rank, or a program once on the first of its nodes. srun: every rank is one task of a job step. mpirun: OpenMPI (4 and 5)
starts the ranks on the nodes that we name. torchrun: torch's own agent starts the ranks of a node; on several nodes srun or podrun
starts the agents. spawn: ranks of a program on one node, by ``node/spawn.py``. podrun: every rank is a process that a pod's agent
starts; for programs that are no torch programs, or start themselves.

poprun: Graphcore's PopRun, which is OpenMPI's mpirun that also hands out IPUs; one instance a rank. Its arguments are those that
Graphcore's examples use (graphcore/examples): ``--num-instances``, ``--num-replicas``, ``--ipus-per-replica``, ``--host``,
``--mpi-global-args``, ``--mpi-local-args``. Which partition of IPUs, how instances lie on NUMA nodes and all else is a site's, by
``launcher_options``.
"""

from __future__ import annotations

import importlib
import shlex
import sys
from typing import Any, Callable, Dict, List, Mapping, Sequence, Tuple

from pytest_mlhpc.node import spawn
from pytest_mlhpc.node.protocol.plan import RunPlan

#: Argument vector and environment.
Launch = Tuple[List[str], Dict[str, str]]
#: Makes them of a run, its nodes and an environment.
Launcher = Callable[[RunPlan, Sequence[str], Mapping[str, str]], Launch]

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


#: Options of srun by which it starts a container around each task (pyxis, enroot, CSCS' container engine).
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


def in_slurm(environment: Mapping[str, str]) -> bool:
    """Return whether the nodes are those of a Slurm job."""
    return environment.get(SCHEDULER) == "slurm"


def in_pods(environment: Mapping[str, str]) -> bool:
    """Return whether the nodes are pods."""
    return environment.get(SCHEDULER) == PODS


def on_nodes(
    run: RunPlan, nodes: Sequence[str], environment: Mapping[str, str], *, per_node: int, cores: int
) -> List[str]:
    """Return the arguments that start *per_node* tasks on every one of *nodes*: srun's, or podrun's where nodes are pods.

    Raises:
        ValueError: there is neither a Slurm job nor a group of pods around us, or pods are to get arguments for srun.
    """
    if not in_pods(environment):
        return srun_argv(run, nodes, environment, per_node=per_node, cores=cores)
    return podrun_argv(run, nodes, per_node=per_node)


def podrun_argv(run: RunPlan, nodes: Sequence[str], *, per_node: int, ranks: bool = False) -> List[str]:
    """Return the arguments that start *per_node* tasks on each of *nodes*, which are the first pods; *ranks*: tasks are ranks.

    Raises:
        ValueError: the site has arguments for srun or mpirun.
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


def srun_argv(
    run: RunPlan, nodes: Sequence[str], environment: Mapping[str, str], *, per_node: int, cores: int
) -> List[str]:
    """Return srun's arguments for a step of *per_node* tasks with *cores* cores each on every one of *nodes*.

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


def plain(run: RunPlan, nodes: Sequence[str], environment: Mapping[str, str]) -> Launch:
    """Return argument vector and environment of the run's only process; on another node than the batch's by srun.

    Raises:
        ValueError: the run wants more than one rank or node.
    """
    if run.started != 1 or (len(nodes) > 1 and not run.once):
        raise ValueError(
            f"launcher plain starts one rank on one node, not {run.started} on {len(nodes)}; use torchrun"
        )
    if starts_here(run, nodes, environment):
        return worker_argv(run), dict(environment)
    argv = srun_argv(run, nodes[:1], environment, per_node=1, cores=run.cores_per_rank)
    return argv + worker_argv(run), dict(environment)


def starts_here(run: RunPlan, nodes: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return whether the batch itself can start the run's only process: it is on that node, and srun is not needed."""
    if not in_slurm(environment):
        return True
    return list(used(run, nodes)) == [environment.get(BATCH_NODE)] and not needs_srun(run)


def srun(run: RunPlan, nodes: Sequence[str], environment: Mapping[str, str]) -> Launch:
    """Return argument vector and environment of one srun for all ranks; rank r is on node r // ranks per node.

    Raises:
        ValueError: no Slurm job, or ranks that cannot be shared evenly by the nodes.
    """
    each = ranks_per_node(run, nodes)
    argv = srun_argv(run, nodes, environment, per_node=each, cores=run.cores_per_rank)
    label = (
        ["--label"] if run.workload == "command" else []
    )  # ranks of ours have a channel for what they print
    return [*argv, *label, *worker_argv(run)], {
        **with_threads(run, environment),
        "MLHPC_RANKS_FROM": "slurm",
    }


#: Variables that a rank on another node needs, beside those of the run; OpenMPI forwards only what it is asked to.
FORWARDED = (
    "PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONUNBUFFERED", "OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


def mpirun(run: RunPlan, nodes: Sequence[str], environment: Mapping[str, str]) -> Launch:
    """Return argument vector and environment of one mpirun for all ranks; rank r is on node r // ranks per node.

    OpenMPI would bind each of two ranks to a single core: without options of the site for it ranks are not bound.

    Raises:
        ValueError: ranks that cannot be shared evenly by the nodes.
    """
    each = ranks_per_node(run, nodes)
    given = {**with_threads(run, environment), "MLHPC_RANKS_FROM": "openmpi"}
    argv = ["mpirun", "-n", str(run.started), "-N", str(each)]
    argv += ["--host", ",".join(f"{node}:{each}" for node in nodes)]
    if not any(word.lstrip("-") in ("bind-to", "map-by", "rankfile", "rf") for word in run.launcher_options):
        argv += ["--bind-to", "none"]
    for name in sorted({*FORWARDED, *run.variables, *(name for name in given if name.startswith("MLHPC_"))}):
        if name in given:
            argv += ["-x", name]
    return [*argv, *run.launcher_options, *worker_argv(run)], given


#: Variables of PopRun's own that ranks on other nodes need as well (Graphcore's examples).
POPRUN_FORWARDED = (*FORWARDED, "OPAL_PREFIX", "CPATH", "IPUOF_VIPU_API_TIMEOUT", "POPLAR_ENGINE_OPTIONS")


def poprun(run: RunPlan, nodes: Sequence[str], environment: Mapping[str, str]) -> Launch:
    """Return argument vector and environment of one poprun for all ranks; rank r is on node r // ranks per node.

    Each rank drives ``ipu_replicas`` replicas on ``ipus_per_replica`` IPUs each (``node/worker/workloads/fields/compiled_devices.py``).

    Raises:
        ValueError: ranks that cannot be shared evenly by the nodes; arguments of the site that would replace ours.
    """
    ranks_per_node(run, nodes)
    given = {**with_threads(run, environment), "MLHPC_RANKS_FROM": "openmpi"}
    replicas = run.ranks * int(run.parameters.get("ipu_replicas") or 1)
    argv = ["poprun", f"--num-instances={run.ranks}", f"--num-replicas={replicas}"]
    argv.append(f"--ipus-per-replica={int(run.parameters.get('ipus_per_replica') or 1)}")
    if len(nodes) > 1 or not starts_here(run, nodes, environment):
        argv.append(f"--host={','.join(nodes)}")
    if any(word.startswith("--mpi-local-args") for word in run.launcher_options):
        raise ValueError(
            "launcher_options: --mpi-local-args is ours, it forwards variables; name them under `variables`"
        )
    if in_pods(environment) and not any(
        word.startswith("--mpi-global-args") for word in run.launcher_options
    ):
        argv.append("--mpi-global-args=--allow-run-as-root")  # containers have no other user
    wanted = {*POPRUN_FORWARDED, *run.variables, *(name for name in given if name.startswith("MLHPC_"))}
    forwarded = [word for name in sorted(wanted) if name in given for word in ("-x", name)]
    argv.append(f"--mpi-local-args={shlex.join(forwarded)}")
    return [*argv, *run.launcher_options, *worker_argv(run)], given


def podrun(run: RunPlan, nodes: Sequence[str], environment: Mapping[str, str]) -> Launch:
    """Return argument vector and environment of one podrun for all ranks; rank r is on pod r // ranks per pod.

    Raises:
        ValueError: no group of pods, or ranks that cannot be shared evenly by them.
    """
    each = ranks_per_node(run, nodes)
    if not in_pods(environment):
        raise ValueError(
            f"launcher podrun needs several pods, this is {environment.get(SCHEDULER) or 'none'}"
        )
    argv = podrun_argv(run, nodes, per_node=each, ranks=True)
    return argv + worker_argv(run), with_threads(run, environment)


#: The program that is an agent of torchrun, as it is started and known by.
AGENT = "pytest_mlhpc.node.torchrun"


def torchrun(run: RunPlan, nodes: Sequence[str], environment: Mapping[str, str]) -> Launch:
    """Return argument vector and environment of torchrun, one agent a node.

    On the batch's own node, port 0 lets the system choose a free one; ``--standalone`` means the same, but in torch 1.13
    a fixed port, where a neighbour's torchrun would be joined. On several nodes the first one's agent listens at
    MASTER_ADDR and MASTER_PORT, and an agent's number is its node's in the step, so that rank r is on node r // ranks per
    node; torch's `c10d` would number the agents as they come. No restarts: a rank that died is a failed run.
    ``OMP_NUM_THREADS`` is always set, as torchrun would silently make it 1.

    Raises:
        ValueError: several nodes that are neither Slurm's nor pods, or ranks that cannot be shared evenly by the nodes.
    """
    each = ranks_per_node(run, nodes)
    agent = [*run.wrapper, run.python, "-m", AGENT, f"--nnodes={len(nodes)}"]
    given = with_threads(run, environment)
    if len(nodes) == 1 and starts_here(run, nodes, environment):
        agent += ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", f"--rdzv_id={run.run_id}"]
        return agent + _ranks(run, each), given
    argv = on_nodes(run, nodes, environment, per_node=1, cores=run.cores_per_rank * each)
    agent += [f"--master_addr={given['MASTER_ADDR']}", f"--master_port={given['MASTER_PORT']}"]
    return argv + agent + _ranks(run, each), {**given, "MLHPC_RANKS_FROM": environment[SCHEDULER]}


def _ranks(run: RunPlan, each: int) -> List[str]:
    argv = [f"--nproc_per_node={each}", "--max_restarts=0"]
    if run.workload == "command":
        return [*argv, "--no_python", run.python, "-m", spawn.__name__, spawn.LABEL, "--", *run.argv]
    return [*argv, "-m", "pytest_mlhpc.node.worker.main"]  # torchrun starts its own interpreter


def spawned(run: RunPlan, nodes: Sequence[str], environment: Mapping[str, str]) -> Launch:
    """Return argument vector and environment of one process that starts all ranks on the only node.

    Raises:
        ValueError: several nodes.
    """
    if len(nodes) != 1:
        raise ValueError(f"launcher spawn starts ranks on one node, not on {len(nodes)}")
    argv = [sys.executable, "-m", spawn.__name__, str(run.started), "--", *worker_argv(run)]
    return argv, with_threads(run, environment)


#: Our own launchers by name.
LAUNCHERS: Mapping[str, Launcher] = {
    "plain": plain,
    "torchrun": torchrun,
    "srun": srun,
    "mpirun": mpirun,
    "poprun": poprun,
    "podrun": podrun,
    "spawn": spawned,
}


def find_launcher(name: str) -> Launcher:
    """Return the launcher that a run plan names: one of ours, or ``launch`` of another payload module.

    Raises:
        ImportError, AttributeError: there is no such module, or it has no ``launch``.
    """
    if name in LAUNCHERS:
        return LAUNCHERS[name]
    module: Any = importlib.import_module(name)
    launcher: Launcher = module.launch
    return launcher
