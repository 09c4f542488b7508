"""PAYLOAD. How large the last caches before a device's memory are: what fits into them is no measurement of memory."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Dict, Iterable, Tuple

import torch

#: Linux, Documentation/ABI/testing/sysfs-devices-system-cpu: ``cpuN/cache/indexM/{level,type,size,shared_cpu_list}``.
PROCESSORS = Path("/sys/devices/system/cpu")

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def last_level(device: torch.device) -> int:
    """Return the bytes of the last caches that *device* has, 0 where nothing tells.

    On CPUs those of all cores that this process may use together; each of them may belong to other cores too.
    """
    if device.type == "cpu":
        affinity = getattr(os, "sched_getaffinity", None)  # Linux
        return of_cores(affinity(0)) if affinity is not None else 0
    properties = getattr(getattr(torch, device.type, None), "get_device_properties", None)
    # Not in torch 1.13, and of NVIDIA's and AMD's devices alone.
    return int(getattr(properties(device), "L2_cache_size", 0)) if properties is not None else 0


def of_cores(cores: Iterable[int], root: Path = PROCESSORS) -> int:
    """Return the bytes of the last caches of *cores*, each counted once, 0 where the kernel does not tell."""
    found: Dict[Tuple[int, str], int] = {}
    for core in cores:
        for folder in root.glob(f"cpu{core}/cache/index*"):
            try:
                level, kind, size, shared = (
                    (folder / name).read_text(encoding="ascii").strip()
                    for name in ("level", "type", "size", "shared_cpu_list")
                )
                number = int(level)
            except (OSError, ValueError):  # arm64 and virtual machines may leave any of them out
                continue
            said = re.match(r"(\d+)([KMG]?)\Z", size)
            if said is not None and kind != "Instruction":
                found[number, shared] = int(said[1]) * _UNITS[said[2]]
    last = max((level for level, _ in found), default=0)
    return sum(size for (level, _), size in found.items() if level == last)
