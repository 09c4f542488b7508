"""What limits a program: the machine (memory, power, heat, cores), the program itself (data, communication, its own work), or a slow rank. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from pytest_mlhpc.screen.slow_rank import find_slow_rank
from pytest_mlhpc.screen.usage import (
    DeviceUsage,
    NodeUsage,
    ProcessUsage,
    RankProcess,
    bytes_text,
    many,
    percent,
    seconds_text,
)

#: Shares below which nothing is said: what is reported must be worth reading.
LEAST = 0.10


@dataclass(frozen=True)
class ProgramFinding:
    """One thing that limits: a word for it, its share of the time, the evidence, and what to do."""

    kind: str
    share: float
    text: str
    advice: str = ""
    certain: bool = True  #: False: observed from outside alone


@dataclass(frozen=True)
class ProgramEvidence:
    """All that was found out of a program in *seconds*."""

    seconds: float
    ranks: tuple[RankProcess, ...]
    nodes: tuple[NodeUsage, ...]
    devices: tuple[DeviceUsage, ...]


#: nvmlClocksEventReason bits (NVML API reference) that take speed from a device that has work.
POWER_BITS = {0x4: "its power limit", 0x80: "a power brake of the machine"}
HEAT_BITS = {0x20: "heat (by the driver)", 0x40: "heat (by the board)", 0x8: "a slowdown by the board"}

#: Memory: share in use that is called full; growth in bytes/s, and as a share of the memory in an hour, that is reported.
FULL, LEAST_GROWTH, GROWTH_IN_AN_HOUR = 0.95, 1 << 20, 0.25

#: Share of looks in which a thread could run but had no core that is called waiting: of a few looks one finds anybody so.
QUEUEING = 0.3


def memory(evidence: ProgramEvidence) -> list[ProgramFinding]:
    """Memory that grows without end, or is full."""
    found = []
    for node in evidence.nodes:
        total, free = node.memory_bytes, node.free_bytes
        if total and free is not None and free < (1 - FULL) * total:
            text = f"{node.host} has {bytes_text(free)} of {bytes_text(total)} free"
            found.append(
                ProgramFinding("memory", 0.0, text, "fewer loader processes, smaller batches, or more memory")
            )
        least = max(LEAST_GROWTH, GROWTH_IN_AN_HOUR * (total or 0) / 3600)
        if node.growth >= least and node.seconds >= 2:
            text = f"memory on {node.host} grows by {bytes_text(node.growth)}/s"
            if free is not None:
                text += f": the {bytes_text(free)} that are free last {seconds_text(free / node.growth)}"
            found.append(
                ProgramFinding(
                    "memory",
                    0.0,
                    text,
                    "look for what is never freed: losses with their graph, lists of results, caches",
                )
            )
    for device in evidence.devices:
        if device.memory is not None and device.memory >= 0.98:
            text = f"GPU {device.index} of {device.host} uses {percent(device.memory)} of its memory: the allocator may search and wait"
            found.append(
                ProgramFinding(
                    "memory", 0.0, text, "a smaller batch; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
                )
            )
    return found[:2]


def throttled(evidence: ProgramEvidence) -> list[ProgramFinding]:
    """Clocks that power or heat holds down, by NVML's reasons, while there is work."""
    found = []
    for kind, bits in (("thermal limit", HEAT_BITS), ("power limit", POWER_BITS)):
        shares = [(max(one.throttled.get(bit, 0.0) for bit in bits), one) for one in evidence.devices]
        share, device = max(shares, key=lambda one: one[0], default=(0.0, None))
        if device is None or share < LEAST:
            continue
        why = next(name for bit, name in bits.items() if device.throttled.get(bit, 0.0) == share)
        lost = share * (1.0 - device.clock) if device.clock is not None else 0.0
        others = sum(part >= LEAST for part, _ in shares)
        text = f"GPU {device.index} of {device.host} is held by {why} in {percent(share)} of samples ({_state(device)})"
        text += f"; {others} of {len(shares)} GPUs are" if others > 1 else ""
        advice = (
            "cooling, or another node"
            if kind == "thermal limit"
            else "normal at full load; a lower limit than its peers' is not"
        )
        found.append(ProgramFinding(kind, lost, text, advice))
    return found


