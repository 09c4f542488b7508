"""Comparable figures: gathered in rows, in columns by machine, with medians, intervals, and ratios to the first machine. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from pytest_mlhpc.errors import UsageError, did_you_mean, nearest
from pytest_mlhpc.judge import judged_metric
from pytest_mlhpc.judge.fence import SMALLEST
from pytest_mlhpc.report import keys
from pytest_mlhpc.report.keys import Benchmark, benchmark_of, parse
from pytest_mlhpc.store.record import GOOD, Record, Verdict
from pytest_mlhpc.store.text import one_line


@dataclass(frozen=True, order=True)
class MeasuredMachine:
    """What a figure was measured on. ``device_model`` is empty where a run reported none: programs, broken runs."""

    system: str
    partition: str
    environment: str = ""
    device_model: str = ""
    fingerprint: str = ""

    @property
    def id(self) -> str:
        """``SYSTEM:PARTITION``."""
        return f"{self.system}:{self.partition}"


@dataclass(frozen=True)
class VerdictCount:
    """How many first attempts of one benchmark ended with one verdict on one machine: ever, and in the time asked for."""

    machine: MeasuredMachine
    benchmark: Benchmark
    verdict: str
    total: int
    recent: int
    newest_ns: int


@dataclass(frozen=True)
class MachineColumn:
    """One machine.

    ``heading`` is its name in parts; ``sources`` are the machines whose accepted runs are its own, ``also`` those whose
    broken runs may be.
    """

    machine: MeasuredMachine
    heading: tuple[str, ...] = ()
    sources: frozenset[MeasuredMachine] = frozenset()
    also: frozenset[MeasuredMachine] = field(default=frozenset())

    @property
    def name(self) -> str:
        """Its name in one line."""
        return " ".join(self.heading)


def choose(
    names: Sequence[str], counts: Sequence[VerdictCount], accepted: Sequence[str]
) -> tuple[MachineColumn, ...]:
    """Return the columns in the order of *names*; each ``SYSTEM`` or ``SYSTEM:PARTITION``.

    Raises:
        UsageError: a word comes twice, or nothing was ever recorded under it; with the nearest that was.
    """
    known = sorted({(one.machine.system, one.machine.partition) for one in counts})
    chosen: list[tuple[str, str]] = []
    for place, word in enumerate(names):
        if word in names[:place]:
            raise UsageError(f"{word!r} is named twice; a machine is compared with another one")
        system, colon, partition = word.partition(":")
        found = [one for one in known if one[0] == system and (not colon or one[1] == partition)]
        if not found:
            raise _unknown(word, known)
        chosen += [one for one in found if one not in chosen]
    by_place: dict[tuple[str, str], list[VerdictCount]] = {one: [] for one in chosen}
    for one in counts:
        if (one.machine.system, one.machine.partition) in by_place:
            by_place[one.machine.system, one.machine.partition].append(one)
    machines = {place: _machines(found, accepted) for place, found in by_place.items()}
    columns = [column for place in chosen for column in machines[place]]
    return tuple(
        replace(column, heading=heading) for column, heading in zip(columns, _headings(columns), strict=True)
    )


def _unknown(word: str, known: Sequence[tuple[str, str]]) -> UsageError:
    names = [*dict.fromkeys(system for system, _ in known), *(f"{s}:{p}" for s, p in known)]
    partitions = [f"{s}:{p}" for s, p in known if s == word.partition(":")[0]]
    meant = did_you_mean(word, partitions or names) or nearest(word, names)
    listed = partitions or [f"{s}:{p}" for s, p in known]
    shown = ", ".join(one_line(name, 60) for name in listed[:20]) + (", ..." if len(listed) > 20 else "")
    return UsageError(f"nothing is recorded for {word!r}{meant}; there are records of {shown}")


def _machines(counts: Iterable[VerdictCount], accepted: Sequence[str]) -> list[MachineColumn]:
    """Return the columns of one partition: one for each environment and device model, those with figures first."""
    recent = {one.machine for one in counts if one.recent}
    good = {one.machine for one in counts if one.recent and one.verdict in accepted}
    everything = {one.machine for one in counts}
    if not recent:
        place = next(iter(everything))
        return [MachineColumn(MeasuredMachine(place.system, place.partition), also=frozenset(everything))]
    columns: list[MachineColumn] = []
    for nameless in sorted({replace(machine, device_model="") for machine in recent}):
        same = {machine for machine in everything if replace(machine, device_model="") == nameless}
        models = sorted(machine for machine in good & same if machine.device_model)
        if not models:
            columns.append(MachineColumn(nameless, sources=frozenset({nameless}), also=frozenset(same)))
            continue
        for machine in models:
            also = frozenset({machine, nameless})
            # A program says no device model; where the partition has one only, it ran on that.
            sources = also if len(models) == 1 else frozenset({machine})
            columns.append(MachineColumn(machine, sources=sources, also=also))
        if len(models) > 1 and nameless in good:
            columns.append(MachineColumn(nameless, sources=frozenset({nameless}), also=frozenset({nameless})))
    return sorted(columns, key=lambda column: (not (column.sources & good), column.machine))


def _headings(columns: Sequence[MachineColumn]) -> list[tuple[str, ...]]:
    """Return each column's name in parts: partition, and environment, device model and fingerprint where they differ."""
    made: list[tuple[str, ...]] = []
    for column in columns:
        machine = column.machine
        parts = [one_line(machine.id, 80)]
        peers = [other.machine for other in columns if other.machine.id == machine.id]
        for name in ("environment", "device_model", "fingerprint"):
            if len({getattr(peer, name) for peer in peers}) > 1:
                text = one_line(getattr(machine, name), 80)
                parts.append(text or f"(no {name.replace('_', ' ')})")
                peers = [peer for peer in peers if getattr(peer, name) == getattr(machine, name)]
        made.append(tuple(parts))
    return [
        (*parts, f"#{made[:n].count(parts) + 1}") if made.count(parts) > 1 else parts
        for n, parts in enumerate(made)
    ]


