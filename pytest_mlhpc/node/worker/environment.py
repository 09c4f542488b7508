"""No torch. What a rank knows of its surroundings: software and hardware, which rank it is, its cores and threads, named paths; how it reports a failure."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import string
import subprocess
from pathlib import Path
from typing import Dict, Iterable, List, Mapping, MutableMapping, Optional, Tuple

from pytest_mlhpc.node.agents.nodes import number_ranges
from pytest_mlhpc.node.files import may_be_secret
from pytest_mlhpc.node.processes import run_to_end
from pytest_mlhpc.node.protocol.plan import RunPlan

#: Variables that change how fast training runs. Values of others are never recorded: they may hold secrets.
PREFIXES = (
    "OMP_",
    "MKL_",
    "KMP_",
    "GOMP_",
    "NCCL_",
    "GLOO_",
    "MIOPEN_",
    "RCCL_",
    "CUDNN_",
    "TORCH_NCCL_",
    "FI_",
)
NAMES = (
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING",
    "NVIDIA_TF32_OVERRIDE", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ONEAPI_DEVICE_SELECTOR",
    "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "MALLOC_ARENA_MAX", "LD_PRELOAD",
)  # fmt: skip

#: Where sites and image builders put the digest of the running image, first one wins.
IMAGE_VARIABLES = ("MLHPC_IMAGE_DIGEST", "IMAGE_DIGEST", "APPTAINER_CONTAINER", "SINGULARITY_CONTAINER")

_LONGEST = 200


def describe(
    torch_version: str, device_model: str, device: Mapping[str, str], cwd: Optional[str]
) -> Mapping[str, str]:
    """Return the environment of this rank as text values; whatever is unknown is absent."""
    found: Dict[str, str] = {
        "torch": torch_version,
        "python": platform.python_version(),
        "device_model": device_model,
        "host": socket.gethostname(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpu_model": cpu_model(),
        "cores": str(_cores()),
        "glibc": " ".join(platform.libc_ver()).strip(),
        "interpreter": "warm" if os.environ.get("MLHPC_FORKED") else "fresh",
        **device,
    }
    found.update(commit(Path(cwd) if cwd else Path.cwd()))
    image = next((os.environ[name] for name in IMAGE_VARIABLES if os.environ.get(name)), "")
    found["image"] = image
    found.update(variables(os.environ))
    return {name: value[:_LONGEST] for name, value in found.items() if value}


def variables(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the variables that change how fast training runs, as ``env_NAME``."""
    return {
        f"env_{name}": value
        for name, value in sorted(environ.items())
        if (name in NAMES or name.startswith(PREFIXES)) and not may_be_secret(name)
    }


def commit(folder: Path) -> Mapping[str, str]:
    """Return the git commit of the checkout that *folder* lies in and whether it was changed; empty without one."""
    if not any((parent / ".git").exists() for parent in (folder, *folder.parents)):
        return {}
    head = _git(folder, "rev-parse", "HEAD")
    if not head:
        return {}
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": head, "commit_changed": "unknown" if changed is None else ("yes" if changed else "no")}


def _git(folder: Path, *arguments: str) -> Optional[str]:
    try:
        done = run_to_end(["git", "-C", str(folder), *arguments], 5.0)
    except (OSError, subprocess.TimeoutExpired):  # no git on compute nodes is usual
        return None
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else None


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # Linux
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


#: Value of ``MLHPC_RANKS_FROM`` -> variables for RANK, LOCAL_RANK and WORLD_SIZE (srun(1), "OUTPUT ENVIRONMENT VARIABLES";
#: OpenMPI's mpirun(1)).
SOURCES: Mapping[str, Tuple[str, str, str]] = {
    "slurm": ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
}


def adopt(environ: MutableMapping[str, str]) -> None:
    """Set RANK, LOCAL_RANK and WORLD_SIZE from what the launcher named in ``MLHPC_RANKS_FROM`` has set; never guess.

    Without that variable nothing is changed: torchrun, or a single rank.

    Raises:
        ValueError: the launcher did not set what it was to set.
    """
    source = environ.get("MLHPC_RANKS_FROM", "")
    if not source:
        return
    if source not in SOURCES:
        raise ValueError(f"MLHPC_RANKS_FROM={source!r} is none of {', '.join(SOURCES)}")
    for wanted, name in zip(("RANK", "LOCAL_RANK", "WORLD_SIZE"), SOURCES[source]):
        text = environ.get(name, "")
        if not (text.isascii() and text.isdigit()):
            raise ValueError(f"{name}={text!r} is no number: this process was not started by {source}")
        environ[wanted] = text


