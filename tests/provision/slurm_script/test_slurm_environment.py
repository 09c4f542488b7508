"""Containers, MPI and devices: words for srun, and words before a rank's interpreter."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.provision.slurm.environment import launcher_options, wrapper
from pytest_mlhpc.provision.slurm.options import SlurmSettings
from pytest_mlhpc.provision.slurm.script import batch_python
from pytest_mlhpc.system.model import Environment, NodeType, Partition


def container(runtime: str | None, **more: Any) -> Environment:
    """Return an environment in a container that already mounts /data."""
    extra = {
        "image": "/i.sif",
        "mounts": ["/data:/data"],
        **({"runtime": runtime} if runtime else {}),
        **more,
    }
    return Environment("c", "python3", extra={"container": extra})


def told(environment: Environment, *binds: str, **options: Any) -> tuple[str, ...]:
    nodes = NodeType(16, 2**34, 4, 4)
    partition = Partition("s", "p", "slurm", "srun", "cuda", nodes, (environment,), scheduler_options=options)
    return launcher_options(partition, environment, binds)


def test_srun_is_told_of_mpi_and_devices_and_the_sites_own_words_come_last():
    plain = Environment("default", "python3")
    assert told(plain) == ()
    assert told(plain, mpi="pmix", gpus="gpus-per-task", gpu_type="h100", srun=["--hint=nomultithread"]) == (
        "--mpi=pmix", "--gpus-per-task=h100:1", "--hint=nomultithread",
    )  # fmt: skip


def test_the_launcher_decides_what_a_task_is():
    plain = Environment("default", "python3")
    options = {"gpus": "gpus-per-task", "srun": ["--hint=nomultithread"]}
    where = Partition(
        "s", "p", "slurm", "srun", "cuda", NodeType(16, 2**34, 4, 4), (plain,), scheduler_options=options
    )
    for launcher, words in (
        ("srun", ("--gpus-per-task=1", "--hint=nomultithread")),
        ("torchrun", ("--gpus-per-task=4", "--hint=nomultithread")),
        ("mpirun", ()),
        ("poprun", ()),
    ):
        assert launcher_options(where, plain, launcher=launcher, ranks_per_node=4) == words


@pytest.mark.parametrize(
    ("runtime", "words"),
    [
        ("pyxis", ("--container-image=/i.sif", "--container-mounts=/data:/data,/state:/state", "--container-workdir=/w")),
        ("enroot", ("--container-image=/i.sif", "--container-mounts=/data:/data,/state:/state", "--container-workdir=/w")),
        ("edf", ("--environment=/i.sif",)),
        ("apptainer", ()),
    ],
)  # fmt: skip
def test_srun_starts_some_containers(runtime: str, words: tuple[str, ...]):
    assert told(container(runtime, workdir="/w"), "/state") == words


@pytest.mark.parametrize(
    ("runtime", "words"),
    [
        (None, "apptainer exec --nv --bind=/data:/data --bind=/state:/state --pwd=/w /i.sif"),
        ("singularity", "singularity exec --nv --bind=/data:/data --bind=/state:/state --pwd=/w /i.sif"),
        ("podman", "podman run --rm --network=host --ipc=host --env-host --volume=/data:/data --volume=/state:/state --workdir=/w /i.sif"),
        ("shifter", "shifter --image=/i.sif --volume=/data:/data --volume=/state:/state --workdir=/w --"),
        ("sarus", "sarus run --mount=type=bind,source=/data,destination=/data --mount=type=bind,source=/state,destination=/state --workdir=/w /i.sif"),
        ("pyxis", ""),
        ("edf", ""),
    ],
)  # fmt: skip
def test_other_containers_are_started_before_the_interpreter(runtime: str | None, words: str):
    found = wrapper(container(runtime, workdir="/w"), ["/state", "/state"], accelerator="cuda")
    assert " ".join(found) == words


def test_an_image_with_spaces_stays_one_word():
    environment = Environment(
        "c", "python3", extra={"container": {"image": "/my images/i.sif", "mounts": []}}
    )
    assert wrapper(environment) == ("apptainer", "exec", "/my images/i.sif")


def test_without_a_container_nothing_comes_before_the_interpreter():
    assert wrapper(Environment("default", "python3"), ["/state"]) == ()


def test_docker_is_refused_under_slurm():
    with pytest.raises(
        UsageError, match="environment 'c': container runtime 'docker' cannot be used under Slurm"
    ):
        wrapper(container("docker"))


@pytest.mark.parametrize("path", ["/a,b", "/a:b"])
def test_a_path_that_mounts_cannot_say_is_refused(path: str):
    with pytest.raises(UsageError, match="choose another shared_directory"):
        wrapper(container("apptainer"), [path])


@pytest.mark.parametrize(
    ("settings", "environment", "python"),
    [
        (SlurmSettings(), Environment("d", "/opt/python"), "/opt/python"),
        (SlurmSettings(), container("apptainer"), "python3"),
        (SlurmSettings(batch_python="/host/python"), container("edf"), "/host/python"),
    ],
)
def test_the_batch_runs_on_the_host(settings: SlurmSettings, environment: Environment, python: str):
    assert batch_python(settings, environment) == python
