"""How threads of a rank wait for each other: briefly where other programs use the cores, else as the OpenMP library does.

A thread that spins for one whose core another program has just been given holds a core for nothing. On two cores beside two busy
loops, a smoke run of the language model took 118 to 160 s where threads spun as long as libgomp lets them, and 7 s where they spun
a thousand times, against 5 s on the quiet machine. On the quiet machine the short wait costs 5 to 12 % of the throughput, so that it
is chosen only where others are at work (measured 2026-11-27, two cores, torch 2.13).
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Dict, Iterable, Mapping, Tuple

from pytest_mlhpc.node.protocol.plan import RunPlan

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
            name, *words = line.split()
            if name in cores:
                ticks = [int(word) for word in words[:8]]
                found[name] = (sum(ticks) - ticks[3] - ticks[4], sum(ticks))
    except (OSError, ValueError, IndexError):
        return {}
    return found