def filled(path: str, environ: Mapping[str, str]) -> Path:
    """Return *path* with ``$NAME`` and ``${NAME}`` of *environ* and a leading ``~`` filled in; ``$$`` is a dollar sign.

    Raises:
        ValueError: a variable is not set here, a ``$`` names none, a ``~`` nobody's home; says what to do.
    """
    try:
        return Path(string.Template(path).substitute(environ)).expanduser()
    except KeyError as error:
        text = f"{error.args[0]} is not set in the run's environment on {socket.gethostname()}; name it in `variables:`"
    except ValueError:
        text = "a $ must be followed by a name, or doubled"
    except RuntimeError:  # of expanduser
        text = f"{socket.gethostname()} knows no home of that user"
    raise ValueError(text)


def of_run(directory: Path) -> Path:
    """Return a folder below *directory*, the plan's, that goes with the allocation, also where ranks are killed outright.

    What lies there is removed by the session when the allocation is over, else by the next session or by ``mlhpc reap``.
    """
    folder = directory / "data"
    with contextlib.suppress(OSError):  # reported by what follows
        folder.mkdir(exist_ok=True)
    return folder


class WorkerFailure(Exception):  # noqa: N818 - the closed list's word
    """The run cannot go on. ``outcome`` is a name of ``store/record.py``, the text says what, where, what to do."""

    def __init__(self, outcome: str, text: str) -> None:
        self.outcome = outcome
        self.text = text
        super().__init__(f"{outcome}: {text}")


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's model name, or an empty string where the kernel does not tell (arm64)."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "cpu model"):
            return " ".join(value.split())
    return ""


#: Where Linux tells which core and socket a processor belongs to (Documentation/admin-guide/cputopology.rst).
TOPOLOGY = Path("/sys/devices/system/cpu")


def threads_of(run: RunPlan) -> int:
    """Return how many threads a rank computes with: what the test says, what the environment's variables say, its cores.

    A partition may know of cores that cannot be used whole, as where nodes share them: threads that spin for each
    other there cost many times what they save.

    Raises:
        WorkerFailure: ``too_few_devices``, the test asks for more threads than the node has processors.
    """
    asked = run.parameters.get("threads")
    if asked is not None:
        here = os.cpu_count() or 1
        if int(asked) > here:
            text = f"threads={asked}, but this node has {here} processors; ask for at most as many"
            raise WorkerFailure("too_few_devices", text)
        return int(asked)
    said = run.variables.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # a list is for nested regions
    return int(said) if said.isascii() and said.isdigit() and int(said) > 0 else run.cores_per_rank


def bind(run: RunPlan, environ: Mapping[str, str]) -> None:
    """Keep this process, and all threads and processes that it starts, on cores of its own, if the run asks for that.

    To be called before torch is imported: OpenMP reads where it may run when it is loaded. Memory follows, as Linux
    gives a page on the socket of the thread that first writes it.

    Raises:
        WorkerFailure: ``too_few_devices``, there are fewer processors than ranks; ``not_supported``, this is not Linux.
    """
    if run.parameters.get("binding") is None:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise WorkerFailure("not_supported", "binding: only Linux lets a process choose its cores")
    here = in_order(os.sched_getaffinity(0))
    ranks = max(1, run.ranks // max(1, run.nodes))
    os.sched_setaffinity(0, share(here, int(environ.get("LOCAL_RANK", "0")), ranks, run.cores_per_rank))


def in_order(processors: Iterable[int], topology: Path = TOPOLOGY) -> List[int]:
    """Return processors by socket, then by core, so that threads of one core and cores of one socket are neighbours."""

    def place(processor: int) -> Tuple[int, int, int]:
        folder = topology / f"cpu{processor}" / "topology"
        return _number(folder / "physical_package_id"), _number(folder / "core_id"), processor

    return sorted(processors, key=place)


def _number(file: Path) -> int:
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):  # not given: in the order of their numbers
        return 0


def share(processors: List[int], local_rank: int, ranks: int, cores_per_rank: int) -> List[int]:
    """Return the processors of one of the *ranks* of a node; all of them where a launcher has chosen already.

    Raises:
        WorkerFailure: ``too_few_devices``.
    """
    if ranks > 1 and len(processors) <= cores_per_rank:  # bound by srun, mpirun or a container
        return processors
    each = len(processors) // ranks
    if each < 1 or not 0 <= local_rank < ranks:
        text = (
            f"binding=cores: rank {local_rank} of {ranks} on this node finds {len(processors)} processors; "
            "each rank needs one of its own"
        )
        raise WorkerFailure("too_few_devices", text)
    return processors[local_rank * each : (local_rank + 1) * each]


def described(run: RunPlan) -> Mapping[str, str]:
    """Return what a record says of the binding; nothing where none was asked for."""
    if run.parameters.get("binding") is None:
        return {}
    return {"bound_to": ",".join(number_ranges(os.sched_getaffinity(0)))}
