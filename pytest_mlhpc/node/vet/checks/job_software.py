"""PAYLOAD. Versions of what a job runs on, as facts that all nodes have to share: Python, packages, libraries, drivers, image."""

from __future__ import annotations

import hashlib
from typing import Any, Dict, List, Tuple

from pytest_mlhpc.node.foreign import read_json
from pytest_mlhpc.node.vet.finding import Fact, Finding, Origin, Outcome, Severity
from pytest_mlhpc.node.vet.machine import Absent, Context, Machine, Unreadable
from pytest_mlhpc.node.vet.ports import library_folders

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

    def examine(self, machine: Machine, context: Context) -> Outcome:
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
        return Outcome((said,), facts=facts)


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


CHECKS = (Software(),)
