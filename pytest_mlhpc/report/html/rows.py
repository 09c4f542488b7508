"""Rows of the report: the figures beside its nights, accepted bands, change points, and scaling over devices."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pytest_mlhpc.history.events import Event, began, epoch_start, present_epoch
from pytest_mlhpc.history.level_changes import Shift as LevelShift
from pytest_mlhpc.history.level_changes import WatchedSeries
from pytest_mlhpc.history.rendering import short
from pytest_mlhpc.history.series import Night, Series, feeds
from pytest_mlhpc.judge.baseline_files import Entry
from pytest_mlhpc.judge.fence import make_fence
from pytest_mlhpc.report import keys
from pytest_mlhpc.report.figures import ACCEPTED, DIVISIBLE
from pytest_mlhpc.report.html.page import (
    Band,
    BenchmarkNights,
    BenchmarkRow,
    ChangeMark,
    MachineScales,
    ScalePoint,
    Scaling,
    short_id,
)
from pytest_mlhpc.store.definition import changed
from pytest_mlhpc.store.record import WORSE, SeriesKey
from pytest_mlhpc.store.text import nanoseconds

#: Parts of a run's environment that are listed where they changed, at most; what else changed is counted.
MOST_CHANGES = 8


@dataclass(frozen=True)
class KnownSeries:
    """What is known of series beside their figures: accepted values, change points, events."""

    entries: Mapping[SeriesKey, Entry] = field(default_factory=dict)
    watched: Mapping[SeriesKey, WatchedSeries] = field(default_factory=dict)
    events: Sequence[Event] = ()
    default_branch: str = "main"


def identity(key: SeriesKey) -> SeriesKey:
    """Return the key of the bench that a series belongs to."""
    return replace(key, metric="")


def make_bench(
    key: SeriesKey, label: str, nights: Sequence[Night], series: Sequence[Series], known: KnownSeries
) -> BenchmarkNights:
    """Return the bench of *key*: *nights* in any order, those of failures too."""
    once = {night.id: night for night in nights}
    ordered = sorted(once.values(), key=lambda night: (night.created_ns, night.id))
    column = _Column(
        ordered,
        {night.id: place for place, night in enumerate(ordered)},
        [feeds(night, known.default_branch) for night in ordered],
    )
    rows = [_row(one, column, known) for one in series]
    return BenchmarkNights(
        id=short_id(*_key_texts(key)),
        key=key,
        label=label,
        nights=tuple(ordered),
        watched=tuple(column.watched),
        rows=tuple(sorted(rows, key=lambda row: (not row.judged, row.metric))),
        changed=_changed(ordered, column.watched),
    )


@dataclass(frozen=True)
class _Column:
    """The nights of a bench, where each stands, and whether it counts."""

    nights: Sequence[Night]
    places: Mapping[str, int]
    watched: Sequence[bool]


def _key_texts(key: SeriesKey) -> tuple[str, ...]:
    return (
        key.system,
        key.partition,
        key.environment,
        key.fingerprint,
        key.benchmark,
        key.metric,
    )


def _row(series: Series, column: _Column, known: KnownSeries) -> BenchmarkRow:
    values: list[float | None] = [None] * len(column.nights)
    for point in series.points:
        place = column.places.get(point.night.id)
        if place is not None and math.isfinite(point.value):
            values[place] = point.value
    entry = known.entries.get(series.key)
    if entry is not None and (entry.unit, entry.better) != (series.unit, series.better):
        entry = None
    if entry is not None and series.points and changed(entry.epoch, series.points[-1].night.epoch):
        entry = None
    alike = {point.night.id for point in present_epoch(series.points)}
    counted = [
        value
        for value, night, counts in zip(values, column.nights, column.watched, strict=True)
        if counts and value is not None and night.id in alike
    ]
    newest = (
        counted[-1] if counted else next((value for value in reversed(values) if value is not None), None)
    )
    centre = entry.value if entry else statistics.median(counted) if counted else None
    watched = known.watched.get(series.key)
    return BenchmarkRow(
        id=short_id(*_key_texts(series.key)),
        metric=series.key.metric,
        unit=series.unit,
        better=series.better,
        judged=series.judged,
        values=tuple(values),
        band=_band(entry, values, column, known.events) if entry else None,
        shifts=tuple(_shift(one, column.places) for one in watched.shifts) if watched else (),
        change=_relative(newest, centre),
        newest=newest,
    )


def _band(entry: Entry, values: Sequence[float | None], column: _Column, events: Sequence[Event]) -> Band:
    """Return the fence as the judge makes it, of the nights on the page: those of the baseline epoch that passed."""
    last = column.nights[-1]
    accepted_ns = nanoseconds(entry.date)
    began_ns = epoch_start(events, last.system, last.partition, accepted_ns, last.created_ns)
    past = [
        value
        for value, night, counts in zip(values, column.nights, column.watched, strict=True)
        if counts
        and value is not None
        and value > 0
        and night.verdict == "passed"
        and not changed(entry.epoch, night.epoch)
        and night.created_ns >= began_ns
    ]
    width = make_fence(past, entry.value, entry.tolerance).width
    return Band(entry.value, width, accepted_ns, entry.reason)


def _relative(value: float | None, centre: float | None) -> float | None:
    if value is None or centre is None or centre == 0:
        return None
    change = (value - centre) / abs(centre)
    return change if math.isfinite(change) else None


def _shift(change: LevelShift, places: Mapping[str, int]) -> ChangeMark:
    size = (change.after - change.before) / abs(change.before) if change.before else math.inf
    return ChangeMark(
        index=places[change.at.id],
        first=places[change.first.id],
        last=places[change.last.id],
        before=change.before,
        after=change.after,
        size=size,
        worse=None if change.better == "none" or not change.before else change.worse,
        causes=(*(event.text for event in change.events), *map(short, change.causes)),
    )


def _changed(nights: Sequence[Night], watched: Sequence[bool]) -> dict[int, tuple[str, ...]]:
    """Return what each watched night is that the one before was not: its epoch, then its environment, ``name: old → new``."""
    found: dict[int, tuple[str, ...]] = {}
    before: Mapping[str, str] | None = None
    last: Night | None = None
    for place, (night, counts) in enumerate(zip(nights, watched, strict=True)):
        if not counts or not night.changes:
            continue
        epoch = began(last, night) if last is not None else ""
        last = night
        if epoch:
            found[place] = (f"new epoch: {epoch}",)
        if before is not None and before != night.changes:
            names = sorted(
                name for name in {*before, *night.changes} if before.get(name) != night.changes.get(name)
            )
            lines = [
                f"{name}: {before.get(name, 'absent')} \N{RIGHTWARDS ARROW} {night.changes.get(name, 'absent')}"
                for name in names[:MOST_CHANGES]
            ]
            if more := len(names) - MOST_CHANGES:
                lines += [f"and {more} more"] if more > 0 else []
            found[place] = (*found.get(place, ()), *lines)
        before = night.changes
    return found


#: A scale's figure is the median of its newest watched nights, at most this many: what the machine does now.
NEWEST = 14


@dataclass(frozen=True)
class _Place:
    """Where a row's figure belongs: which plot, which curve of it, at how many devices."""

    how: str
    group: str
    machine: str
    devices: int
    bench: BenchmarkNights
    row: BenchmarkRow


