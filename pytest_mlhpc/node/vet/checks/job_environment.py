"""What a job runs with, compared between nodes: variables of communication, versions of software, its data."""

from __future__ import annotations

import hashlib
import os
from typing import Any, Dict, List, Mapping, Tuple

from pytest_mlhpc.node.files import may_be_secret, read_json
from pytest_mlhpc.node.vet.finding import CheckOutcome, Fact, Finding, Origin, Severity
from pytest_mlhpc.node.vet.machine import Absent, Context, Machine, Unreadable, judged, outcome
from pytest_mlhpc.node.vet.ports import library_folders

#: What is compared, by the beginning of its name; nothing else of the environment leaves the node.
PREFIXES = ("NCCL_", "RCCL_", "TORCH_NCCL_", "FI_", "UCX_", "GLOO_", "MASTER_")

#: Set to another value than these, they slow down. Sources: NCCL user guide, Environment Variables, Debugging; CUDA programming
#: guide, CUDA_LAUNCH_BLOCKING; HIP, HIP_LAUNCH_BLOCKING and AMD_SERIALIZE_KERNEL; torch.distributed, TORCH_DISTRIBUTED_DEBUG.
DEBUGGING: Mapping[str, str] = {
    "NCCL_P2P_DISABLE": "0", "NCCL_SHM_DISABLE": "0", "NCCL_CHECKS_DISABLE": "0", "NCCL_CHECK_POINTERS": "0",
    "CUDA_LAUNCH_BLOCKING": "0", "HIP_LAUNCH_BLOCKING": "0", "AMD_SERIALIZE_KERNEL": "0", "AMD_SERIALIZE_COPY": "0",
    "TORCH_DISTRIBUTED_DEBUG": "OFF INFO",
}  # fmt: skip


def safe(name: str, value: str) -> str:
    """Return ``NAME=value``, with a hash in the place of what may be a secret."""
    if may_be_secret(name):
        value = "sha256:" + hashlib.sha256(value.encode("utf-8", "surrogateescape")).hexdigest()[:12]
    return f"{name}={value}"


class EnvironmentCheck:
    """Variables of communication libraries."""

    name = "job_environment"
    level = "quick"
    cost_s = 0.01
    reads = tuple(f"{prefix}*" for prefix in PREFIXES)
    purpose = "job"

    def examine(self, machine: Machine, context: Context) -> CheckOutcome:
        """Give one fact for each prefix, empty ones too, so that a variable missing on one node is seen."""
        facts = [
            Fact(self.name, f"environment.{prefix}", _all(machine.environ, prefix), origin=Origin.USER)
            for prefix in PREFIXES
        ]
        left: List[str] = [
            f"{name}={machine.environ[name]}"
            for name, normal in DEBUGGING.items()
            if machine.environ.get(name, "").upper() not in {"", *normal.split()}
        ]
        text = f"{', '.join(left)}: for debugging, and slow; unset for a real run"
        said = judged(self.name, context.policy, "job.debug_variables", len(left), text)
        found = outcome(self.name, said, "no variables are left from debugging")
        return CheckOutcome(found.findings, facts=tuple(facts))


def _all(environ: Mapping[str, str], prefix: str) -> str:
    return " ".join(safe(name, environ[name]) for name in sorted(environ) if name.startswith(prefix))


#: Asks an interpreter for its packages without importing any.
ASK = (
    "import json, sys; from importlib.metadata import distributions as d; "
    "print(json.dumps({'python': sys.version.split()[0], "
    "'packages': {str(x.metadata['Name']).lower(): x.version for x in d()}}))"
)

#: How long it may take, in seconds: it reads a folder for each package, at first from a slow file system.
ASK_S = 4.0

#: Packages that are named when they differ, beside torch; all others are one fact, a digest.
PACKAGES = (
    "pytorch-triton-rocm", "triton", "nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13", "nvidia-cuda-runtime-cu12", "transformer-engine", "flash-attn", "deepspeed", "mpi4py", "amdsmi",
)  # fmt: skip

#: Where versions are written, by fact; several files are one fact.
FILES = {
    "driver": ("/sys/module/nvidia/version", "/sys/module/amdgpu/version"),
    "fabric_driver": ("/sys/module/mlx5_core/version", "/sys/module/cxi_core/version"),
    "kernel": ("/proc/sys/kernel/osrelease",),
    "toolkit": ("/opt/rocm/.info/version", "/usr/local/cuda/version.json"),
    "system": ("/etc/os-release",),
}

#: Libraries whose versioned file names are compared.
LIBRARIES = ("libnccl.so.*", "librccl.so.*", "libfabric.so.*", "libcudart.so.*")

#: What says which image this is. Sources: Apptainer user guide; CSCS, uenv; Slurm, --container; our own manifests.
IMAGES = (
    "APPTAINER_CONTAINER", "SINGULARITY_CONTAINER", "UENV_MOUNT_LIST", "SLURM_CONTAINER", "MLHPC_IMAGE", "MLHPC_IMAGE_DIGEST",
)  # fmt: skip


