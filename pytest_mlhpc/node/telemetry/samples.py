"""PAYLOAD, no torch. What one look at a node finds. Counters count up from the process's start, levels are of the moment.

Whatever a kernel, a driver or a right does not tell is None, never zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Tuple


@dataclass(frozen=True)
class ProcessSample:
    """One process. ``main_*`` is its first thread, in which Python runs; switches are of that thread alone (proc(5)).

    ``running``, ``disk`` and ``sleeping`` count its threads by state (R; D; the rest). ``blkio_s`` is time that it waited
    for disks, which kernels count only with delay accounting. ``read_bytes`` is what came from storage, ``rchar_bytes``
    what it read, from caches and pipes too.
    """

    pid: int
    parent: int
    start_ticks: int
    name: str
    cpu_s: float
    main_cpu_s: float
    main_state: str
    running: int
    disk: int
    sleeping: int
    rss_bytes: int
    rank: Optional[int] = None
    blkio_s: Optional[float] = None
    voluntary: Optional[int] = None
    involuntary: Optional[int] = None
    read_bytes: Optional[int] = None
    rchar_bytes: Optional[int] = None


@dataclass(frozen=True)
class DeviceSample:
    """One accelerator. ``busy`` and ``memory_busy`` are shares of time in which a kernel ran, and in which memory was used.

    ``reasons`` are why clocks are below their highest, in NVML's bits (nvmlClocksEventReason*). ``energy_j`` counts up.
    """

    index: int
    identity: str
    model: str
    busy: Optional[float] = None
    memory_busy: Optional[float] = None
    memory_used_bytes: Optional[int] = None
    memory_bytes: Optional[int] = None
    power_w: Optional[float] = None
    power_limit_w: Optional[float] = None
    celsius: Optional[float] = None
    clock_hz: Optional[float] = None
    highest_clock_hz: Optional[float] = None
    reasons: Optional[int] = None
    pids: Tuple[int, ...] = ()


@dataclass(frozen=True)
class NodeSample:
    """The node. ``memory_bytes`` and ``memory_free_bytes`` are the least of the machine's and the control group's."""

    host: str
    cores: int
    memory_bytes: Optional[int] = None
    memory_free_bytes: Optional[int] = None
    busy_s: Optional[float] = None  #: seconds of all cores, of all programs
    throttled_s: Optional[float] = None  #: for which the control group's quota was used up


@dataclass(frozen=True)
class Sample:
    """One look: ``time_s`` on the node's monotonic clock, ``cost_s`` of CPU time that looking took."""

    time_s: float
    cost_s: float
    node: NodeSample
    processes: Tuple[ProcessSample, ...] = ()
    devices: Tuple[DeviceSample, ...] = ()
