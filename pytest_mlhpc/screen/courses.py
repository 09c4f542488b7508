"""From samples to courses: what each process, node and device did over the time that counts. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from pytest_mlhpc.node.telemetry.samples import DeviceSample, ProcessSample, Sample

Key = tuple[str, int, int]  #: host, pid, start: a pid alone may be used again


#: Points that it takes to tell growth from a jump: four that count, see :func:`slope`.
LEAST_POINTS = 5
#: Seconds of a program's life whose memory is its start-up where no step is known, such as imports and the first reading of
#: data. Ours: importing torch and its like takes 5 to 20 s from a parallel file system.
STARTUP_S = 30.0
#: Of ``start_ticks``: what Linux shows programs, whatever the kernel counts in (USER_HZ, proc_pid_stat(5)).
_TICKS_PER_S = 100.0


@dataclass(frozen=True)
class Course:
    """One process. ``cores`` it kept busy; shares are of time (``main``) or of looks (``running``, ``disk``, of its first thread).

    ``ready`` is the share of looks in which any of its threads could run or ran; ``switched`` are involuntary switches of
    its first thread in 1/s.
    """

    host: str
    pid: int
    parent: int
    name: str
    rank: int | None
    seconds: float
    cores: float
    main: float
    running: float
    ready: float
    disk: float
    rss_bytes: int
    switched: float | None = None
    read_rate: float | None = None

    @property
    def queueing(self) -> float:
        """Share of time in which the first thread could have run, but had no core."""
        return max(0.0, self.running - self.main)


@dataclass(frozen=True)
class NodeCourse:
    """One node: cores kept busy by all programs, share of time throttled, memory and the least of it that was free."""

    host: str
    cores: int
    seconds: float
    busy: float | None
    throttled: float | None
    memory_bytes: int | None
    free_bytes: int | None
    growth: float  #: of all processes that were looked at, in bytes/s
    cost: float  #: CPU time of looking, as a share of one core


@dataclass(frozen=True)
class DeviceCourse:
    """One device: means over looks. ``held`` is, for each bit of NVML's clock reasons, the share of busy looks with it."""

    host: str
    index: int
    model: str
    busy: float | None
    memory_busy: float | None
    memory: float | None  #: highest share of its memory in use
    power_w: float | None
    power_limit_w: float | None
    celsius: float | None  #: highest
    clock: float | None  #: share of its highest clock, while busy
    held: dict[int, float]
    pids: frozenset[int]


def within(samples: Sequence[Sample], since_s: float | None) -> list[Sample]:
    """Return the samples that count: from *since_s* on, if that leaves at least three, else all."""
    late = [sample for sample in samples if since_s is None or sample.time_s >= since_s]
    return late if len(late) >= 3 else list(samples)


def processes(samples: Sequence[Sample]) -> dict[Key, Course]:
    """Return the course of each process that was seen at least twice."""
    seen: dict[Key, list[tuple[float, ProcessSample]]] = {}
    for sample in samples:
        for one in sample.processes:
            seen.setdefault((sample.node.host, one.pid, one.start_ticks), []).append((sample.time_s, one))
    return {key: _course(key, looks) for key, looks in seen.items() if len(looks) > 1}


def _course(key: Key, looks: Sequence[tuple[float, ProcessSample]]) -> Course:
    (begin, first), (end, last) = looks[0], looks[-1]
    seconds = max(end - begin, 1e-9)
    return Course(
        host=key[0],
        pid=last.pid,
        parent=last.parent,
        name=last.name,
        rank=last.rank,
        seconds=seconds,
        cores=max(0.0, last.cpu_s - first.cpu_s) / seconds,
        main=min(1.0, max(0.0, last.main_cpu_s - first.main_cpu_s) / seconds),
        running=fmean(one.main_state == "R" for _, one in looks),
        ready=fmean(one.running > 0 for _, one in looks),
        disk=fmean(one.main_state == "D" for _, one in looks),
        rss_bytes=last.rss_bytes,
        switched=_rate(first.involuntary, last.involuntary, seconds),
        read_rate=_rate(first.read_bytes, last.read_bytes, seconds),
    )


