"""Containers, MPI and devices: words for srun, and words before a rank's interpreter."""

from __future__ import annotations

import pytest

from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.provision.slurm.environment import launcher_options, wrapper
from pytest_mlhpc.provision.slurm.options import SlurmSettings
from pytest_mlhpc.provision.slurm.script import batch_python
from pytest_mlhpc.system.model import Environment, NodeType, Partition

PLAIN = Environment("default", "python3")


def container(runtime, **more):
    """Return an environment in a container that already mounts /data."""
    extra = {"image": "/i.sif", "mounts": ["/data:/data"], "runtime": runtime, **more}
    said = {key: value for key, value in extra.items() if value}
    return Environment("c", "python3", extra={"container": said})


def srun_options(environment, *binds, launch=None, **options):
    nodes = NodeType(16, 2**34, 4, 4)
    partition = Partition("s", "p", "slurm", "srun", "cuda", nodes, (environment,), scheduler_options=options)
    return launcher_options(partition, environment, binds, **(launch or {}))


HINT = "--hint=nomultithread"


@pytest.mark.parametrize(
    ("options", "launch", "words"),
    [
        pytest.param({}, {}, (), id="nothing"),
        pytest.param(
            {"mpi": "pmix", "gpus": "gpus-per-task", "gpu_type": "h100", "srun": [HINT]}, {},
            ("--mpi=pmix", "--gpus-per-task=h100:1", HINT), id="the site's own words come last",
        ),
        *[
            pytest.param(
                {"gpus": "gpus-per-task", "srun": [HINT]}, {"launcher": launcher, "ranks_per_node": 4}, words,
                id=f"{launcher} decides what a task is",
            )
            for launcher, words in (
                ("srun", ("--gpus-per-task=1", HINT)),
                ("torchrun", ("--gpus-per-task=4", HINT)),
                ("mpirun", ()),
                ("poprun", ()),
            )
        ],
    ],
)  # fmt: skip
def test_srun_is_told_of_mpi_and_devices(options, launch, words):
    assert srun_options(PLAIN, launch=launch, **options) == words


@pytest.mark.parametrize(
    ("runtime", "words"),
    [
        ("pyxis", ("--container-image=/i.sif", "--container-mounts=/data:/data,/state:/state", "--container-workdir=/w")),
        ("enroot", ("--container-image=/i.sif", "--container-mounts=/data:/data,/state:/state", "--container-workdir=/w")),
        ("edf", ("--environment=/i.sif",)),
        ("apptainer", ()),
    ],
)  # fmt: skip
def test_srun_starts_some_containers(runtime, words):
    assert srun_options(container(runtime, workdir="/w"), "/state") == words


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
def test_other_containers_are_started_before_the_interpreter(runtime, words):
    found = wrapper(container(runtime, workdir="/w"), ["/state", "/state"], accelerator="cuda")
    assert " ".join(found) == words


@pytest.mark.parametrize(
    ("environment", "binds", "words"),
    [
        pytest.param(
            container("apptainer", image="/my images/i.sif", mounts=[]), [], ("apptainer", "exec", "/my images/i.sif"),
            id="an image with spaces stays one word",
        ),
        pytest.param(PLAIN, ["/state"], (), id="without a container nothing comes before it"),
    ],
)  # fmt: skip
def test_words_before_the_interpreter_are_words(environment, binds, words):
    assert wrapper(environment, binds) == words


@pytest.mark.parametrize(
    ("runtime", "binds", "text"),
    [
        ("docker", [], "environment 'c': container runtime 'docker' cannot be used under Slurm"),
        ("apptainer", ["/a,b"], "choose another shared_directory"),
        ("apptainer", ["/a:b"], "choose another shared_directory"),
    ],
)
def test_what_cannot_be_started_or_mounted_is_refused(runtime, binds, text):
    with pytest.raises(UsageError, match=text):
        wrapper(container(runtime), binds)


@pytest.mark.parametrize(
    ("settings", "environment", "python"),
    [
        (SlurmSettings(), Environment("d", "/opt/python"), "/opt/python"),
        (SlurmSettings(), container("apptainer"), "python3"),
        (SlurmSettings(batch_python="/host/python"), container("edf"), "/host/python"),
    ],
)
def test_the_batch_runs_on_the_host(settings, environment, python):
    assert batch_python(settings, environment) == python