def benchmarks_of(
    text: str, columns: Sequence[MachineColumn], everything: Sequence[VerdictCount]
) -> tuple[frozenset[Benchmark], list[VerdictCount]]:
    """Return the benchmarks of these machines whose name or definition holds *text*, and all that was recorded of the machines.

    Raises:
        UsageError: none holds it; names the nearest test or workload.
    """
    machines = frozenset().union(*(column.sources | column.also for column in columns))
    counts = [one for one in everything if one.machine in machines]
    known = {one.benchmark for one in counts}
    chosen = frozenset(one for one in known if one.holds(text))
    if known and not chosen:
        parsed = [key for one in sorted(known) if (key := parse(one)) is not None]
        meant = did_you_mean(text, dict.fromkeys(word for key in parsed for word in (key.name, key.workload)))
        raise UsageError(f"no benchmark of these machines holds {text!r}{meant}")
    return chosen, counts


#: Verdicts of runs whose figures count. "unjudged" is a whole measurement that nothing was said against.
ACCEPTED: Final = (*GOOD, Verdict.UNJUDGED)
#: Work per time of all devices together, which may be divided by their number; bandwidths and times may not.
DIVISIBLE: Final = frozenset({"samples/s", "tokens/s", "items/s", "FLOP/s"})


@dataclass(frozen=True)
class RecordedRun:
    """What a comparison needs of one accepted record. ``metrics``: name -> (value, unit, better).

    ``energy_j`` is what the scheduler accounts for the whole run, start and warm-up included; None where it does not.
    """

    benchmark: Benchmark
    metrics: Mapping[str, tuple[float, str, str]]
    judged: tuple[str, ...]
    data_kind: str
    cache: str
    devices: int
    created_ns: int
    nodes: int = 0
    samples: int = 0  #: of the timed window
    energy_j: float | None = None
    busy: str = ""  #: what else kept the machine busy, as text


@dataclass(frozen=True)
class RowKey:
    """What makes figures comparable. ``metric`` is empty where no run of the benchmark was accepted anywhere."""

    benchmark: Benchmark
    metric: str
    unit: str = ""
    better: str = "none"
    data_kind: str = ""
    cache: str = ""