def _rate(first: float | None, last: float | None, seconds: float) -> float | None:
    return None if first is None or last is None else max(0.0, last - first) / seconds


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the steady change per second, zero if there is none.

    The last two thirds count, as programs fill their caches at first, without what lies behind the highest point at the very
    end, as programs let go there of what they have. What is lowest in each third of them must rise from one to the next: so a
    jump, or what comes and goes with each step, is no growth.
    """
    highest = max(range(len(points)), key=lambda at: points[at][1], default=-1) + 1
    whole = points[:highest] if len(points) - highest <= max(2, len(points) // 5) else points
    if len(whole) < LEAST_POINTS:
        return 0.0
    late = list(whole)[len(whole) // 3 :]
    size = len(late) // 3
    parts = [late[: size + 1], late[size : 2 * size + 1], late[2 * size :]]
    levels = [min(value for _, value in part) for part in parts]
    rates = [
        (after - before) / max(second[0][0] - first[0][0], 1e-9)
        for (before, after), (first, second) in zip(pairwise(levels), pairwise(parts), strict=True)
    ]
    return max(0.0, min(rates))


def nodes(samples: Sequence[Sample], last_step_s: float | None = None) -> tuple[NodeCourse, ...]:
    """Return the course of each node.

    Memory that is let go after *last_step_s* hides no growth. Where no step is known, start-up is left out.
    """
    made = []
    for host in sorted({sample.node.host for sample in samples}):
        looks = [sample for sample in samples if sample.node.host == host]
        made.append(_node(host, looks, last_step_s))
    return tuple(made)


def _memory(looks: Sequence[Sample], last_step_s: float | None) -> list[tuple[float, float]]:
    """Return (time, bytes of all processes) of the looks that may show growth: none of start-up, or of the end."""
    memory = [(look.time_s, float(sum(one.rss_bytes for one in look.processes))) for look in looks]
    if last_step_s is not None:
        trained = [point for point in memory if point[0] <= last_step_s]
        return trained if len(trained) >= LEAST_POINTS else memory
    begun = [one.start_ticks / _TICKS_PER_S for look in looks for one in look.processes]
    since = min([looks[0].time_s, *begun])
    return [point for point in memory if point[0] - since >= STARTUP_S]


def _node(host: str, looks: Sequence[Sample], last_step_s: float | None) -> NodeCourse:
    first, last = looks[0], looks[-1]
    seconds = max(last.time_s - first.time_s, 1e-9)
    free = [look.node.memory_free_bytes for look in looks if look.node.memory_free_bytes is not None]
    return NodeCourse(
        host=host,
        cores=last.node.cores,
        seconds=seconds,
        busy=_rate(first.node.busy_s, last.node.busy_s, seconds),
        throttled=_rate(first.node.throttled_s, last.node.throttled_s, seconds),
        memory_bytes=last.node.memory_bytes,
        free_bytes=min(free) if free else None,
        growth=slope(_memory(looks, last_step_s)),
        cost=sum(look.cost_s for look in looks[1:]) / seconds,
    )


def devices(samples: Sequence[Sample]) -> tuple[DeviceCourse, ...]:
    """Return the course of each device."""
    seen: dict[tuple[str, int], list[DeviceSample]] = {}
    for sample in samples:
        for one in sample.devices:
            seen.setdefault((sample.node.host, one.index), []).append(one)
    return tuple(_device(host, looks) for (host, _), looks in sorted(seen.items()))


def _device(host: str, looks: Sequence[DeviceSample]) -> DeviceCourse:
    last = looks[-1]
    busy = [one for one in looks if one.busy is None or one.busy > 0.05]
    known = [one.reasons for one in busy if one.reasons is not None]
    bits = {1 << place for reasons in known for place in range(reasons.bit_length()) if reasons >> place & 1}
    full = [
        one.memory_used_bytes / one.memory_bytes
        for one in looks
        if one.memory_used_bytes is not None and one.memory_bytes
    ]
    return DeviceCourse(
        host=host,
        index=last.index,
        model=last.model,
        busy=mean(one.busy for one in looks),
        memory_busy=mean(one.memory_busy for one in looks),
        memory=max(full, default=None),
        power_w=mean(one.power_w for one in busy),
        power_limit_w=last.power_limit_w,
        celsius=max((one.celsius for one in looks if one.celsius is not None), default=None),
        clock=mean(
            one.clock_hz / one.highest_clock_hz if one.clock_hz and one.highest_clock_hz else None
            for one in busy
        ),
        held={bit: fmean(bool(reasons & bit) for reasons in known) for bit in sorted(bits)},
        pids=frozenset(pid for one in looks for pid in one.pids),
    )


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of what is known, None if nothing is."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
