"""The cores of a node: what a program is given of them, and how threads wait for each other where others use them.

``{last_level_cache}`` and ``{numa_nodes}`` in a program's arguments and variables are filled in here, where it starts.

A thread that spins for one whose core another program has just been given holds a core for nothing. On two cores beside two busy
loops, a smoke run of the language model took 118 to 160 s where threads spun as long as libgomp lets them, and 7 s where they spun
a thousand times, against 5 s on the quiet machine. On the quiet machine the short wait costs 5 to 12 % of the throughput, so that it
is chosen only where others are at work (measured 2026-11-27, two cores, torch 2.13).
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, Iterable, Mapping, Tuple

from pytest_mlhpc.node.files import may_be_secret
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


def filled_on_node(planned: RunPlan, started: RunPlan) -> Dict[str, Any]:
    """Return what the node filled into *planned*, as part of a message: ``argv`` and ``variables`` that differ.

    A variable that may be a secret is left out.
    """
    variables = {
        name: text
        for name, text in started.variables.items()
        if text != planned.variables.get(name) and not may_be_secret(name)
    }
    return {
        **({"argv": list(started.argv)} if started.argv != planned.argv else {}),
        **({"filled": variables} if variables else {}),
    }


def with_filled(run: RunPlan, body: Mapping[str, Any]) -> RunPlan:
    """Return *run* with what :func:`filled_on_node` put into a message."""
    argv, variables = body.get("argv"), body.get("filled")
    return replace(
        run,
        argv=tuple(map(str, argv)) if isinstance(argv, list) else run.argv,
        variables={**run.variables, **{name: str(text) for name, text in variables.items()}}
        if isinstance(variables, dict)
        else run.variables,
    )


#: proc(5): ticks of each core since boot, by what it did: user, nice, system, idle, iowait, irq, softirq, steal.
STAT = Path("/proc/stat")

#: How long other programs are watched, in seconds: six ticks of each core at 100 Hz.
WATCH_S = 0.06

#: From so many cores on that others use, waiting is brief: half a core is beyond what a quiet machine's services take.
BUSY_CORES = 0.5

#: What makes waiting brief: libgomp's turns of a wait before it sleeps, and milliseconds of Intel's and LLVM's library.
BRIEF: Mapping[str, str] = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}

#: Variables by which somebody has chosen already.
CHOSEN = ("OMP_WAIT_POLICY", *BRIEF)


def waiting_variables(run: RunPlan, environment: Mapping[str, str], stat: Path = STAT) -> Dict[str, str]:
    """Return the variables by which ranks of *run* on CPUs wait briefly; none on a quiet machine, or where they are chosen.

    Programs of users are left as they are. It is called before anything of the run is started: all use is others'.
    """
    if run.workload == "command" or run.device_type != "cpu" or run.cores_per_rank < 2:
        return {}
    if any(name in environment for name in CHOSEN):
        return {}
    return dict(BRIEF) if used_cores(os.sched_getaffinity(0), stat=stat) >= BUSY_CORES else {}


def used_cores(cores: Iterable[int], seconds: float = WATCH_S, stat: Path = STAT) -> float:
    """Return how many of *cores* were used in the next *seconds*, stolen time included; 0 where the kernel does not tell."""
    chosen = {f"cpu{core}" for core in cores}
    before = _ticks(chosen, stat)
    time.sleep(seconds)
    after = _ticks(chosen, stat)
    shares = []
    for core, (busy, total) in after.items():
        earlier_busy, earlier_total = before.get(core, (busy, total))
        if total > earlier_total:
            shares.append((busy - earlier_busy) / (total - earlier_total))
    return sum(shares)


def _ticks(cores: Iterable[str], stat: Path) -> Dict[str, Tuple[int, int]]:
    """Return (used, all) ticks of each of *cores*."""
    found = {}
    try:
        lines = stat.read_text(encoding="ascii").splitlines()
        for line in lines:
            name, *fields = line.split()
            if name in cores:
                ticks = [int(word) for word in fields[:8]]
                found[name] = (sum(ticks) - ticks[3] - ticks[4], sum(ticks))
    except (OSError, ValueError, IndexError):
        return {}
    return found
