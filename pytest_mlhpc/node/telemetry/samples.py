"""Samples of a node while a program runs, their number bounded, and their summary over the timed window."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from typing import Callable, Iterable, List, Optional, Sequence, Tuple

from pytest_mlhpc.node.files import read_json
from pytest_mlhpc.node.protocol.schema import Figure, SchemaError, from_json, to_json


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
    """One sample: ``time_s`` on the node's monotonic clock, ``cost_s`` of CPU time that taking it took."""

    time_s: float
    cost_s: float
    node: NodeSample
    processes: Tuple[ProcessSample, ...] = ()
    devices: Tuple[DeviceSample, ...] = ()


#: Intervals that a file holds at most: half an hour of them as they were taken, a file of at most ``MOST * LONGEST`` bytes (2 MiB).
MOST = 4096

#: Bytes of one interval at most, as text: eleven numbers of at most 24 letters, and their names.
LONGEST = 512


@dataclass(frozen=True)
class Mean:
    """What a mean is made of."""

    total: float = 0.0
    count: int = 0

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)


@dataclass(frozen=True)
class Interval:
    """The time since the sample before, or several such that were merged: ``time_s`` is the last sample's, on the node's monotonic clock.

    ``used_s``, ``cost_s`` (CPU seconds) and ``read_bytes`` are of that time. ``rss_bytes`` and ``celsius`` are
    the highest of its samples; ``busy`` (shares), ``power_w`` (of all devices together) and ``clock_hz`` add up over them.
    """

    time_s: float
    used_s: float
    cost_s: float
    rss_bytes: int
    read_bytes: Optional[int] = None
    celsius: Optional[float] = None
    busy: Mean = Mean()
    power_w: Mean = Mean()
    clock_hz: Mean = Mean()


def interval_of(before: Optional[Sample], after: Sample) -> Interval:
    """Return what *after* tells that *before*, the sample before it, did not. Processes that *before* lacks have used nothing."""
    old = {} if before is None else {(one.pid, one.start_ticks): one for one in before.processes}
    pairs = [
        (old[one.pid, one.start_ticks], one) for one in after.processes if (one.pid, one.start_ticks) in old
    ]
    powers = [one.power_w for one in after.devices if one.power_w is not None]
    return Interval(
        time_s=after.time_s,
        used_s=sum(max(0.0, new.cpu_s - earlier.cpu_s) for earlier, new in pairs),
        cost_s=after.cost_s,
        rss_bytes=sum(one.rss_bytes for one in after.processes),
        read_bytes=_read(pairs),
        celsius=_highest(one.celsius for one in after.devices),
        busy=_mean(one.busy for one in after.devices),
        power_w=Mean(sum(powers), 1) if powers and len(powers) == len(after.devices) else Mean(),
        clock_hz=_mean(one.clock_hz for one in after.devices),
    )


def _read(pairs: Sequence[Tuple[ProcessSample, ProcessSample]]) -> Optional[int]:
    known = [
        max(0, new.read_bytes - old.read_bytes)
        for old, new in pairs
        if new.read_bytes is not None and old.read_bytes is not None
    ]
    return sum(known) if known else None


def _mean(values: Iterable[Optional[float]]) -> Mean:
    known = [value for value in values if value is not None]
    return Mean(sum(known), len(known))


def _highest(values: Iterable[Optional[float]]) -> Optional[float]:
    return max((value for value in values if value is not None), default=None)


def merge(first: Interval, second: Interval) -> Interval:
    """Return neighbours as one."""
    reads = [one.read_bytes for one in (first, second) if one.read_bytes is not None]
    return Interval(
        time_s=second.time_s,
        used_s=first.used_s + second.used_s,
        cost_s=first.cost_s + second.cost_s,
        rss_bytes=max(first.rss_bytes, second.rss_bytes),
        read_bytes=sum(reads) if reads else None,
        celsius=_highest((first.celsius, second.celsius)),
        busy=first.busy + second.busy,
        power_w=first.power_w + second.power_w,
        clock_hz=first.clock_hz + second.clock_hz,
    )


