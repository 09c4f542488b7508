"""The curves of a screened program: what is drawn, as numbers. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from pytest_mlhpc.screen.node.samples import DeviceSample, ProcessSample, Sample
from pytest_mlhpc.screen.told import Told

#: Most curves of one chart, and points of one curve: more cannot be told apart.
MOST_CURVES, MOST_POINTS = 16, 2000

Values = tuple[float | None, ...]
GIB, MHZ = 1 << 30, 1e6


@dataclass(frozen=True)
class Chart:
    """One chart: seconds since the first look, and for each curve a name and as many values (None: not known)."""

    title: str
    unit: str
    times: tuple[float, ...]
    curves: tuple[tuple[str, Values], ...]


One = TypeVar("One")


def charts(samples: Sequence[Sample], told: Sequence[Told]) -> tuple[Chart, ...]:
    """Return the charts that have something to show.

    Clocks of nodes have no common zero: each node's time begins with its first look.
    """
    begin = {sample.node.host: sample.time_s for sample in reversed(samples)}
    made = [*_steps(told, begin), *_processes(samples, begin), *_devices(samples, begin)]
    return tuple(
        chart for chart in made if any(value is not None for _, values in chart.curves for value in values)
    )


def _steps(told: Sequence[Told], begin: dict[str, float]) -> list[Chart]:
    steps: dict[str, dict[float, float]] = {}
    waits: dict[str, dict[float, float]] = {}
    for place, one in enumerate(told[:MOST_CURVES]):
        name = f"rank {place if one.rank is None else one.rank}"
        zero = begin.get(one.host, one.ends[0] if one.ends else 0.0)
        pairs = list(zip(one.ends, one.ends[1:], one.waits[1:], strict=False))
        for before, after, wait in pairs[:: max(1, len(pairs) // MOST_POINTS)]:
            steps.setdefault(name, {})[after - zero] = after - before
            waits.setdefault(name, {})[after - zero] = wait
    return [_aligned("Time of a step", "s", steps), _aligned("Wait for data in a step", "s", waits)]


def _processes(samples: Sequence[Sample], begin: dict[str, float]) -> list[Chart]:
    names = _names(samples)
    cores: dict[str, dict[float, float]] = {}
    for host, zero in begin.items():
        looks = [sample for sample in samples if sample.node.host == host]
        for before, after in pairwise(looks):
            old = {(one.pid, one.start_ticks): one for one in before.processes}
            for one in after.processes:
                name, seen = names.get((host, one.pid)), old.get((one.pid, one.start_ticks))
                if name is not None and seen is not None:
                    used = max(0.0, one.cpu_s - seen.cpu_s) / max(after.time_s - before.time_s, 1e-9)
                    cores.setdefault(name, {})[after.time_s - zero] = used
    memory = _levels(samples, begin, lambda sample: sample.processes, lambda one, host: names.get((host, one.pid)),
                     lambda one: one.rss_bytes / GIB)  # fmt: skip
    return [_aligned("Cores busy", "cores", cores), _aligned("Memory of processes", "GiB", memory)]


def _names(samples: Sequence[Sample]) -> dict[tuple[str, int], str]:
    """Name the processes that used most CPU time."""
    last: dict[tuple[str, int], ProcessSample] = {}
    for sample in samples:
        for one in sample.processes:
            last[sample.node.host, one.pid] = one
    most = sorted(last, key=lambda key: -last[key].cpu_s)[:MOST_CURVES]
    several = len({host for host, _ in last}) > 1
    return {
        (host, pid): " ".join(
            [
                *([host] if several else []),
                last[host, pid].name,
                str(pid),
                *([] if last[host, pid].rank is None else [f"(rank {last[host, pid].rank})"]),
            ]
        )
        for host, pid in most
    }


def _devices(samples: Sequence[Sample], begin: dict[str, float]) -> list[Chart]:
    kinds: tuple[tuple[str, str, Callable[[DeviceSample], float | None]], ...] = (
        ("Time in which a kernel ran", "%", lambda one: None if one.busy is None else 100 * one.busy),
        ("Power", "W", lambda one: one.power_w),
        ("Temperature", "C", lambda one: one.celsius),
        ("Clock", "MHz", lambda one: None if one.clock_hz is None else one.clock_hz / MHZ),
        (
            "Device memory",
            "GiB",
            lambda one: None if one.memory_used_bytes is None else one.memory_used_bytes / GIB,
        ),
    )
    return [
        _aligned(
            title,
            unit,
            _levels(
                samples, begin, lambda sample: sample.devices, lambda one, host: f"{host} {one.index}", value
            ),
        )
        for title, unit, value in kinds
    ]


def _levels(
    samples: Sequence[Sample],
    begin: dict[str, float],
    ones: Callable[[Sample], Iterable[One]],
    name: Callable[[One, str], str | None],
    value: Callable[[One], float | None],
) -> dict[str, dict[float, float]]:
    found: dict[str, dict[float, float]] = {}
    for sample in samples:
        for one in ones(sample):
            called, level = name(one, sample.node.host), value(one)
            if called is not None and level is not None:
                found.setdefault(called, {})[sample.time_s - begin[sample.node.host]] = level
    return found


def _aligned(title: str, unit: str, found: dict[str, dict[float, float]]) -> Chart:
    """Return a chart in which all curves share one axis of times; what one has no value for is None."""
    names = list(found)[:MOST_CURVES]
    times = sorted({time for name in names for time in found[name]})
    times = times[:: max(1, len(times) // (MOST_POINTS * max(1, len(names))))]
    return Chart(
        title,
        unit,
        tuple(times),
        tuple((name, tuple(found[name].get(time) for time in times)) for name in names),
    )
