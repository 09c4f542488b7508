"""No torch. What else the node was doing: load, pressure, steal, throttling, other programs' cores.

Sources: proc(5) for loadavg, stat and pid/stat; kernel documentation accounting/psi.rst for pressure and
admin-guide/cgroup-v2.rst for cpu.stat. Whatever a kernel does not offer is absent from the result, never zero.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Mapping, Optional, Tuple

PRESSURES = ("cpu", "memory", "io")


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
    words = text.split()
    try:
        return float(words[0])
    except (IndexError, ValueError):
        return None


def parse_pressure(text: str) -> Optional[Tuple[float, float]]:
    """Return (share of the last 10 s, total microseconds) in which some task waited, of a /proc/pressure file."""
    for line in text.splitlines():
        words = line.split()
        if words[:1] != ["some"]:
            continue
        pairs = dict(word.partition("=")[::2] for word in words[1:])
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
    words = text.rpartition(")")[2].split()
    try:
        return int(words[11]) + int(words[12])
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
    """Return jiffies of this process and its living children (loader processes)."""
    total = parse_own(_read(proc / "self/stat"))
    if total is None:
        return None
    for child in _read(proc / "self/task" / str(os.getpid()) / "children").split():
        total += parse_own(_read(proc / child / "stat")) or 0
    return total