def _state(device: DeviceUsage) -> str:
    clauses = []
    if device.power_w is not None:
        clauses.append(
            f"{device.power_w:.0f}" + (f" of {device.power_limit_w:.0f} W" if device.power_limit_w else " W")
        )
    if device.celsius is not None:
        clauses.append(f"up to {device.celsius:.0f} C")
    if device.clock is not None:
        clauses.append(f"clock at {percent(device.clock)}")
    return ", ".join(clauses) or "no more is known"


def cores(evidence: ProgramEvidence) -> list[ProgramFinding]:
    """Cores: a quota that is used up, or other programs on them. A program that wants none is not limited by either."""
    found = []
    for node in evidence.nodes:
        own = [
            one
            for rank in evidence.ranks
            if rank.host == node.host and rank.own is not None
            for one in (rank.own, *rank.helpers)
        ]
        wanted = max((_demand(one) for one in own), default=0.0)
        if wanted < LEAST:
            continue
        if node.throttled is not None and node.throttled >= LEAST:
            text = f"the control group's quota on {node.host} was used up {percent(min(1.0, node.throttled))} of the time"
            share = min(wanted, node.throttled)
            found.append(ProgramFinding("cores", share, text, "ask for more cores, or start fewer threads"))
        used = sum(one.cores for one in own)
        if node.busy is None or node.busy < 0.9 * node.cores or node.busy - used < LEAST * node.cores:
            continue
        other = node.busy - used
        text = f"all {node.cores} cores of {node.host} are busy, {other:.1f} of them with other programs, {used:.1f} with its own"
        share = min(wanted, other / node.cores)
        found.append(
            ProgramFinding("cores", share, text, "a node of its own, or fewer threads", certain=False)
        )
    ready = [
        (one.number, one.own)
        for one in evidence.ranks
        if one.own is not None and one.own.queueing >= QUEUEING
    ]
    found += [_queueing(number, own) for number, own in ready]
    return found[:1]


def _demand(one: ProcessUsage) -> float:
    """Return the share of time in which a process computed, or could have with a core."""
    used = min(1.0, one.cores)
    return one.ready if one.ready - used >= QUEUEING else used


def _queueing(number: int, own: ProcessUsage) -> ProgramFinding:
    text = (
        f"the first thread of rank {number} could run in {percent(own.running)} of samples, but ran {percent(own.main)} "
        "of the time: it waits for a core"
    )
    advice = "fewer threads or processes than cores, or a node of its own"
    return ProgramFinding("cores", own.queueing, text, advice, certain=False)


def data(evidence: ProgramEvidence) -> list[ProgramFinding]:
    """Waiting for data: reported by the hook, else read from what the first threads and the helpers do."""
    waits = {rank.number: waiting(rank) for rank in evidence.ranks}
    known = {number: wait for number, wait in waits.items() if wait is not None}
    if known:
        worst = max(known, key=lambda number: known[number][0])
        share, wait_s, step_s = known[worst]
        rank = next(one for one in evidence.ranks if one.number == worst)
        if share < LEAST:
            return []
        where = f"rank {worst} waits" if len(evidence.ranks) > 1 else "waits"
        text = (
            f"{where} {percent(share)} of a step in the DataLoader ({seconds_text(wait_s)} of {seconds_text(step_s)}, "
            f"{many(len(rank.trace.steps()) if rank.trace else 0, 'step')}); {_helpers(rank)}"
        )
        return [ProgramFinding("waiting for data", share, text, _loader_advice(rank))]
    return [one for rank in evidence.ranks for one in _outside(rank)][:1]


