"""What this machine has: cores, memory and CPU model, as much as affinity and control groups leave of them.

Sources: proc(5), cgroup v1 (kernel.org Documentation/admin-guide/cgroup-v1, scheduler/sched-bwc.rst) and cgroup v2
(Documentation/admin-guide/cgroup-v2.rst: ``cpu.max``, ``memory.max``).
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pytest_mlhpc.config.model import NodeType

#: Version 1 says "no limit" by the largest page-aligned number; no machine has an exbibyte.
_NO_LIMIT = 2**60


@dataclass(frozen=True)
class Machine:
    """``cores`` that this process may keep busy, ``memory`` in bytes that it may use, and the CPU's own name."""

    cores: int
    memory: int
    cpu_model: str


def read_machine(root: Path = Path("/"), affinity: int | None = None) -> Machine:
    """Return this machine. *root* holds ``proc``; *affinity* is the number of cores that may be used."""
    allowed = affinity if affinity is not None else len(os.sched_getaffinity(0))
    cores, memory = float(allowed), float(_memory_total(root))
    for folder, version in _control_groups(root):
        cores = min(cores, _quota(folder, version))
        memory = min(memory, _memory_limit(folder, version))
    # Half a core's quota is no core of its own: rounded down, so that ranks are not throttled.
    return Machine(max(1, int(cores)), int(memory), cpu_model(root))


def cpu_model(root: Path = Path("/")) -> str:
    """Return the CPU's name as /proc/cpuinfo tells it; ARM tells numbers only, others perhaps nothing."""
    fields: dict[str, str] = {}
    for line in _read(root / "proc/cpuinfo").splitlines():
        name, separator, value = line.partition(":")
        if separator:
            fields.setdefault(name.strip(), " ".join(value.split()))
    for name in ("model name", "cpu", "uarch"):  # x86, POWER, RISC-V
        if fields.get(name):
            return fields[name]
    if "CPU implementer" in fields:
        return f"{platform.machine()} {fields['CPU implementer']}/{fields.get('CPU part', '?')}"
    return platform.machine() or "unknown"


def fingerprint(machine: Machine, nodes: NodeType) -> str:
    """Return the words that tell this machine from others, fit for a file name.

    CPU model, cores and memory in GiB (of *nodes*: what the partition uses), and accelerators if any.
    """
    parts = [machine.cpu_model, f"{nodes.cores} cores", f"{round(nodes.memory / 2**30)} GiB"]
    if nodes.devices:
        parts.append(f"{nodes.devices} x {nodes.device_model or 'unknown'}")
    return "_".join(_slug(part) for part in parts)


def _slug(text: str) -> str:
    text = re.sub(r"\((r|tm|c)\)", "", text.lower())
    return re.sub(r"[^a-z0-9.]+", "-", text).strip("-.")[:64]


def _memory_total(root: Path) -> int:
    match = re.search(r"^MemTotal:\s+(\d+) kB$", _read(root / "proc/meminfo"), re.MULTILINE)
    return int(match[1]) * 1024 if match else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _control_groups(root: Path) -> Iterator[tuple[Path, int]]:
    """Yield every folder, own and ancestors', whose limits hold for this process, with the version of its files."""
    mounts = list(_mounts(root))
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        for kind, options, mounted, point in mounts:
            version = 2 if kind == "cgroup2" else 1
            wanted = set(controllers.split(",")) & {"cpu", "memory"}
            if (version == 2) != (not controllers) or (version == 1 and not wanted & options):
                continue
            # The mount may show only a part of the tree (in containers): what is above cannot be read.
            inside = os.path.relpath(path, mounted) if path.startswith(mounted) else "."
            folder = root / point.lstrip("/")
            yield folder, version
            for part in Path(inside).parts:
                folder /= part
                yield folder, version


def _mounts(root: Path) -> Iterator[tuple[str, set[str], str, str]]:
    """Yield type, super options, root within the file system, and mount point of every cgroup mount."""
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        left, right = before.split(" "), after.split(" ")
        if len(left) >= 5 and len(right) >= 3 and right[0] in {"cgroup", "cgroup2"}:
            yield right[0], set(right[2].split(",")), _unescape(left[3]), _unescape(left[4])


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _quota(folder: Path, version: int) -> float:
    """Return the cores that the bandwidth limit of *folder* allows, infinite where there is none."""
    if version == 2:
        words = _read(folder / "cpu.max").split()
    else:
        words = [*_read(folder / "cpu.cfs_quota_us").split(), *_read(folder / "cpu.cfs_period_us").split()]
    if len(words) != 2 or not all(word.isdigit() for word in words) or int(words[1]) == 0:
        return float("inf")  # "max", -1, or no such controller
    return int(words[0]) / int(words[1])


def _memory_limit(folder: Path, version: int) -> float:
    text = _read(folder / ("memory.max" if version == 2 else "memory.limit_in_bytes")).strip()
    return float(text) if text.isdigit() and int(text) < _NO_LIMIT else float("inf")


def _read(path: Path) -> str:
    """Return the text of a file of the kernel, empty where it does not exist or may not be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
