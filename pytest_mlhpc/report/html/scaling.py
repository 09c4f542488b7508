"""Scaling: work per time over devices, of benchmarks that differ in nothing else, with efficiency. Pure."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pytest_mlhpc.report import keys
from pytest_mlhpc.report.figures import ACCEPTED, DIVISIBLE
from pytest_mlhpc.report.html.model import Bench, Curve, Row, Scaling, Step, short_id
from pytest_mlhpc.store.verdict import WORSE

#: A scale's figure is the median of its newest watched nights, at most this many: what the machine does now.
NEWEST = 14


@dataclass(frozen=True)
class _Place:
    """Where a row's figure belongs: which plot, which curve of it, at how many devices."""

    how: str
    group: str
    machine: str
    devices: int
    bench: Bench
    row: Row


def plots(benches: Sequence[Bench]) -> tuple[Scaling, ...]:
    """Return the plots of all benchmarks that were run with several numbers of devices.

    Weak scaling: batch per device is equal; strong scaling: the whole batch is.
    """
    groups: dict[tuple[str, str, str, str], list[_Place]] = {}
    for bench in benches:
        for row in bench.rows:
            if row.better == "higher" and row.unit in DIVISIBLE:
                for place in _places(bench, row):
                    groups.setdefault((place.how, place.group, row.metric, row.unit), []).append(place)
    found = []
    for (how, group, metric, unit), places in groups.items():
        curves = _curves(places)
        if curves:
            name = _label(places[0].bench)
            found.append(Scaling(short_id(how, group, metric, unit), name, metric, unit, how, curves))
    return tuple(sorted(found, key=lambda one: (one.label, one.how, one.metric, one.id)))


def _places(bench: Bench, row: Row) -> Iterator[_Place]:
    benchmark = _benchmark(bench)
    key = keys.parse(benchmark)
    devices = key.rest.get("devices", "") if key else ""
    if key is None or not devices.isascii() or not devices.isdigit() or not 0 < int(devices) < 10**7:
        return
    machine = ":".join(filter(None, (bench.key.system, bench.key.partition)))
    machine = " ".join(filter(None, (machine, bench.key.environment, bench.device_model)))
    rest = {name: value for name, value in key.rest.items() if name not in keys.SCALE}
    strong = json.dumps([key.name, key.workload, sorted(key.identity.items()), sorted(rest.items())])
    yield _Place("strong", strong, machine, int(devices), bench, row)
    yield _Place("weak", keys.without_scale(benchmark), machine, int(devices), bench, row)


def _curves(places: Sequence[_Place]) -> tuple[Curve, ...]:
    machines: dict[str, dict[int, list[tuple[float, _Place]]]] = {}
    for place in places:
        if values := _newest(place.bench, place.row):
            value = statistics.median(values)
            if value > 0:
                machines.setdefault(place.machine, {}).setdefault(place.devices, []).append((value, place))
    return tuple(
        Curve(machine, _steps(machines[machine]))
        for machine in sorted(machines)
        if len(machines[machine]) > 1
    )


def _steps(scales: dict[int, list[tuple[float, _Place]]]) -> tuple[Step, ...]:
    """Return the scales of one machine; where nodes differ too, the fastest way to have that many devices."""
    best = {devices: max(scales[devices], key=lambda one: one[0]) for devices in sorted(scales)}
    least = min(best)
    each = best[least][0] / least
    return tuple(
        Step(devices, value, value / devices / each, len(_newest(place.bench, place.row)), place.bench.id)
        for devices, (value, place) in best.items()
    )


def _newest(bench: Bench, row: Row) -> list[float]:
    found = [
        value
        for value, night, counts in zip(row.values, bench.nights, bench.watched, strict=True)
        if counts
        and value is not None
        and night.definition == bench.definition
        and night.verdict in {*ACCEPTED, *WORSE}
    ]
    return found[-NEWEST:]


def _label(bench: Bench) -> str:
    return keys.function_of(bench.key.benchmark)


def _benchmark(bench: Bench) -> keys.Benchmark:
    """Return what is measured now."""
    return keys.Benchmark(bench.key.benchmark, bench.definition)
