"""Limits that the machine sets: memory, power and heat, cores. Pure functions."""

from __future__ import annotations

from pytest_mlhpc.screen.courses import Course, DeviceCourse
from pytest_mlhpc.screen.findings import LEAST, Finding, Seen
from pytest_mlhpc.screen.text import bytes_text, percent, seconds_text

#: nvmlClocksEventReason bits (NVML API reference) that take speed from a device that has work.
POWER_BITS = {0x4: "its power limit", 0x80: "a power brake of the machine"}
HEAT_BITS = {0x20: "heat (by the driver)", 0x40: "heat (by the board)", 0x8: "a slowdown by the board"}

#: Memory: share in use that is called full; growth in bytes/s, and as a share of the memory in an hour, that is told.
FULL, LEAST_GROWTH, GROWTH_IN_AN_HOUR = 0.95, 1 << 20, 0.25

#: Share of looks in which a thread could run but had no core that is called waiting: of a few looks one finds anybody so.
QUEUEING = 0.3


def memory(seen: Seen) -> list[Finding]:
    """Memory that grows without end, or is full."""
    found = []
    for node in seen.nodes:
        total, free = node.memory_bytes, node.free_bytes
        if total and free is not None and free < (1 - FULL) * total:
            text = f"{node.host} has {bytes_text(free)} of {bytes_text(total)} free"
            found.append(
                Finding("memory", 0.0, text, "fewer loader processes, smaller batches, or more memory")
            )
        least = max(LEAST_GROWTH, GROWTH_IN_AN_HOUR * (total or 0) / 3600)
        if node.growth >= least and node.seconds >= 2:
            text = f"memory on {node.host} grows by {bytes_text(node.growth)}/s"
            if free is not None:
                text += f": the {bytes_text(free)} that are free last {seconds_text(free / node.growth)}"
            found.append(
                Finding(
                    "memory",
                    0.0,
                    text,
                    "look for what is kept: losses with their graph, lists of results, caches",
                )
            )
    for device in seen.devices:
        if device.memory is not None and device.memory >= 0.98:
            text = f"GPU {device.index} of {device.host} uses {percent(device.memory)} of its memory: the allocator may search and wait"
            found.append(
                Finding(
                    "memory", 0.0, text, "a smaller batch; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
                )
            )
    return found[:2]


def throttled(seen: Seen) -> list[Finding]:
    """Clocks that power or heat holds down, by NVML's reasons, while there is work."""
    found = []
    for kind, bits in (("thermal limit", HEAT_BITS), ("power limit", POWER_BITS)):
        held = [(max(one.held.get(bit, 0.0) for bit in bits), one) for one in seen.devices]
        share, device = max(held, key=lambda one: one[0], default=(0.0, None))
        if device is None or share < LEAST:
            continue
        why = next(name for bit, name in bits.items() if device.held.get(bit, 0.0) == share)
        lost = share * (1.0 - device.clock) if device.clock is not None else 0.0
        others = sum(part >= LEAST for part, _ in held)
        text = f"GPU {device.index} of {device.host} is held by {why} in {percent(share)} of looks ({_state(device)})"
        text += f"; {others} of {len(held)} GPUs are" if others > 1 else ""
        advice = (
            "cooling, or another node"
            if kind == "thermal limit"
            else "normal at full load; a lower limit than its peers' is not"
        )
        found.append(Finding(kind, lost, text, advice))
    return found


def _state(device: DeviceCourse) -> str:
    words = []
    if device.power_w is not None:
        words.append(
            f"{device.power_w:.0f}" + (f" of {device.power_limit_w:.0f} W" if device.power_limit_w else " W")
        )
    if device.celsius is not None:
        words.append(f"up to {device.celsius:.0f} C")
    if device.clock is not None:
        words.append(f"clock at {percent(device.clock)}")
    return ", ".join(words) or "no more is known"


def cores(seen: Seen) -> list[Finding]:
    """Cores: a quota that is used up, or other programs on them. A program that wants none is not limited by either."""
    found = []
    for node in seen.nodes:
        own = [
            one
            for rank in seen.ranks
            if rank.host == node.host and rank.own is not None
            for one in (rank.own, *rank.helpers)
        ]
        wanted = max((_wanted(one) for one in own), default=0.0)
        if wanted < LEAST:
            continue
        if node.throttled is not None and node.throttled >= LEAST:
            text = f"the control group's quota on {node.host} was used up {percent(min(1.0, node.throttled))} of the time"
            share = min(wanted, node.throttled)
            found.append(Finding("cores", share, text, "ask for more cores, or start fewer threads"))
        used = sum(one.cores for one in own)
        if node.busy is None or node.busy < 0.9 * node.cores or node.busy - used < LEAST * node.cores:
            continue
        other = node.busy - used
        text = f"all {node.cores} cores of {node.host} are busy, {other:.1f} of them with other programs, {used:.1f} with its own"
        share = min(wanted, other / node.cores)
        found.append(Finding("cores", share, text, "a node of its own, or fewer threads", certain=False))
    ready = [
        (one.number, one.own) for one in seen.ranks if one.own is not None and one.own.queueing >= QUEUEING
    ]
    found += [_queueing(number, own) for number, own in ready]
    return found[:1]


def _wanted(one: Course) -> float:
    """Return the share of time in which a process computed, or could have with a core."""
    used = min(1.0, one.cores)
    return one.ready if one.ready - used >= QUEUEING else used


def _queueing(number: int, own: Course) -> Finding:
    text = (
        f"the first thread of rank {number} could run in {percent(own.running)} of looks, but ran {percent(own.main)} "
        "of the time: it waits for a core"
    )
    advice = "fewer threads or processes than cores, or a node of its own"
    return Finding("cores", own.queueing, text, advice, certain=False)