@dataclass(frozen=True)
class Cell:
    """One machine's figure, or why there is none.

    ``spread`` is half the range of the runs, relative to the median (None: one run). ``ratio`` is to the first column, and
    ``word`` says what it means: better, worse, equal (less than 1.5 % apart), unclear (the ranges of both overlap,
    or the machine was busy with something else in half of the runs of one: ``busy`` of them).
    ``benchmark`` differs from the row's only per device, where the nearest scale stands in.
    """

    median: float | None = None
    spread: float | None = None
    runs: int = 0
    busy: int = 0
    low: float = 0.0
    high: float = 0.0
    newest_ns: int = 0
    devices: int = 0
    benchmark: Benchmark | None = None
    ratio: float | None = None
    word: str = ""
    missing: str = ""  #: kind, one of those that are counted
    why: str = ""


@dataclass(frozen=True)
class ComparisonRow:
    """One line of the table; ``cells`` are in the order of the columns."""

    key: RowKey
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Table:
    """The whole comparison. ``notes`` are sentences about it."""

    columns: tuple[MachineColumn, ...]
    rows: tuple[ComparisonRow, ...]
    notes: tuple[str, ...] = ()
    per_device: bool = False

    @property
    def compares(self) -> bool:
        """Whether any row has figures of two columns."""
        return any(sum(cell.median is not None for cell in row.cells) > 1 for row in self.rows)


@dataclass
class Figures:
    """What one column has for one row, while it is gathered; newest first."""

    benchmark: Benchmark
    devices: int
    values: list[float] = field(default_factory=list)
    newest_ns: int = 0
    busy: int = 0


#: Row -> column's place -> figures.
Series = dict[RowKey, dict[int, Figures]]
#: (column's place, benchmark) -> its accepted runs, newest first.
Runs = Mapping[tuple[int, Benchmark], Sequence[RecordedRun]]


def run_of(record: Record) -> RecordedRun | None:
    """Return what is needed of *record*; None where it measured nothing."""
    measurement = record.measurement
    if measurement is None:
        return None
    return RecordedRun(
        benchmark=benchmark_of(record),
        metrics={metric.name: (metric.value, metric.unit, metric.better) for metric in measurement.metrics},
        judged=record.judged,
        data_kind=measurement.data_kind,
        cache=measurement.cache,
        devices=measurement.devices,
        created_ns=record.created_ns,
        nodes=len(measurement.nodes),
        samples=measurement.samples,
        energy_j=record.energy_j,
        busy=judged_metric.busy(measurement),
    )


def gather(runs: Runs, wanted: Sequence[str], *, per_device: bool) -> Series:
    """Return all figures by row and column; of the metrics *wanted*, else of those that each benchmark judges."""
    judged: dict[Benchmark, dict[str, None]] = {}
    for (_, benchmark), found in runs.items():
        for run in found:
            judged.setdefault(benchmark, {}).update(dict.fromkeys(run.judged))
    series: Series = {}
    for (column, benchmark), found in runs.items():
        for metric in wanted or judged.get(benchmark, {}):
            for run in found:
                _add(series, column, run, metric, per_device=per_device)
    order = {metric: place for place, metric in enumerate(wanted)}
    ranks = {b: {metric: place for place, metric in enumerate(names)} for b, names in judged.items()}

    def place(key: RowKey) -> tuple[object, ...]:
        rank = order.get(key.metric, ranks.get(key.benchmark, {}).get(key.metric, 0))
        return keys.order(key.benchmark), rank, key.data_kind, key.cache, key.unit, key.better

    return {key: series[key] for key in sorted(series, key=place)}


def _add(series: Series, column: int, run: RecordedRun, metric: str, *, per_device: bool) -> None:
    if metric not in run.metrics:
        return
    value, unit, better = run.metrics[metric]
    if per_device:
        if unit not in DIVISIBLE or run.devices < 1:
            return
        value /= run.devices
    key = RowKey(run.benchmark, metric, unit, better, run.data_kind, run.cache)
    figures = series.setdefault(key, {}).setdefault(column, Figures(run.benchmark, run.devices))
    figures.values.append(value)
    figures.busy += bool(run.busy)
    figures.newest_ns = max(figures.newest_ns, run.created_ns)