class Software:
    """Versions that should be equal on all nodes."""

    name = "job_software"
    level = "quick"
    cost_s = 0.8
    reads = (
        "importlib.metadata of the job's Python",
        *(path for paths in FILES.values() for path in paths),
        *LIBRARIES,
        *IMAGES,
    )
    purpose = "job"

    def examine(self, machine: Machine, context: Context) -> CheckOutcome:
        """Return facts; the vote over nodes is the judge's."""
        values = {**_python(machine, context.python or "python3"), **_files(machine)}
        values["libraries"] = _libraries(machine)
        values["image"] = " ".join(
            f"{name}={machine.environ[name]}" for name in IMAGES if machine.environ.get(name)
        )
        facts = tuple(
            Fact(self.name, f"software.{name}", value, origin=Origin.USER) for name, value in values.items()
        )
        said = Finding(self.name, Severity.PASS, f"{len(facts)} versions are known", origin=Origin.USER)
        return CheckOutcome((said,), facts=facts)


def _python(machine: Machine, python: str) -> Dict[str, str]:
    done = machine.command((python, "-c", ASK), ASK_S)
    try:
        said: Any = read_json(done.output)
        packages = {str(name): str(version) for name, version in said["packages"].items()}
        found = {"python": str(said["python"])}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        words = (done.errors or done.output).strip()[-200:]
        raise Unreadable(f"{python} does not say its packages: {words or error}") from error
    found["torch"] = packages.get("torch", "")
    found["device_packages"] = " ".join(f"{name} {packages[name]}" for name in PACKAGES if name in packages)
    listing = "\n".join(f"{name}=={version}" for name, version in sorted(packages.items()))
    found["packages"] = f"{len(packages)} packages, {_digest(listing)}"
    return found


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _files(machine: Machine) -> Dict[str, str]:
    found = {}
    for name, paths in FILES.items():
        texts = [text for text in (_text(machine, path) for path in paths) if text]
        value = " ".join(texts)
        found[name] = value if len(value) <= 80 and "\n" not in value else _digest(value)
    return found


def _text(machine: Machine, path: str) -> str:
    try:
        return machine.text(path)
    except Absent:
        return ""


def _libraries(machine: Machine) -> str:
    """Return the most exact name of each library in the first folder that has it, as the loader would find it."""
    found: List[str] = []
    folders: Tuple[str, ...] = library_folders(machine)
    for pattern in LIBRARIES:
        for folder in folders:
            names = machine.names(f"{folder}/{pattern}")
            if names:
                found.append(
                    max((name.rpartition("/")[2] for name in names), key=lambda one: (len(one), one))
                )
                break
    return " ".join(found)


#: Names of a folder that are compared; beyond it the order in which a server lists them would decide.
MOST_NAMES = 20000


class DataCheck:
    """Data that every rank reads: there, readable, the same listing on all nodes."""

    name = "job_data"
    level = "quick"
    cost_s = 1.0
    reads = ("each path of the data: its names, the first bytes of one file",)
    purpose = "job"

    def examine(self, machine: Machine, context: Context) -> CheckOutcome:
        """Look at ``data``, and at all paths whose names begin so."""
        facts: List[Fact] = []
        troubles: List[str] = []
        paths = {key: path for key, path in context.wanted.paths.items() if key.startswith("data") and path}
        for key, path in sorted(paths.items()):
            try:
                value = _look(machine, path)
            except Unreadable as error:
                troubles.append(str(error))
                continue
            facts.append(
                Fact(self.name, f"listing.{key}", value, severity=Severity.CRITICAL, origin=Origin.USER)
            )
        text = f"{'; '.join(troubles)}: see whether the file system is mounted on this node, and rights"
        said = judged(self.name, context.policy, "job.data_path", len(troubles), text)
        found = outcome(
            self.name, said, f"{len(paths)} paths can be read" if paths else "nobody said which data is read"
        )
        return CheckOutcome(found.findings, facts=tuple(facts))


def _look(machine: Machine, path: str) -> str:
    """Return what should be equal on all nodes: how many names and their digest, or a file's size.

    Raises:
        Unreadable: the data is not there, closed to us, empty or broken; in words for the user.
    """
    machine.exists(f"{path}/.")  # a folder above may be closed to us
    place = machine.path(path)
    if place.is_dir():
        names = _names(machine, path)
        if not names:
            raise Unreadable(f"the folder {path} is empty")
        first = next((name for name in names if machine.path(f"{path}/{name}").is_file()), None)
        if first is not None:
            machine.head(f"{path}/{first}", 1)
        if len(names) > MOST_NAMES:
            return f"more than {MOST_NAMES} names"
        digest = hashlib.sha256("\0".join(names).encode("utf-8", "surrogateescape")).hexdigest()[:16]
        return f"{len(names)} names, {digest}"
    machine.head(path, 1)
    return f"{place.stat().st_size} bytes"


def _names(machine: Machine, path: str) -> Tuple[str, ...]:
    machine.exists(f"{path}/.mlhpc-vet")  # says why a folder is closed to us
    found = []
    try:
        with os.scandir(machine.path(path)) as entries:
            for entry in entries:
                found.append(entry.name)
                if len(found) > MOST_NAMES:
                    break
    except OSError as error:
        raise Unreadable(f"the folder {path} cannot be listed: {error.strerror}", error.errno) from error
    return tuple(sorted(found))


CHECKS = (
    EnvironmentCheck(),
    Software(),
    DataCheck(),
)
