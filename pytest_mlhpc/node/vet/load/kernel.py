"""PAYLOAD, no torch. What the kernel says of this node's memory, processor and accelerators."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Tuple


def unused_devices(torch_version: str, root: Path = Path("/")) -> str:
    """Return a sentence if the kernel shows accelerators that torch does not find, else nothing."""
    signs = {"NVIDIA": ("dev", "nvidia[0-9]*"), "AMD": ("sys/class/kfd/kfd/topology/nodes", "*/gpu_id")}
    for vendor, (folder, pattern) in signs.items():
        for path in (root / folder).glob(pattern):
            if vendor == "AMD" and _text(path) in ("", "0"):  # 0: a processor
                continue
            return (
                f"this node shows {vendor} devices, but torch {torch_version} finds none: they are not computed on; use an "
                "environment whose torch is built for them, and check driver and allocation"
            )
    return ""


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> Tuple[str, ...]:
    """Return what the first processor says that it can do (x86: flags, arm64: Features)."""
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", _text(cpuinfo), re.MULTILINE)
    return tuple(match.group(1).split()) if match else ()


def total_memory(root: Path = Path("/")) -> int:
    """Return the bytes of memory that are there for us: all of the node's, or our control group's limit."""
    match = re.search(r"^MemTotal:\s*(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    total = int(match.group(1)) * 1024 if match else 1 << 40
    limit = _text(root / "sys/fs/cgroup/memory.max")
    return min(total, int(limit)) if limit.isdigit() else total


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
