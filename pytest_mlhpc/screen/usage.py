"""What each process, node and device did over the time that counts, from samples; which processes are ranks. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean

from pytest_mlhpc.node.telemetry.samples import DeviceSample, ProcessSample, Sample
from pytest_mlhpc.screen.hook_output import TrainingTrace

Key = tuple[str, int, int]  #: host, pid, start: a pid alone may be used again


#: Points that it takes to tell growth from a jump: four that count, see :func:`slope`.
LEAST_POINTS = 5
#: Seconds of a program's life whose memory is its start-up where no step is known, such as imports and the first reading of
#: data. Ours: importing torch and its like takes 5 to 20 s from a parallel file system.
STARTUP_S = 30.0
#: Of ``start_ticks``: what Linux shows programs, whatever the kernel counts in (USER_HZ, proc_pid_stat(5)).
_TICKS_PER_S = 100.0


@dataclass(frozen=True)
class ProcessUsage:
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
class NodeUsage:
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
class DeviceUsage:
    """One device: means over looks. ``throttled`` is, for each bit of NVML's clock reasons, the share of busy looks with it."""

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
    throttled: dict[int, float]
    pids: frozenset[int]


def within(samples: Sequence[Sample], since_s: float | None) -> list[Sample]:
    """Return the samples that count: from *since_s* on, if that leaves at least three, else all."""
    late = [sample for sample in samples if since_s is None or sample.time_s >= since_s]
    return late if len(late) >= 3 else list(samples)


def processes(samples: Sequence[Sample]) -> dict[Key, ProcessUsage]:
    """Return the course of each process with at least two samples."""
    by_key: dict[Key, list[tuple[float, ProcessSample]]] = {}
    for sample in samples:
        for one in sample.processes:
            by_key.setdefault((sample.node.host, one.pid, one.start_ticks), []).append((sample.time_s, one))
    return {key: _usage_of(key, taken) for key, taken in by_key.items() if len(taken) > 1}