def waiting(rank: RankProcess) -> tuple[float, float, float] | None:
    """Return (share, wait, step) of a rank that reported steps; seconds are means."""
    steps = rank.trace.steps() if rank.trace is not None else []
    if not steps:
        return None
    step_s, wait_s = fmean(step for step, _ in steps), fmean(wait for _, wait in steps)
    return min(1.0, wait_s / step_s), wait_s, step_s


def _helpers(rank: RankProcess) -> str:
    workers = [one for one in rank.helpers if one.name != "pt_data_pin"]
    if not workers:
        return "no loader processes: the rank reads itself"
    text = f"its {many(len(workers), 'process', 'es')} of loading keep {sum(one.cores for one in workers):.1f} cores busy"
    disk = fmean(one.disk for one in workers)
    read = sum(one.read_rate or 0.0 for one in workers)
    return f"{text}, {percent(disk)} of samples on storage, {bytes_text(read)}/s from it"


def _loader_advice(rank: RankProcess) -> str:
    if not rank.helpers:
        if rank.own is not None and rank.own.disk >= 0.2:
            return "storage is what it waits for: DataLoader(num_workers=...), or data nearer to the node"
        return "let DataLoader(num_workers=...) load beside the training"
    busy = fmean(one.cores for one in rank.helpers)
    if busy >= 0.7:
        return "they compute all the time: more of them, or a cheaper transformation"
    if fmean(one.disk for one in rank.helpers) >= 0.2:
        return "storage is too slow for them: stage the data, larger files, more of them"
    return "they wait themselves (a network, a lock, sleep): more of them, or prefetch more"


def _outside(rank: RankProcess) -> list[ProgramFinding]:
    own = rank.own
    if own is None:
        return []
    if own.disk >= 0.2:
        text = f"rank {rank.number} waits for storage in {percent(own.disk)} of samples, {bytes_text(own.read_rate or 0)}/s from it"
        return [
            ProgramFinding(
                "waiting for data", own.disk, text, "load beside the training, or from nearer", certain=False
            )
        ]
    busy = sum(one.cores for one in rank.helpers)
    idle = 1.0 - max(own.main, own.running)
    if rank.helpers and idle >= 0.3 and busy >= 0.5 * len(rank.helpers) and own.cores < 0.5:
        text = (
            f"the first thread of rank {rank.number} sleeps {percent(idle)} of the time while {len(rank.helpers)} processes of "
            f"its own keep {busy:.1f} cores busy"
        )
        return [
            ProgramFinding(
                "waiting for data",
                idle,
                text,
                "more loader processes, or a cheaper transformation",
                certain=False,
            )
        ]
    return []


def communication(evidence: ProgramEvidence) -> list[ProgramFinding]:
    """Exchange itself: what the rank pays that waits for nobody, the one with the least of it."""
    shares = [
        (rank.trace.profile.exposed_s / rank.trace.profile.seconds, rank)
        for rank in evidence.ranks
        if rank.trace is not None
        and rank.trace.profile is not None
        and rank.trace.profile.communicating_s > 0
    ]
    if not shares:
        return []
    share, rank = min(shares, key=lambda one: one[0])
    if share < LEAST or rank.trace is None or rank.trace.profile is None:
        return []
    trace = rank.trace.profile
    text = (
        f"collectives are under way {percent(trace.communicating_s / trace.seconds)} of the profiled time, "
        f"{percent(share)} with nothing computed beside them (rank {rank.number}, which waits least)"
    )
    return [
        ProgramFinding(
            "communication",
            share,
            text,
            "larger batches or buckets, gradient accumulation, another backend or network",
        )
    ]


