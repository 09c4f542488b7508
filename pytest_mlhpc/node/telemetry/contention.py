"""No torch. What else the node was doing: load, pressure, steal, throttling, other programs' cores.

Sources: proc(5) for loadavg, stat and pid/stat; kernel documentation accounting/psi.rst for pressure and
admin-guide/cgroup-v2.rst for cpu.stat. Whatever a kernel does not offer is absent from the result, never zero.

A run that is late while other programs have its node's processors is ended as ``machine_busy``: each rank that is late sends
:func:`late_figures` with its progress, and the batch decides by :func:`crowding` once all ranks of a node are late.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, Optional, Sequence, Tuple

PRESSURES = ("cpu", "memory", "io")

#: Steps are late once they have taken more than so many times as long as they usually do (ours).
LATE = 5.0

#: Others crowd a run out where they took at least this share of the node's processors, and at most this share was idle (ours).
TAKEN, IDLE = 0.25, 0.1

#: What others took, as text: processors by the hypervisor, and by other programs.
STOLEN, OTHERS = (
    "the hypervisor gave {:.1%} of the processor time to others",
    "other programs used {:.2g} cores beside the run's {:.2g}",
)


@dataclass(frozen=True)
class Snapshot:
    """Counters of one moment; ``pressure_us`` and ``throttled_us`` and jiffies count up, loads and averages do not."""

    monotonic_s: float
    load1: Optional[float] = None
    pressure_us: Mapping[str, float] = None  # type: ignore[assignment]  # set in __post_init__
    pressure_avg10: Mapping[str, float] = None  # type: ignore[assignment]  # set in __post_init__
    jiffies: Optional[Tuple[int, int, int]] = None  #: busy, stolen, all
    throttled_us: Optional[float] = None
    own_jiffies: Optional[int] = None

    def __post_init__(self) -> None:
        """Let both mappings default to empty ones."""
        object.__setattr__(self, "pressure_us", dict(self.pressure_us or {}))
        object.__setattr__(self, "pressure_avg10", dict(self.pressure_avg10 or {}))


def parse_load(text: str) -> Optional[float]:
    """Return the one-minute load of /proc/loadavg."""
    fields = text.split()
    try:
        return float(fields[0])
    except (IndexError, ValueError):
        return None


def parse_pressure(text: str) -> Optional[Tuple[float, float]]:
    """Return (share of the last 10 s, total microseconds) in which some task waited, of a /proc/pressure file."""
    for line in text.splitlines():
        fields = line.split()
        if fields[:1] != ["some"]:
            continue
        pairs = dict(word.partition("=")[::2] for word in fields[1:])
        try:
            return float(pairs["avg10"]) / 100.0, float(pairs["total"])
        except (KeyError, ValueError):
            return None
    return None


def parse_stat(text: str) -> Optional[Tuple[int, int, int]]:
    """Return (busy, stolen, all) jiffies of all cores from /proc/stat.

    Guest time is contained in user time already; stolen time is what the hypervisor gave to others.
    """
    for line in text.splitlines():
        if not line.startswith("cpu "):
            continue
        try:
            user, nice, system, idle, iowait, irq, softirq, steal = map(int, line.split()[1:9])
        except ValueError:
            return None
        busy = user + nice + system + irq + softirq
        return busy, steal, busy + idle + iowait + steal
    return None


def parse_throttled(text: str) -> Optional[float]:
    """Return microseconds for which the cgroup was throttled, of a cpu.stat file (v2; v1 counts nanoseconds)."""
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name in ("throttled_usec", "throttled_time") and value.strip().isdigit():
            return float(value) / (1.0 if name == "throttled_usec" else 1000.0)
    return None


def parse_own(text: str) -> Optional[int]:
    """Return user and system jiffies of one process from its /proc/PID/stat; the name may hold spaces and brackets."""
    fields = text.rpartition(")")[2].split()
    try:
        return int(fields[11]) + int(fields[12])
    except (IndexError, ValueError):
        return None


def parse_cgroup(text: str) -> Optional[str]:
    """Return the path of this process's cgroup from /proc/self/cgroup: v2, else v1's cpu controller."""
    paths: Dict[str, str] = {}
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller in controllers.split(","):
            paths[controller] = path
    return paths.get("", paths.get("cpu"))


def snapshot(root: Path = Path("/")) -> Snapshot:
    """Read all counters below *root*; what cannot be read is None or absent."""
    proc = root / "proc"
    pressures = {name: parse_pressure(_read(proc / "pressure" / name)) for name in PRESSURES}
    known = {name: pair for name, pair in pressures.items() if pair is not None}
    return Snapshot(
        monotonic_s=time.monotonic(),
        load1=parse_load(_read(proc / "loadavg")),
        pressure_us={name: pair[1] for name, pair in known.items()},
        pressure_avg10={name: pair[0] for name, pair in known.items()},
        jiffies=parse_stat(_read(proc / "stat")),
        throttled_us=_throttled(root),
        own_jiffies=_own(proc),
    )


def difference(before: Snapshot, after: Snapshot, ticks_per_s: Optional[int] = None) -> Mapping[str, float]:
    """Return what happened between two snapshots.

    ``load1_before``; ``<cpu|memory|io>_pressure_before`` (share of the 10 s before) and ``..._pressure`` (share of the
    time between); ``steal`` and ``throttled`` (shares); ``busy_cores`` of the whole node and ``own_cores`` of this rank
    with its loader processes. The run itself causes load and pressure: only the figures before, steal, throttling, and
    busy minus all ranks' own cores speak of others.
    """
    elapsed = max(after.monotonic_s - before.monotonic_s, 1e-9)
    ticks = os.sysconf("SC_CLK_TCK") if ticks_per_s is None else ticks_per_s
    found: Dict[str, float] = {}
    if before.load1 is not None:
        found["load1_before"] = before.load1
    for name, share in before.pressure_avg10.items():
        found[f"{name}_pressure_before"] = share
    for name, total in after.pressure_us.items():
        if name in before.pressure_us:
            found[f"{name}_pressure"] = _share(total - before.pressure_us[name], elapsed * 1e6)
    if before.jiffies is not None and after.jiffies is not None:
        busy, stolen, total_jiffies = (new - old for new, old in zip(after.jiffies, before.jiffies))
        found["busy_cores"] = max(0.0, busy / ticks / elapsed)
        found["steal"] = _share(stolen, total_jiffies)
    if before.own_jiffies is not None and after.own_jiffies is not None:
        found["own_cores"] = max(0.0, (after.own_jiffies - before.own_jiffies) / ticks / elapsed)
    if before.throttled_us is not None and after.throttled_us is not None:
        found["throttled"] = _share(after.throttled_us - before.throttled_us, elapsed * 1e6)
    return found


def late_figures(
    before: Snapshot, elapsed_s: float, usual_s: Optional[float], probe: Callable[[], Snapshot] = snapshot
) -> Optional[Mapping[str, float]]:
    """Return what happened since *before* where the steps of a rank are late, else None.

    Args:
        before: read when the steps began.
        elapsed_s: how long they have taken so far.
        usual_s: how long all of them usually take; None where that is not known, and they are never late then.
        probe: reads the node; asked only of a rank that is late.

    Returns:
        The figures of :func:`difference`, ``cores`` (how many processors the node has), ``elapsed_s`` and ``usual_s``.
    """
    if usual_s is None or elapsed_s <= LATE * usual_s:
        return None
    now = probe()
    found = {**difference(before, now), "elapsed_s": elapsed_s, "usual_s": usual_s}
    if before.jiffies is not None and now.jiffies is not None:
        passed = max(now.monotonic_s - before.monotonic_s, 1e-9) * os.sysconf("SC_CLK_TCK")
        found["cores"] = (now.jiffies[2] - before.jiffies[2]) / passed
    return found


def other_cores(ranks: Sequence[Mapping[str, float]]) -> Optional[float]:
    """Return how many cores of a node ran other programs, by the :func:`difference` of all *ranks* on it; None: not known."""
    if not ranks or not all("busy_cores" in figures and "own_cores" in figures for figures in ranks):
        return None
    busy = max(figures["busy_cores"] for figures in ranks)
    return max(0.0, busy - sum(figures["own_cores"] for figures in ranks))


def crowding(ranks: Sequence[Mapping[str, float]]) -> str:
    """Return what withheld a node's processors from all its *ranks* (:func:`late_figures` of each), or an empty string.

    A few percent for others do not make a run five times as long, nor does another program on processors of which more are
    idle: such a run is slow by itself.
    """
    others = other_cores(ranks)
    cores = min((figures.get("cores", 0.0) for figures in ranks), default=0.0)
    if others is None or cores <= 0:
        return ""
    busy = max(figures["busy_cores"] for figures in ranks)
    steal = max(figures.get("steal", 0.0) for figures in ranks)
    if others / cores + steal < TAKEN or 1.0 - busy / cores - steal > IDLE:
        return ""
    found = [OTHERS.format(others, busy - others)] if others / cores >= steal else []
    return "; ".join(found or [STOLEN.format(steal)])


def figures_of(body: Any) -> Mapping[str, float]:
    """Return the figures by name that a rank sent; none of them where one is no finite number."""
    if not isinstance(body, dict):
        return {}
    with contextlib.suppress(OverflowError):  # of an integer beyond all floats
        if all(isinstance(one, (int, float)) and math.isfinite(one) for one in body.values()):
            return body
    return {}


def crowded_out(place: str, ranks: Sequence[Mapping[str, float]]) -> str:
    """Say what withheld the processors of *place* from all its *ranks*, how late they are, and what to do; empty: nothing did."""
    load = crowding(ranks)
    if not load:
        return ""
    usual, elapsed = (max(figures.get(name, 0.0) for figures in ranks) for name in ("usual_s", "elapsed_s"))
    return (
        f"on {place} {load}; steps that usually take {usual:.2g} s were not over after {elapsed:.2g} s, so the run was ended and "
        "nothing of it counts; run it again when the node is idle, or have it for this run alone"
    )


def _share(part: float, whole: float) -> float:
    return min(1.0, max(0.0, part / whole)) if whole > 0 else 0.0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not every kernel, container or moment has every file
        return ""


def _throttled(root: Path) -> Optional[float]:
    group = parse_cgroup(_read(root / "proc/self/cgroup"))
    if group is None:
        return None
    tree = root / "sys/fs/cgroup"
    # Inside a container the mount already is the container's own group, whatever path the kernel prints.
    for folder in (tree / group.lstrip("/"), tree / "cpu" / group.lstrip("/"), tree, tree / "cpu"):
        found = parse_throttled(_read(folder / "cpu.stat"))
        if found is not None:
            return found
    return None


def _own(proc: Path) -> Optional[int]:
    """Return jiffies of this process and all that it has started and that lives: loader processes, a compiler's workers."""
    total = parse_own(_read(proc / "self/stat"))
    if total is None:
        return None
    below = _read(proc / "self/task" / str(os.getpid()) / "children").split()
    for child in below:  # it grows
        total += parse_own(_read(proc / child / "stat")) or 0
        below += _read(proc / child / "task" / child / "children").split()
    return total
