"""PAYLOAD. What software and hardware produced a figure; goes with every record."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
from pathlib import Path
from typing import Dict, Mapping, Optional

from pytest_mlhpc.node.files import may_be_secret

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
    from pytest_mlhpc.node.worker.accelerators.cpu import cpu_model

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
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):  # no git on compute nodes is usual
        return None
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else None


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # Linux
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