def host(evidence: ProgramEvidence) -> list[ProgramFinding]:
    """Gaps in which nothing computes, nothing is exchanged and nothing waited for: Python prepares the next operation."""
    profiles = [
        (rank, rank.trace.profile)
        for rank in evidence.ranks
        if rank.trace is not None and rank.trace.profile is not None
    ]
    if profiles:
        rank, trace = max(profiles, key=lambda one: one[1].host_s / one[1].seconds)
        share = trace.host_s / trace.seconds
        if share < LEAST or (rank.own is not None and rank.own.main < 0.5 * share):
            return []
        if trace.on_device:
            each = 1e6 * trace.computing_s / max(trace.launches, 1)
            text = f"no kernel runs in {percent(share)} of the profiled time; {trace.launches} kernels of {each:.0f} us each"
            return [
                ProgramFinding(
                    "host-bound launch gaps",
                    share,
                    text,
                    "torch.compile, CUDA graphs, larger batches, fewer .item()",
                )
            ]
        text = f"{percent(share)} of the profiled time is in Python between torch's operations (rank {rank.number})"
        return [
            ProgramFinding(
                "host-bound", share, text, "larger batches, fewer and larger operations, torch.compile"
            )
        ]
    return _host_by_device(evidence)


def _host_by_device(evidence: ProgramEvidence) -> list[ProgramFinding]:
    for rank in evidence.ranks:
        if rank.own is None:
            continue
        device = next(
            (one for one in evidence.devices if one.host == rank.host and rank.own.pid in one.pids), None
        )
        if device is None or device.busy is None or device.busy > 0.7 or rank.own.main < 0.8:
            continue
        text = (
            f"GPU {device.index} is busy {percent(device.busy)} of the time while the first thread of rank {rank.number} "
            f"computes {percent(rank.own.main)} of it"
        )
        advice = "torch.compile, CUDA graphs, larger batches, fewer .item()"
        return [ProgramFinding("host-bound launch gaps", 1.0 - device.busy, text, advice, certain=False)]
    return []


def computing(evidence: ProgramEvidence) -> list[ProgramFinding]:
    """The work itself."""
    profiles = [
        rank.trace.profile
        for rank in evidence.ranks
        if rank.trace is not None and rank.trace.profile is not None
    ]
    if profiles:
        share = median(one.computing_s / one.seconds for one in profiles)
        top = ", ".join(f"{name} {percent(part)}" for name, part in profiles[0].top)
        text = (
            f"operations run {percent(share)} of the profiled time; most of it: {top}"
            if top
            else "operations run"
        )
        return [ProgramFinding("computing", share, text)] if share >= LEAST else []
    busy = [one.busy for one in evidence.devices if one.busy is not None]
    if busy and fmean(busy) >= LEAST:
        text = f"{many(len(busy), 'GPU')} busy {percent(fmean(busy))} of the time"
        return [ProgramFinding("computing", fmean(busy), text, certain=False)]
    mains: Sequence[float] = [rank.own.main for rank in evidence.ranks if rank.own is not None]
    if mains and fmean(mains) >= LEAST:
        used = sum(rank.cores for rank in evidence.ranks)
        text = f"{_first_threads(len(mains))} ran {percent(fmean(mains))} of the time; {used:.1f} cores were busy in all"
        return [ProgramFinding("computing", fmean(mains), text, certain=False)]
    return []


def _first_threads(count: int) -> str:
    return "its first thread" if count == 1 else f"the first threads of {count} ranks"


def judge(evidence: ProgramEvidence) -> tuple[ProgramFinding, ...]:
    """Return what limits, the largest share first."""
    found = [
        *data(evidence),
        *slow_rank(evidence),
        *communication(evidence),
        *host(evidence),
        *memory(evidence),
        *throttled(evidence),
        *cores(evidence),
    ]
    found += computing(evidence)
    return tuple(sorted(found, key=lambda one: -one.share))


def slow_rank(evidence: ProgramEvidence) -> list[ProgramFinding]:
    """One rank that keeps the others waiting."""
    found = find_slow_rank(evidence.ranks, evidence.devices)
    if found is None:
        return []
    return [ProgramFinding("one slow rank", found.share, found.text, found.advice, found.certain)]
