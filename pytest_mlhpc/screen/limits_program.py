"""Limits that lie in the program: waiting for data, communication, the host's own work, computing. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

from pytest_mlhpc.screen.findings import LEAST, Finding, Seen
from pytest_mlhpc.screen.ranks import Rank
from pytest_mlhpc.screen.text import bytes_text, many, percent, seconds_text


def data(seen: Seen) -> list[Finding]:
    """Waiting for data: told by the hook, else seen in what the first threads and the helpers do."""
    waits = {rank.number: waiting(rank) for rank in seen.ranks}
    known = {number: wait for number, wait in waits.items() if wait is not None}
    if known:
        worst = max(known, key=lambda number: known[number][0])
        share, wait_s, step_s = known[worst]
        rank = next(one for one in seen.ranks if one.number == worst)
        if share < LEAST:
            return []
        where = f"rank {worst} waits" if len(seen.ranks) > 1 else "waits"
        text = (
            f"{where} {percent(share)} of a step in the DataLoader ({seconds_text(wait_s)} of {seconds_text(step_s)}, "
            f"{many(len(rank.told.steps()) if rank.told else 0, 'step')}); {_helpers(rank)}"
        )
        return [Finding("waiting for data", share, text, _loader_advice(rank))]
    return [one for rank in seen.ranks for one in _outside(rank)][:1]


def waiting(rank: Rank) -> tuple[float, float, float] | None:
    """Return (share, wait, step) of a rank that told of steps; seconds are means."""
    steps = rank.told.steps() if rank.told is not None else []
    if not steps:
        return None
    step_s, wait_s = fmean(step for step, _ in steps), fmean(wait for _, wait in steps)
    return min(1.0, wait_s / step_s), wait_s, step_s


def _helpers(rank: Rank) -> str:
    workers = [one for one in rank.helpers if one.name != "pt_data_pin"]
    if not workers:
        return "no loader processes: the rank reads itself"
    text = f"its {many(len(workers), 'process', 'es')} of loading keep {sum(one.cores for one in workers):.1f} cores busy"
    disk = fmean(one.disk for one in workers)
    read = sum(one.read_rate or 0.0 for one in workers)
    return f"{text}, {percent(disk)} of looks on storage, {bytes_text(read)}/s from it"


def _loader_advice(rank: Rank) -> str:
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


def _outside(rank: Rank) -> list[Finding]:
    own = rank.own
    if own is None:
        return []
    if own.disk >= 0.2:
        text = f"rank {rank.number} waits for storage in {percent(own.disk)} of looks, {bytes_text(own.read_rate or 0)}/s from it"
        return [
            Finding(
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
            Finding(
                "waiting for data",
                idle,
                text,
                "more loader processes, or a cheaper transformation",
                certain=False,
            )
        ]
    return []


def communication(seen: Seen) -> list[Finding]:
    """Exchange itself: what the rank pays that waits for nobody, the one with the least of it."""
    shares = [
        (rank.told.profile.exposed_s / rank.told.profile.seconds, rank)
        for rank in seen.ranks
        if rank.told is not None and rank.told.profile is not None and rank.told.profile.communicating_s > 0
    ]
    if not shares:
        return []
    share, rank = min(shares, key=lambda one: one[0])
    if share < LEAST or rank.told is None or rank.told.profile is None:
        return []
    told = rank.told.profile
    text = (
        f"collectives are under way {percent(told.communicating_s / told.seconds)} of the profiled time, "
        f"{percent(share)} with nothing computed beside them (rank {rank.number}, which waits least)"
    )
    return [
        Finding(
            "communication",
            share,
            text,
            "larger batches or buckets, gradient accumulation, another backend or network",
        )
    ]


def host(seen: Seen) -> list[Finding]:
    """Gaps in which nothing computes, nothing is exchanged and nothing waited for: Python prepares the next operation."""
    profiles = [
        (rank, rank.told.profile)
        for rank in seen.ranks
        if rank.told is not None and rank.told.profile is not None
    ]
    if profiles:
        rank, told = max(profiles, key=lambda one: one[1].host_s / one[1].seconds)
        share = told.host_s / told.seconds
        if share < LEAST or (rank.own is not None and rank.own.main < 0.5 * share):
            return []
        if told.on_device:
            each = 1e6 * told.computing_s / max(told.launches, 1)
            text = f"no kernel runs in {percent(share)} of the profiled time; {told.launches} kernels of {each:.0f} us each"
            return [
                Finding(
                    "host-bound launch gaps",
                    share,
                    text,
                    "torch.compile, CUDA graphs, larger batches, fewer .item()",
                )
            ]
        text = f"{percent(share)} of the profiled time is in Python between torch's operations (rank {rank.number})"
        return [
            Finding("host-bound", share, text, "larger batches, fewer and larger operations, torch.compile")
        ]
    return _host_by_device(seen)


def _host_by_device(seen: Seen) -> list[Finding]:
    for rank in seen.ranks:
        if rank.own is None:
            continue
        device = next(
            (one for one in seen.devices if one.host == rank.host and rank.own.pid in one.pids), None
        )
        if device is None or device.busy is None or device.busy > 0.7 or rank.own.main < 0.8:
            continue
        text = (
            f"GPU {device.index} is busy {percent(device.busy)} of the time while the first thread of rank {rank.number} "
            f"computes {percent(rank.own.main)} of it"
        )
        advice = "torch.compile, CUDA graphs, larger batches, fewer .item()"
        return [Finding("host-bound launch gaps", 1.0 - device.busy, text, advice, certain=False)]
    return []


def computing(seen: Seen) -> list[Finding]:
    """The work itself."""
    profiles = [
        rank.told.profile for rank in seen.ranks if rank.told is not None and rank.told.profile is not None
    ]
    if profiles:
        share = median(one.computing_s / one.seconds for one in profiles)
        top = ", ".join(f"{name} {percent(part)}" for name, part in profiles[0].top)
        text = (
            f"operations run {percent(share)} of the profiled time; most of it: {top}"
            if top
            else "operations run"
        )
        return [Finding("computing", share, text)] if share >= LEAST else []
    busy = [one.busy for one in seen.devices if one.busy is not None]
    if busy and fmean(busy) >= LEAST:
        text = f"{many(len(busy), 'GPU')} busy {percent(fmean(busy))} of the time"
        return [Finding("computing", fmean(busy), text, certain=False)]
    mains: Sequence[float] = [rank.own.main for rank in seen.ranks if rank.own is not None]
    if mains and fmean(mains) >= LEAST:
        used = sum(rank.cores for rank in seen.ranks)
        text = f"{_first_threads(len(mains))} ran {percent(fmean(mains))} of the time; {used:.1f} cores were busy in all"
        return [Finding("computing", fmean(mains), text, certain=False)]
    return []


def _first_threads(count: int) -> str:
    return "its first thread" if count == 1 else f"the first threads of {count} ranks"
