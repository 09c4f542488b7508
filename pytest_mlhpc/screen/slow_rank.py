"""Which rank keeps the others waiting. Pure functions.

All ranks of synchronous training have the same step time, so that time tells nothing. What tells is who waits least: in collectives
(of the profile), by sleeping (CPU time of ranks whose backend sleeps while it waits, as gloo's does), by an idle device while
the others' are busy with waiting (NCCL's kernels spin), or by a lower clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from pytest_mlhpc.screen.usage import DeviceUsage, RankProcess, percent, seconds_text

#: Share of the step by which one rank must be later than the median of the others.
LATE = 0.10

#: Cores below which a rank does nothing; more is not asked, as ranks may share a core.
LEAST_CORES = 0.02

#: How much more CPU time than the others' median, and how much less of a device's time or clock, stands out.
MORE_CPU, LESS_BUSY, LESS_CLOCK, MORE_DISK = 1.3, 0.20, 0.10, 0.20


@dataclass(frozen=True)
class Slow:
    """The slow rank, the share of the time that the others wait for it, and the evidence."""

    rank: int
    share: float
    text: str
    advice: str
    certain: bool = True


def find_slow_rank(ranks: Sequence[RankProcess], devices: Sequence[DeviceUsage]) -> Slow | None:
    """Return the slow rank, by the surest evidence that there is; None if none stands out."""
    if len(ranks) < 2:
        return None
    return by_collectives(ranks) or by_storage(ranks) or by_device(ranks, devices) or by_cpu_time(ranks)


def by_collectives(ranks: Sequence[RankProcess]) -> Slow | None:
    """Compare how long collectives last on each rank: the last to come waits for nobody."""
    profiles = {
        rank.number: rank.trace.profile
        for rank in ranks
        if rank.trace is not None
        and rank.trace.profile is not None
        and rank.trace.profile.communicating_s > 0
    }
    if len(profiles) < 2:
        return None
    waits = {number: one.communicating_s / one.seconds for number, one in profiles.items()}
    slowest = min(waits, key=lambda number: waits[number])
    others = median(wait for number, wait in waits.items() if number != slowest)
    late = others - waits[slowest]
    if late < LATE:
        return None
    seconds = profiles[slowest].seconds
    text = (
        f"rank {slowest}{_where(ranks, slowest)}: the others are in collectives {percent(others)} of the time, it {percent(waits[slowest])}; "
        f"they wait {seconds_text(late * seconds)} of {seconds_text(seconds)} for it"
    )
    return Slow(
        slowest,
        late,
        f"{text}{_cause(ranks, slowest)}",
        "its node, its share of the data, what it does besides",
    )


def by_storage(ranks: Sequence[RankProcess]) -> Slow | None:
    """Compare how often first threads wait for storage."""
    shares = {rank.number: rank.own.disk for rank in ranks if rank.own is not None}
    found = _outlier(shares, MORE_DISK)
    if found is None:
        return None
    rank, share, others = found
    text = f"rank {rank}{_where(ranks, rank)} waits for storage in {percent(share)} of samples, the others in {percent(others)}"
    return Slow(rank, share - others, text, "its node's file system, its share of the data", certain=False)


def by_cpu_time(ranks: Sequence[RankProcess]) -> Slow | None:
    """Compare CPU time: where waiting is sleeping, the slow rank is the one that never sleeps."""
    busy = {rank.number: rank.cores for rank in ranks if rank.own is not None}
    if len(busy) < 2:
        return None
    slowest = max(busy, key=lambda number: busy[number])
    others = median(cores for number, cores in busy.items() if number != slowest)
    second = max(cores for number, cores in busy.items() if number != slowest)
    # All must stand off: two groups of ranks are no slow rank.
    if busy[slowest] < LEAST_CORES or busy[slowest] < MORE_CPU * others or busy[slowest] < 1.15 * second:
        return None
    text = (
        f"rank {slowest}{_where(ranks, slowest)} keeps {busy[slowest]:.2f} cores busy, the others {others:.2f}: "
        "they sleep while it works"
    )
    share = 1.0 - others / busy[slowest]
    return Slow(slowest, share, text, "its node, its share of the data, what it does besides", certain=False)


def by_device(ranks: Sequence[RankProcess], devices: Sequence[DeviceUsage]) -> Slow | None:
    """Compare devices: an idle one among busy ones has a late host, one with a lower clock is late itself."""
    of = {rank.number: device for rank in ranks for device in devices if _drives(rank, device)}
    clocks = {number: 1.0 - device.clock for number, device in of.items() if device.clock is not None}
    found = _outlier(clocks, LESS_CLOCK)
    if found is not None:
        rank, share, others = found
        device = of[rank]
        text = (
            f"rank {rank}{_where(ranks, rank)}: GPU {device.index} clocks at {percent(1 - share)} of its highest, the others at "
            f"{percent(1 - others)}"
        )
        return Slow(rank, share - others, text, "heat, power or set clocks of this GPU", certain=False)
    found = _outlier(
        {number: 1.0 - device.busy for number, device in of.items() if device.busy is not None}, LESS_BUSY
    )
    if found is None:
        return None
    rank, share, others = found
    text = (
        f"rank {rank}{_where(ranks, rank)}: its GPU is idle {percent(share)} of the time, the others' {percent(others)}, "
        "which are busy waiting in collectives"
    )
    return Slow(
        rank,
        share - others,
        f"{text}{_cause(ranks, rank)}",
        "what its host does: data, Python, its cores",
        certain=False,
    )


def _drives(rank: RankProcess, device: DeviceUsage) -> bool:
    return rank.own is not None and rank.host == device.host and rank.own.pid in device.pids


def _outlier(values: dict[int, float], least: float) -> tuple[int, float, float] | None:
    """Return (rank, its value, the others' median) of one that stands above all others by *least*."""
    if len(values) < 2:
        return None
    first, second = sorted(values, key=lambda number: -values[number])[:2]
    others = median(value for number, value in values.items() if number != first)
    if values[first] - others < least or values[first] - values[second] < least / 2:
        return None
    return first, values[first], others


def _where(ranks: Sequence[RankProcess], number: int) -> str:
    host = next((rank.host for rank in ranks if rank.number == number), "")
    several = len({rank.host for rank in ranks}) > 1
    return f" on {host}" if several and host else ""


def _cause(ranks: Sequence[RankProcess], number: int) -> str:
    """Say what the slow rank does more of than the others."""
    waits = {}
    for rank in ranks:
        steps = rank.trace.steps() if rank.trace is not None else []
        if steps:
            waits[rank.number] = sum(wait for _, wait in steps) / sum(step for step, _ in steps)
    found = _outlier(waits, LATE)
    if found is not None and found[0] == number:
        return f"; it waits for data {percent(found[1])} of a step, the others {percent(found[2])}"
    return ""
