"""What a program may be told of the node it starts on: ``{last_level_cache}`` and ``{numa_nodes}`` in its arguments and variables."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Dict, Iterable, Mapping, Tuple

from pytest_mlhpc.node.protocol.plan import RunPlan

#: Linux, Documentation/ABI/testing/sysfs-devices-system-cpu: ``cpuN/cache/indexM/{level,type,size,shared_cpu_list}``.
PROCESSORS = Path("/sys/devices/system/cpu")

#: Linux, Documentation/ABI/stable/sysfs-devices-node: one folder ``nodeN`` for each.
NUMA_NODES = Path("/sys/devices/system/node")

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

#: What is only known on the node -> what it is.
ON_NODE: Mapping[str, str] = {
    "last_level_cache": "bytes of the last caches of the cores that the run may use",
    "numa_nodes": "NUMA nodes of the node, at least 1",
}

_NAMED = re.compile(r"\{(last_level_cache|numa_nodes)\}")


def last_caches(cores: Iterable[int], root: Path = PROCESSORS) -> int:
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


def numa_nodes(root: Path = NUMA_NODES) -> int:
    """Return how many NUMA nodes there are; 1 where the kernel does not tell."""
    return max(1, sum(1 for _ in root.glob("node[0-9]*")))


def on_node(run: RunPlan) -> RunPlan:
    """Return *run* with what is only known on the node in its arguments and variables.

    A word stays as it is where the kernel does not tell: the program then says that it is no number.
    """
    texts = (*run.argv, *run.variables.values())
    if not any(_NAMED.search(text) for text in texts):
        return run
    caches = last_caches(os.sched_getaffinity(0))
    values = {"numa_nodes": str(numa_nodes()), **({"last_level_cache": str(caches)} if caches else {})}

    def filled(text: str) -> str:
        return _NAMED.sub(lambda found: values.get(found[1], found[0]), text)

    variables = {name: filled(text) for name, text in run.variables.items()}
    return replace(run, argv=tuple(map(filled, run.argv)), variables=variables)
