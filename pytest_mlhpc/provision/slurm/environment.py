"""From an environment of a Slurm partition to words for srun, and to the words before a rank's interpreter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.provision.slurm.options import settings_of
from pytest_mlhpc.system.model import Environment, Partition

#: Containers that srun itself starts, so that ranks are in them from the beginning.
_BY_SRUN: Final = frozenset({"pyxis", "enroot", "edf"})
#: Options by which Apptainer and Singularity give devices to a container (apptainer.org, "GPU Support").
_DEVICES: Final = {"cuda": ("--nv",), "rocm": ("--rocm",)}


def container_of(environment: Environment) -> Mapping[str, Any] | None:
    """Return the ``container:`` of *environment* with its runtime filled in, or None."""
    container: Mapping[str, Any] | None = environment.extra.get("container")
    return {"runtime": "apptainer", "mounts": [], **container} if container else None


def launcher_options(
    partition: Partition,
    environment: Environment,
    binds: Sequence[str] = (),
    *,
    launcher: str = "srun",
    ranks_per_node: int = 1,
) -> tuple[str, ...]:
    """Return further words for every srun of *partition*: MPI, devices, container, and the site's own ones last.

    *binds* are folders that a container must see under the same path. With *launcher* torchrun one task has all
    *ranks_per_node* devices of its node; mpirun and poprun understand none of these words and get none.

    Raises:
        UsageError: a path cannot be told to the container's runtime.
    """
    if launcher in ("mpirun", "poprun"):
        return ()
    settings = settings_of(partition)
    words = []
    if settings.mpi:
        words.append(f"--mpi={settings.mpi}")
    if settings.gpus == "gpus-per-task":
        kind = f"{settings.gpu_type}:" if settings.gpu_type else ""
        words.append(f"--gpus-per-task={kind}{ranks_per_node if launcher == 'torchrun' else 1}")
    container = container_of(environment)
    if container is not None and container["runtime"] == "edf":
        words.append(f"--environment={container['image']}")
    elif container is not None and container["runtime"] in _BY_SRUN:
        words.append(f"--container-image={container['image']}")
        if mounts := _mounts(container, binds):
            words.append(f"--container-mounts={','.join(mounts)}")
        if container.get("workdir"):
            words.append(f"--container-workdir={container['workdir']}")
    return (*words, *settings.srun)


def wrapper(environment: Environment, binds: Sequence[str] = (), accelerator: str = "cpu") -> tuple[str, ...]:
    """Return the words that start a container around a rank's interpreter, none where srun does it or there is none.

    *binds* are folders that the container must see under the same path: plan, payload, data. ``accelerator`` is the
    partition's.

    Raises:
        UsageError: the runtime cannot be used under Slurm, or a path cannot be told to it.
    """
    container = container_of(environment)
    if container is None or container["runtime"] in _BY_SRUN:
        return ()
    runtime, image = container["runtime"], str(container["image"])
    mounts, workdir = _mounts(container, binds), container.get("workdir")
    if runtime in {"apptainer", "singularity"}:
        words = ["exec", *_DEVICES.get(accelerator, ()), *(f"--bind={mount}" for mount in mounts)]
        words += [f"--pwd={workdir}"] if workdir else []
    elif runtime == "podman":
        # The host's network and environment, because ranks meet over TCP and are told by variables who they are.
        words = ["run", "--rm", "--network=host", "--ipc=host", "--env-host"]
        words += [f"--volume={mount}" for mount in mounts] + ([f"--workdir={workdir}"] if workdir else [])
    elif runtime == "shifter":
        words = [f"--image={image}", *(f"--volume={mount}" for mount in mounts)]
        return (runtime, *words, *([f"--workdir={workdir}"] if workdir else []), "--")
    elif runtime == "sarus":
        words = ["run", *(_sarus_mount(mount) for mount in mounts)]
        words += [f"--workdir={workdir}"] if workdir else []
    else:
        raise UsageError(
            f"environment {environment.name!r}: container runtime {runtime!r} cannot be used under Slurm; "
            "use apptainer, singularity, pyxis, podman, shifter, sarus or edf"
        )
    return (runtime, *words, image)


def _mounts(container: Mapping[str, Any], binds: Sequence[str]) -> list[str]:
    """Return ``source:destination`` of all that the container sees: what the site says first, then *binds*."""
    for path in binds:
        if bad := next((sign for sign in ":," if sign in path), ""):
            raise UsageError(
                f"{path!r} cannot be mounted in a container: its name holds {bad!r}; choose another shared_directory"
            )
    return [*container["mounts"], *(f"{path}:{path}" for path in dict.fromkeys(binds))]


def _sarus_mount(mount: str) -> str:
    source, _, destination = mount.partition(":")
    return f"--mount=type=bind,source={source},destination={destination or source}"