def plots(benches: Sequence[BenchmarkNights]) -> tuple[Scaling, ...]:
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


def _places(bench: BenchmarkNights, row: BenchmarkRow) -> Iterator[_Place]:
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


def _curves(places: Sequence[_Place]) -> tuple[MachineScales, ...]:
    machines: dict[str, dict[int, list[tuple[float, _Place]]]] = {}
    for place in places:
        if values := _newest(place.bench, place.row):
            value = statistics.median(values)
            if value > 0:
                machines.setdefault(place.machine, {}).setdefault(place.devices, []).append((value, place))
    return tuple(
        MachineScales(machine, _steps(machines[machine]))
        for machine in sorted(machines)
        if len(machines[machine]) > 1
    )


def _steps(scales: dict[int, list[tuple[float, _Place]]]) -> tuple[ScalePoint, ...]:
    """Return the scales of one machine; where nodes differ too, the fastest way to have that many devices."""
    best = {devices: max(scales[devices], key=lambda one: one[0]) for devices in sorted(scales)}
    least = min(best)
    each = best[least][0] / least
    return tuple(
        ScalePoint(
            devices, value, value / devices / each, len(_newest(place.bench, place.row)), place.bench.id
        )
        for devices, (value, place) in best.items()
    )


def _newest(bench: BenchmarkNights, row: BenchmarkRow) -> list[float]:
    found = [
        value
        for value, night, counts in zip(row.values, bench.nights, bench.watched, strict=True)
        if counts
        and value is not None
        and night.definition == bench.definition
        and night.verdict in {*ACCEPTED, *WORSE}
    ]
    return found[-NEWEST:]


def _label(bench: BenchmarkNights) -> str:
    return keys.function_of(bench.key.benchmark)


def _benchmark(bench: BenchmarkNights) -> keys.Benchmark:
    """Return what is measured now."""
    return keys.Benchmark(bench.key.benchmark, bench.definition)