def thinned(intervals: Sequence[Interval], most: int = MOST) -> List[Interval]:
    """Return the same time in at most half of *most* intervals and one: merged by spans of one length, a power of two in seconds.

    The first interval stays as it is, as it begins all that follows. Spans are at most ``4 / most`` of the whole time long, or
    a second.
    """
    begin = intervals[0].time_s
    span_s = 1.0
    while (intervals[-1].time_s - begin) / span_s > most / 2:
        span_s *= 2
    found: List[Interval] = []
    places: List[int] = []
    for one in intervals:
        place = -int((begin - one.time_s) // span_s)  # rounded up: a span holds its end
        if places and places[-1] == place:
            found[-1] = merge(found[-1], one)
        else:
            found.append(one)
            places.append(place)
    return found


class IntervalWriter:
    """Writes intervals into a file that it may also read and cut, and merges them when there are *most*.

    Raises:
        OSError: the file takes no more.
    """

    def __init__(self, descriptor: int, most: int = MOST) -> None:
        self._file, self._most = descriptor, most
        self._intervals: List[Interval] = []
        self._before: Optional[Sample] = None

    def add(self, sample: Sample) -> None:
        """Write what *sample* tells."""
        one = interval_of(self._before, sample)
        self._before = sample
        self._intervals.append(one)
        if len(self._intervals) < self._most:
            _write(self._file, text_of(one), os.write)
            return
        self._intervals = thinned(self._intervals, self._most)
        self._replace(b"".join(map(text_of, self._intervals)))

    def _replace(self, text: bytes) -> None:
        """Have *text* alone in the file. Who is killed meanwhile leaves intervals whose times go back: the reader stops there."""
        before = signal.pthread_sigmask(
            signal.SIG_BLOCK, {signal.SIGTERM}
        )  # which ends the sampler at its end
        _write(self._file, text, lambda file, data: os.pwrite(file, data, len(text) - len(data)))
        os.ftruncate(self._file, len(text))
        os.lseek(self._file, len(text), os.SEEK_SET)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _write(file: int, data: bytes, call: Callable[[int, bytes], int]) -> None:
    while data:
        data = data[call(file, data) :]


def text_of(one: Interval) -> bytes:
    """Return an interval as a line."""
    return json.dumps(to_json(one)).encode() + b"\n"


def parse(lines: Iterable[bytes]) -> List[Interval]:
    """Return the intervals of a file, up to what is cut short or goes back in time."""
    found: List[Interval] = []
    try:
        for line in lines:
            one = from_json(Interval, read_json(line))
            if not line.endswith(b"\n") or (found and one.time_s <= found[-1].time_s):
                break
            found.append(one)
    except (ValueError, SchemaError):
        pass
    return found


#: 0 degrees Celsius in kelvin.
ZERO_CELSIUS = 273.15


def window(intervals: Sequence[Interval], begin_s: float, end_s: float) -> Sequence[Interval]:
    """Return the intervals between two moments of the monotonic clock; where fewer than two lie there, those around them too."""
    inside = [one for one in intervals if begin_s <= one.time_s <= end_s]
    if len(inside) >= 2:
        return inside
    first = max((place for place, one in enumerate(intervals) if one.time_s <= begin_s), default=0)
    last = next((place for place, one in enumerate(intervals) if one.time_s >= end_s), len(intervals) - 1)
    return intervals[min(first, max(0, len(intervals) - 2)) : max(last, 1) + 1]


def figures(intervals: Sequence[Interval]) -> Tuple[Figure, ...]:
    """Return the figures of one node; of several nodes they are added, or the worst is taken, as each says.

    Nothing comes of fewer than two intervals: rates need two. What the first one tells of the time before it is no part of them.
    """
    if len(intervals) < 2:
        return ()
    later = intervals[1:]
    seconds = max(intervals[-1].time_s - intervals[0].time_s, 1e-9)
    reads = [one.read_bytes for one in later if one.read_bytes is not None]
    hottest = max((one.celsius for one in intervals if one.celsius is not None), default=None)
    made = [
        _figure("telemetry_cores", sum(one.used_s for one in later) / seconds, "1", "sum"),
        _figure("telemetry_memory", float(max(one.rss_bytes for one in intervals)), "B", "max"),
        _figure("telemetry_read_rate", sum(reads) / seconds if reads else None, "B/s", "sum"),
        _figure("telemetry_device_busy", _mean_of([one.busy for one in intervals]), "1", "mean"),
        _figure("telemetry_power", _mean_of([one.power_w for one in intervals]), "W", "sum"),
        _figure("telemetry_temperature", None if hottest is None else hottest + ZERO_CELSIUS, "K", "max"),
        _figure("telemetry_clock", _mean_of([one.clock_hz for one in intervals]), "Hz", "min"),
        _figure("telemetry_cost", sum(one.cost_s for one in later) / seconds, "1", "max"),
    ]
    return tuple(figure for figure in made if figure is not None)


def _figure(name: str, value: Optional[float], unit: str, over: str) -> Optional[Figure]:
    return None if value is None else Figure(name, value, unit, "none", over)


def _mean_of(parts: Sequence[Mean]) -> Optional[float]:
    whole = sum(parts, Mean())
    return whole.total / whole.count if whole.count else None