def nearest_scales(series: Series) -> Series:
    """Return *series* with rows of the first column that has them; where another has another scale, its nearest one."""
    groups: dict[RowKey, list[RowKey]] = {}
    for key in series:
        alike = keys.Benchmark("", keys.without_scale(key.benchmark))
        groups.setdefault(replace(key, benchmark=alike), []).append(key)
    made: Series = {}
    for members in groups.values():
        places = sorted({column for key in members for column in series[key]})
        for anchor in (key for key in members if places[0] in series[key]):
            made[anchor] = {}
            devices = series[anchor][places[0]].devices
            for column in places:
                there = [(key, series[key][column]) for key in members if column in series[key]]
                made[anchor][column] = min(
                    there,
                    key=lambda one: (one[0] != anchor, abs(math.log(one[1].devices / devices))),
                )[1]
    return made


def cells_of(found: Mapping[int, Figures], columns: int) -> list[Cell]:
    """Return the cells of one row, with ratios to the first; empty ones where a column has nothing."""
    return [_cell(found[place]) if place in found else Cell() for place in range(columns)]


def with_ratios(cells: Sequence[Cell], better: str) -> tuple[Cell, ...]:
    """Return *cells* with their ratios to the first."""
    first = cells[0]
    return (first, *(_against(cell, first, better) for cell in cells[1:]))


def _cell(figures: Figures) -> Cell:
    values = figures.values
    median = statistics.median(values)
    if not math.isfinite(median):  # the mean of two middle ones can overflow
        median = statistics.median_low(values)
    low, high = min(values), max(values)
    spread = (high / 2 - low / 2) / abs(median) if len(values) > 1 and median else None
    return Cell(
        median=median,
        spread=spread if spread is not None and math.isfinite(spread) else None,
        runs=len(values),
        busy=figures.busy,
        low=low,
        high=high,
        newest_ns=figures.newest_ns,
        devices=figures.devices,
        benchmark=figures.benchmark,
    )


def _against(cell: Cell, first: Cell, better: str) -> Cell:
    if cell.median is None or first.median is None or first.median <= 0 or cell.median < 0:
        return cell
    ratio = cell.median / first.median
    if not math.isfinite(ratio):
        return cell
    return replace(cell, ratio=ratio, word=_word(ratio, cell, first, better))


def _word(ratio: float, cell: Cell, first: Cell, better: str) -> str:
    if better == "none":
        return ""
    if any(one.busy and one.busy >= one.runs / 2 for one in (cell, first)):
        return "unclear"
    if abs(ratio - 1) < SMALLEST:
        return "equal"
    if min(cell.runs, first.runs) > 1 and cell.low <= first.high and first.low <= cell.high:
        return "unclear"
    return "better" if (ratio > 1) == (better == "higher") else "worse"


def metric_names(runs: Iterable[Sequence[RecordedRun]]) -> list[str]:
    """Return all metrics that any run reports."""
    return sorted({name for found in runs for run in found for name in run.metrics})


#: How often the interval of a median holds it, at least. The customary one.
CONFIDENCE: Final = 0.95


@dataclass(frozen=True)
class Estimate:
    """The median of ``runs`` figures, within [low, high].

    ``sure`` says that the interval holds the true median with at least :data:`CONFIDENCE`; else it is the range of the
    runs, which is too few for that. A published figure has ``runs`` 0 and no interval.
    """

    median: float
    low: float | None = None
    high: float | None = None
    runs: int = 0
    sure: bool = False


def estimate(values: Sequence[float]) -> Estimate | None:
    """Return the median of *values* with its interval; None where there are none.

    The interval lies between two order statistics (the sign test turned round), so it supposes nothing of the noise but
    that runs do not depend on each other. Six runs are the fewest for which it exists.
    """
    if not values:
        return None
    ordered = sorted(values)
    median = statistics.median(ordered)
    if not math.isfinite(median):  # the mean of two middle ones can overflow
        median = statistics.median_low(ordered)
    rank = lower_rank(len(ordered))
    at = max(rank, 1) - 1
    return Estimate(median, ordered[at], ordered[-1 - at], len(ordered), sure=rank > 0)


def lower_rank(runs: int) -> int:
    """Return r, such that the r-th smallest and the r-th largest of *runs* figures hold the median; 0: there is no r."""
    rank, below = 0, 0.0
    while rank <= runs // 2:
        below += math.exp(
            math.lgamma(runs + 1) - math.lgamma(rank + 1) - math.lgamma(runs - rank + 1) - runs * math.log(2)
        )
        if 2 * below > 1 - CONFIDENCE:
            break
        rank += 1
    return rank
