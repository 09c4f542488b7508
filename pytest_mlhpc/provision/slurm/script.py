"""What a Slurm job script has of its own: its ``#SBATCH`` lines, and the arguments of its launchers.

``#SBATCH`` lines are read by sbatch, which removes quotes and backslashes but expands nothing (:func:`directive`). It was tried
on Slurm 22.05. Nothing here reads or writes a file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Final

from pytest_mlhpc.config.model import Environment, Partition
from pytest_mlhpc.node.protocol.plan import Plan
from pytest_mlhpc.provision.scheduler.script import STARTED_BY_SRUN, ScriptRules, container_of, mounts_of
from pytest_mlhpc.provision.slurm.options import SlurmSettings, settings_of

#: Slurm writes the job's own output here, in the plan's directory.
OUTPUT: Final = "slurm.out"
#: Arguments that sbatch reads without quoting.
_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./&\[\]-]+\Z")


def directive(argument: str) -> str:
    """Return the ``#SBATCH`` line that sbatch reads as the one argument *argument* (``--name`` or ``--name=value``)."""
    if _PLAIN.match(argument):
        return f"#SBATCH {argument}"
    long = argument.startswith("--")
    option, _, value = argument.partition("=") if long else (argument[:2], "", argument[2:])
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'#SBATCH {option}{"=" if long else ""}"{escaped}"'


def output_pattern(path: str) -> str:
    """Return *path* as a file name pattern of sbatch(1), in which ``%`` and a backslash mean something.

    A doubled backslash is one, and where there is one nothing else is replaced; else ``%%`` is a percent sign.
    """
    return path.replace("\\", "\\\\") if "\\" in path else path.replace("%", "%%")


def sbatch_lines(plan: Plan, partition: Partition, environment: Environment, name: str) -> list[str]:
    """Return the ``#SBATCH`` lines of a job called *name* that carries out *plan*."""
    settings = settings_of(partition)
    options = [
        *_sbatch_options(plan, partition, settings, name),
        *_uenv_options(environment),
        *settings.sbatch,
    ]
    return list(map(directive, options))


def _sbatch_options(plan: Plan, partition: Partition, settings: SlurmSettings, name: str) -> Iterator[str]:
    """Yield the options for sbatch, without the site's own further ones."""
    nodes = plan.nodes + plan.spares
    yield f"--job-name={name}"
    settings = replace(settings, nodelist=",".join(plan.nodelist) or settings.nodelist)
    for option in ("partition", "qos", "account", "reservation", "constraint", "licenses", "nodelist"):
        if value := getattr(settings, option):
            yield f"--{option}={value}"
    if excluded := [hosts for hosts in (settings.exclude, *plan.excluded_nodes) if hosts]:
        yield f"--exclude={','.join(excluded)}"
    yield f"--nodes={nodes}"
    ranks, cores = _tasks_per_node(plan, partition)
    if settings.tasks == "sbatch":
        yield f"--ntasks-per-node={ranks}"
        yield f"--cpus-per-task={cores}"
    if settings.whole_nodes(nodes):
        yield "--exclusive"
    yield from _device_options(plan, partition, settings, nodes)
    if settings.tres_per_node:
        yield f"--tres-per-node={settings.tres_per_node}"
    if settings.memory == "all":
        yield "--mem=0"
    elif isinstance(settings.memory, int):
        yield f"--mem={max(1, settings.memory >> 20)}M"
    # No --signal: Slurm sends SIGTERM at the limit anyway; a job that ended by an earlier one would not say TIMEOUT.
    yield f"--time={max(1, math.ceil(plan.time_limit_s / 60))}"
    yield f"--chdir={plan.directory}"
    yield f"--output={output_pattern(str(PurePosixPath(plan.directory, OUTPUT)))}"
    yield "--open-mode=append"
    yield "--no-requeue"
    yield "--export=NONE"
    if settings.comment:
        yield f"--comment={settings.comment}"


def _tasks_per_node(plan: Plan, partition: Partition) -> tuple[int, int]:
    """Return ranks on a node and the cores of each, of the run that needs most cores; without runs the whole node."""
    shapes = [(max(1, run.started // run.nodes), run.cores_per_rank) for run in plan.runs]
    return max(shapes or [(1, partition.nodes.cores)], key=lambda shape: (shape[0] * shape[1], shape[0]))


def _device_options(plan: Plan, partition: Partition, settings: SlurmSettings, nodes: int) -> Iterator[str]:
    """Yield the options for accelerators and other generic resources."""
    count = partition.nodes.devices
    if plan.runs and not settings.whole_nodes(nodes) and partition.accelerator != "cpu":
        count = min(count, max(max(1, run.ranks // run.nodes) for run in plan.runs))
    kind = f"{settings.gpu_type}:" if settings.gpu_type else ""
    gres = [settings.gres] if settings.gres else []
    if count and settings.gpus == "gpus-per-node":
        yield f"--gpus-per-node={kind}{count}"
    elif count and settings.gpus == "gpus":
        yield f"--gpus={kind}{count * nodes}"
    elif count and settings.gpus == "gres":
        gres.insert(0, f"gpu:{kind}{count}")
    if gres:
        yield f"--gres={','.join(gres)}"


def _uenv_options(environment: Environment) -> Iterator[str]:
    uenv = environment.extra.get("uenv")
    if uenv:
        yield f"--uenv={uenv['image']}"
        if uenv.get("view"):
            yield f"--view={uenv['view']}"


def launcher_options(
    partition: Partition,
    environment: Environment,
    binds: Sequence[str] = (),
    *,
    launcher: str = "srun",
    ranks_per_node: int = 1,
) -> tuple[str, ...]:
    """Return further arguments for every srun of *partition*: MPI, devices, container, then the site's own.

    *binds* are folders that a container must see under the same path. With *launcher* torchrun one task has all
    *ranks_per_node* devices of its node; mpirun and poprun understand none of these arguments and get none.

    Raises:
        UsageError: the container's runtime cannot take a path.
    """
    if launcher in ("mpirun", "poprun"):
        return ()
    settings = settings_of(partition)
    arguments = []
    if settings.mpi:
        arguments.append(f"--mpi={settings.mpi}")
    if settings.gpus == "gpus-per-task":
        kind = f"{settings.gpu_type}:" if settings.gpu_type else ""
        arguments.append(f"--gpus-per-task={kind}{ranks_per_node if launcher == 'torchrun' else 1}")
    container = container_of(environment)
    if container is not None and container["runtime"] == "edf":
        arguments.append(f"--environment={container['image']}")
    elif container is not None and container["runtime"] in STARTED_BY_SRUN:
        arguments.append(f"--container-image={container['image']}")
        if mounts := mounts_of(container, binds):
            arguments.append(f"--container-mounts={','.join(mounts)}")
        if container.get("workdir"):
            arguments.append(f"--container-workdir={container['workdir']}")
    return (*arguments, *settings.srun)


#: Job scripts of Slurm.
SLURM: Final = ScriptRules(
    output=OUTPUT,
    directives=sbatch_lines,
    launcher_options=launcher_options,
    prologue=(
        "# With the first, srun would hand no variable on; with the second, it refuses other cores than the job's.",
        "unset SLURM_EXPORT_ENV SLURM_TRES_PER_TASK",
    ),
)