def _usage_of(key: Key, taken: Sequence[tuple[float, ProcessSample]]) -> ProcessUsage:
    (begin, first), (end, last) = taken[0], taken[-1]
    seconds = max(end - begin, 1e-9)
    return ProcessUsage(
        host=key[0],
        pid=last.pid,
        parent=last.parent,
        name=last.name,
        rank=last.rank,
        seconds=seconds,
        cores=max(0.0, last.cpu_s - first.cpu_s) / seconds,
        main=min(1.0, max(0.0, last.main_cpu_s - first.main_cpu_s) / seconds),
        running=fmean(one.main_state == "R" for _, one in taken),
        ready=fmean(one.running > 0 for _, one in taken),
        disk=fmean(one.main_state == "D" for _, one in taken),
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


def nodes(samples: Sequence[Sample], last_step_s: float | None = None) -> tuple[NodeUsage, ...]:
    """Return the course of each node.

    Memory that is let go after *last_step_s* hides no growth. Where no step is known, start-up is left out.
    """
    made = []
    for host in sorted({sample.node.host for sample in samples}):
        taken = [sample for sample in samples if sample.node.host == host]
        made.append(_node(host, taken, last_step_s))
    return tuple(made)


def _memory(taken: Sequence[Sample], last_step_s: float | None) -> list[tuple[float, float]]:
    """Return (time, bytes of all processes) of the looks that may show growth: none of start-up, or of the end."""
    memory = [(sample.time_s, float(sum(one.rss_bytes for one in sample.processes))) for sample in taken]
    if last_step_s is not None:
        trained = [point for point in memory if point[0] <= last_step_s]
        return trained if len(trained) >= LEAST_POINTS else memory
    begun = [one.start_ticks / _TICKS_PER_S for sample in taken for one in sample.processes]
    since = min([taken[0].time_s, *begun])
    return [point for point in memory if point[0] - since >= STARTUP_S]


def _node(host: str, taken: Sequence[Sample], last_step_s: float | None) -> NodeUsage:
    first, last = taken[0], taken[-1]
    seconds = max(last.time_s - first.time_s, 1e-9)
    free = [sample.node.memory_free_bytes for sample in taken if sample.node.memory_free_bytes is not None]
    return NodeUsage(
        host=host,
        cores=last.node.cores,
        seconds=seconds,
        busy=_rate(first.node.busy_s, last.node.busy_s, seconds),
        throttled=_rate(first.node.throttled_s, last.node.throttled_s, seconds),
        memory_bytes=last.node.memory_bytes,
        free_bytes=min(free) if free else None,
        growth=slope(_memory(taken, last_step_s)),
        cost=sum(sample.cost_s for sample in taken[1:]) / seconds,
    )


def devices(samples: Sequence[Sample]) -> tuple[DeviceUsage, ...]:
    """Return the course of each device."""
    by_key: dict[tuple[str, int], list[DeviceSample]] = {}
    for sample in samples:
        for one in sample.devices:
            by_key.setdefault((sample.node.host, one.index), []).append(one)
    return tuple(_device(host, taken) for (host, _), taken in sorted(by_key.items()))


def _device(host: str, taken: Sequence[DeviceSample]) -> DeviceUsage:
    last = taken[-1]
    busy = [one for one in taken if one.busy is None or one.busy > 0.05]
    known = [one.reasons for one in busy if one.reasons is not None]
    bits = {1 << place for reasons in known for place in range(reasons.bit_length()) if reasons >> place & 1}
    full = [
        one.memory_used_bytes / one.memory_bytes
        for one in taken
        if one.memory_used_bytes is not None and one.memory_bytes
    ]
    return DeviceUsage(
        host=host,
        index=last.index,
        model=last.model,
        busy=mean(one.busy for one in taken),
        memory_busy=mean(one.memory_busy for one in taken),
        memory=max(full, default=None),
        power_w=mean(one.power_w for one in busy),
        power_limit_w=last.power_limit_w,
        celsius=max((one.celsius for one in taken if one.celsius is not None), default=None),
        clock=mean(
            one.clock_hz / one.highest_clock_hz if one.clock_hz and one.highest_clock_hz else None
            for one in busy
        ),
        throttled={bit: fmean(bool(reasons & bit) for reasons in known) for bit in sorted(bits)},
        pids=frozenset(pid for one in taken for pid in one.pids),
    )


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of what is known, None if nothing is."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


#: Programs that start others and do no work of their own, by the name that the kernel has of them (15 letters).
LAUNCHERS = frozenset(
    (
        "sh", "bash", "dash", "zsh", "ksh", "env", "nice", "numactl", "taskset", "time", "timeout", "tini", "dumb-init", "sudo",
        "su", "srun", "poprun", "mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "orted", "prted", "hydra_pmi_proxy",
        "slurmstepd", "slurm_script", "torchrun", "starter-suid", "apptainer", "singularity",
    )
)  # fmt: skip


@dataclass(frozen=True)
class RankProcess:
    """One rank's process, what it reported, and its helpers: loader processes and whatever else it started."""

    number: int
    host: str
    own: ProcessUsage | None
    helpers: tuple[ProcessUsage, ...] = ()
    trace: TrainingTrace | None = None

    @property
    def cores(self) -> float:
        """Cores that the rank's own process kept busy."""
        return 0.0 if self.own is None else self.own.cores


def find_ranks(found: dict[Key, ProcessUsage], trace: Sequence[TrainingTrace]) -> tuple[RankProcess, ...]:
    """Return the ranks, in order.

    They are the processes that reported steps, else those with a rank in their environment, else the highest process of the tree
    that is no launcher.
    """
    usages = list(found.values())
    mains: list[tuple[ProcessUsage | None, TrainingTrace | None]] = [
        (next((own for own in usages if (own.host, own.pid) == (one.host, one.pid)), None), one)
        for one in trace
        if one.ends
    ]
    mains = mains or [(own, None) for own in _ranked(usages)] or [(own, None) for own in _highest(usages)]
    taken = {own.pid for own, _ in mains if own is not None}
    made = []
    for place, (own, one) in enumerate(mains):
        number = (
            one.rank if one is not None and one.rank is not None else own.rank if own is not None else None
        )
        host = own.host if own is not None else one.host if one is not None else ""
        helpers = () if own is None else tuple(_below(own, usages, taken))
        made.append(RankProcess(place if number is None else number, host, own, helpers, one))
    return tuple(sorted(made, key=lambda rank: (rank.number, rank.host)))


def _ranked(usages: Sequence[ProcessUsage]) -> list[ProcessUsage]:
    """Return one process for each rank: the highest with that rank, shells and launchers left aside.

    Of several trees with one rank (a batch script has that of its first task) the one that works most has it.
    """
    by_pid = {(one.host, one.pid): one for one in usages}
    best: dict[int, tuple[float, ProcessUsage]] = {}
    for one in usages:
        above = by_pid.get((one.host, one.parent))
        if one.rank is None or (above is not None and above.rank == one.rank):
            continue
        work = one.cores + sum(other.cores for other in _below(one, usages, set()))
        if one.rank not in best or work > best[one.rank][0]:
            best[one.rank] = (work, one)
    return [_working(one, usages) for _, one in best.values()]


def _highest(usages: Sequence[ProcessUsage]) -> list[ProcessUsage]:
    """Return the highest process that is no launcher; of several the one that works most."""
    pids = {(one.host, one.pid) for one in usages}
    tops = [_working(one, usages) for one in usages if (one.host, one.parent) not in pids]
    return [max(tops, key=lambda one: one.cores)] if tops else []


def _working(top: ProcessUsage, usages: Sequence[ProcessUsage]) -> ProcessUsage:
    """Return the process that a launcher started, itself if it is none."""
    while top.name in LAUNCHERS:
        children = [one for one in usages if one.host == top.host and one.parent == top.pid]
        if not children:
            break
        top = max(children, key=lambda one: (one.name not in LAUNCHERS, one.cores))
    return top


def _below(own: ProcessUsage, usages: Sequence[ProcessUsage], taken: set[int]) -> list[ProcessUsage]:
    found: list[ProcessUsage] = []
    todo = {own.pid}
    while todo:
        level = [
            one for one in usages if one.host == own.host and one.parent in todo and one.pid not in taken
        ]
        level = [one for one in level if one not in found and one.pid != own.pid]
        found += level
        todo = {one.pid for one in level}
    return found


#: Processes in all samples that are stored: each takes some 640 bytes (CPython 3.11).
MOST_PROCESSES = 1_000_000

#: Samples of one node that are never let go: fewer would not tell one rank from another.
LEAST_OF_NODE = 16


def halved(samples: Sequence[Sample]) -> list[Sample]:
    """Return every other sample, the first among them; each with what it cost to take those before it that are gone."""
    costs = [0.0, *(one.cost_s for one in samples[1::2])]
    return [replace(one, cost_s=one.cost_s + cost) for one, cost in zip(samples[::2], costs, strict=False)]


@dataclass
class SampleBuffer:
    """Takes samples in. Of more than *most* processes, every other sample of each node is let go, and of those to come."""

    most: int = MOST_PROCESSES
    _of: dict[str, list[Sample]] = field(default_factory=dict)  #: host -> its samples
    _passed: dict[str, list[float]] = field(
        default_factory=dict
    )  #: host -> costs of those since the last that was stored
    _every: int = 1
    _processes: int = 0

    def add(self, sample: Sample) -> None:
        """Keep it, or what it cost."""
        passed = self._passed.setdefault(sample.node.host, [])
        samples = self._of.setdefault(sample.node.host, [])
        passed.append(sample.cost_s)
        if samples and len(passed) < self._every:
            return
        samples.append(replace(sample, cost_s=sum(passed)))
        passed.clear()
        self._processes += len(sample.processes)
        if self._processes > self.most:
            self._thin()

    def samples(self) -> list[Sample]:
        """Return what is stored, node by node."""
        return [sample for samples in self._of.values() for sample in samples]

    def _thin(self) -> None:
        long = {host: samples for host, samples in self._of.items() if len(samples) >= 2 * LEAST_OF_NODE}
        if not long:
            return  # it is the number of nodes that takes the memory
        for host, samples in long.items():
            if len(samples) % 2 == 0:  # the last goes as well, and what it cost goes to the next
                self._passed[host].append(samples[-1].cost_s)
            self._of[host] = halved(samples)
        self._every *= 2
        self._processes = sum(len(sample.processes) for sample in self.samples())


def percent(share: float) -> str:
    """Return ``71 %``."""
    return f"{100 * share:.0f} %"


def seconds_text(seconds: float) -> str:
    """Return ``3.2 ms``, ``1.5 s``, ``12 min``, ``3.5 h``."""
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def bytes_text(count: float) -> str:
    """Return ``12.5 MiB``."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << power:
            return f"{count / (1 << power):.1f} {unit}"
    return f"{count:.0f} B"


def many(count: int, what: str, ending: str = "s") -> str:
    """Return ``1 rank``, ``2 ranks``."""
    return f"{count} {what}{'' if count == 1 else ending}"
