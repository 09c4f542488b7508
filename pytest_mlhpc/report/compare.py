"""The comparison of machines: each benchmark and metric in a row, each machine in a column, and why a figure is missing."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from pytest_mlhpc.config.overrides import neutral
from pytest_mlhpc.errors import UsageError, did_you_mean
from pytest_mlhpc.report import keys
from pytest_mlhpc.report.figures import (
    ACCEPTED,
    DIVISIBLE,
    Cell,
    ComparisonRow,
    MachineColumn,
    MeasuredMachine,
    RecordedRun,
    RowKey,
    Runs,
    Series,
    Table,
    VerdictCount,
    cells_of,
    gather,
    metric_names,
    nearest_scales,
    run_of,
    with_ratios,
)
from pytest_mlhpc.report.keys import Benchmark
from pytest_mlhpc.store.index import Index
from pytest_mlhpc.store.text import iso

#: Most benchmarks of one test that are searched for the nearest; people do not distinguish more.
_MOST_NEAR: Final = 200
#: Most fields that are named as different.
_MOST_FIELDS: Final = 4


@dataclass(frozen=True)
class RecordedRuns:
    """What was recorded of one benchmark on one column, figures aside."""

    accepted: int = 0
    failed: int = 0
    last_verdict: str = ""
    last_ns: int = 0  #: of those in the time asked for
    older_ns: int = 0  #: newest of all


@dataclass
class History:
    """All that was recorded, by column: ``past`` of each benchmark, ``near``: those that were measured, by workload and name."""

    past: dict[tuple[int, keys.Benchmark], RecordedRuns] = field(default_factory=dict)
    near: dict[tuple[int, str, str], dict[keys.Benchmark, keys.Key]] = field(default_factory=dict)


def history_of(columns: Sequence[MachineColumn], counts: Sequence[VerdictCount]) -> History:
    """Return *counts* by column."""
    history = History()
    places: dict[object, list[int]] = {}
    for place, column in enumerate(columns):
        for machine in column.sources | column.also:
            places.setdefault(machine, []).append(place)
    for one in counts:
        for place in places.get(one.machine, ()):
            key = place, one.benchmark
            history.past[key] = _added(history.past.get(key, RecordedRuns()), one)
            parts = keys.parse(one.benchmark) if one.recent and one.verdict in ACCEPTED else None
            if parts is not None:
                history.near.setdefault((place, parts.workload, parts.name), {})[one.benchmark] = parts
    return history


def _added(past: RecordedRuns, one: VerdictCount) -> RecordedRuns:
    good = one.verdict in ACCEPTED
    later = one.recent and one.newest_ns >= past.last_ns and not good
    return RecordedRuns(
        accepted=past.accepted + one.recent * good,
        failed=past.failed + one.recent * (not good),
        last_verdict=one.verdict if later else past.last_verdict,
        last_ns=one.newest_ns if later else past.last_ns,
        older_ns=max(past.older_ns, one.newest_ns),
    )


def why(row: RowKey, place: int, runs: Runs, history: History, *, per_device: bool) -> tuple[str, str]:
    """Return a kind that can be counted, and a sentence, for an empty cell of *row* in column *place*."""
    found = runs.get((place, row.benchmark), ())
    if found:
        return _of_figures(row, found, per_device=per_device)
    past = history.past.get((place, row.benchmark))
    if past is not None and past.accepted:
        text = "only runs with other settings (--mlhpc-set), without a measurement, or that cannot be read"
        return "no run that counts", text
    if past is not None and past.failed:
        times = f"{past.failed} run{'s' * (past.failed > 1)}"
        return (
            "only failed",
            f"only failed: {times}, the last {past.last_verdict} on {iso(past.last_ns)[:10]}",
        )
    if past is not None:
        return "not since", f"not run since then; the last on {iso(past.older_ns)[:10]}"
    if text := _nearest(row.benchmark, place, history.near):
        return "only other scale or preset", text
    return "never run", "never run"


def _of_figures(row: RowKey, found: Sequence[RecordedRun], *, per_device: bool) -> tuple[str, str]:
    """Return why runs that were accepted are not comparable with the row."""
    with_metric = [run for run in found if row.metric in run.metrics]
    if not with_metric:
        return "not reported", f"{row.metric} is not reported"
    _value, unit, better = with_metric[0].metrics[row.metric]
    if (unit, better) != (row.unit, row.better):
        return "another unit", f"only in {unit}, better {better} (not {row.unit}, better {row.better})"
    if per_device and unit not in DIVISIBLE:
        return "not per device", f"{row.metric} is not divided by devices"
    run = with_metric[0]
    parts = []
    if run.cache != row.cache:
        parts.append(f"{run.cache} cache (not {row.cache})")
    if run.data_kind != row.data_kind:
        parts.append(f"{run.data_kind} data (not {row.data_kind})")
    return "only other cache or data", f"only with {', '.join(parts) or 'other data'}"


def _nearest(
    benchmark: keys.Benchmark,
    place: int,
    near: Mapping[tuple[int, str, str], Mapping[keys.Benchmark, keys.Key]],
) -> str:
    wanted = keys.parse(benchmark)
    if wanted is None:
        return ""
    there = near.get((place, wanted.workload, wanted.name), {})
    candidates = list(there.values())[-_MOST_NEAR:]
    differences = [keys.differences(wanted, other) for other in candidates]
    if not differences:
        return ""
    best = min(differences, key=lambda one: (len(one), [keys.natural(text) for text in one]))
    more = f" and {len(best) - _MOST_FIELDS} more" if len(best) > _MOST_FIELDS else ""
    return f"only with {', '.join(best[:_MOST_FIELDS])}{more}"


def compare(
    columns: Sequence[MachineColumn],
    runs: Runs,
    counts: Sequence[VerdictCount],
    *,
    benchmarks: Collection[Benchmark],
    metrics: Sequence[str] = (),
    per_device: bool = False,
) -> Table:
    """Return the table.

    Args:
        columns: the machines, the first one being what the others are compared with.
        runs: (place of the column, benchmark) -> accepted runs, newest first.
        counts: all that was recorded on these columns; what is nearest to a missing benchmark is named from it.
        benchmarks: those that are compared.
        metrics: the metrics to show; none: those that each benchmark judges.
        per_device: divide work per time by the number of devices, and set runs of other scales beside each other.

    Raises:
        UsageError: no run reports one of *metrics*; names the nearest that is reported.
    """
    known = metric_names(runs.values())
    for metric in metrics:
        if runs and metric not in known:
            meant = did_you_mean(metric, known)
            raise UsageError(f"no run that is compared reports a metric {metric!r}{meant}")
    series = gather(runs, metrics, per_device=per_device)
    if per_device:
        series = nearest_scales(series)
    history = history_of(columns, counts)
    rows = []
    for key, found in series.items():
        cells = _explained(key, cells_of(found, len(columns)), runs, history, per_device=per_device)
        rows.append(ComparisonRow(key, with_ratios(cells, key.better)))
    if not metrics and not per_device:
        for benchmark in _without_figures(runs, history, benchmarks):
            cells = [Cell()] * len(columns)
            key = RowKey(benchmark, "")
            rows.append(ComparisonRow(key, tuple(_explained(key, cells, runs, history, per_device=False))))
    notes = (*_notes(series, runs, metrics, per_device=per_device), *_busy(columns, runs))
    return Table(tuple(columns), tuple(rows), notes, per_device)


def _explained(
    key: RowKey, cells: Sequence[Cell], runs: Runs, history: History, *, per_device: bool
) -> list[Cell]:
    made = []
    for place, cell in enumerate(cells):
        if cell.median is None:
            kind, text = why(key, place, runs, history, per_device=per_device)
            made.append(replace(cell, missing=kind, why=text))
        else:
            made.append(cell)
    return made


def _without_figures(runs: Runs, history: History, benchmarks: Collection[Benchmark]) -> list[Benchmark]:
    """Return benchmarks that were tried and of which no run counts, on no column."""
    counted = {benchmark for _, benchmark in runs}
    tried = {
        benchmark
        for (_, benchmark), past in history.past.items()
        if past.failed and benchmark in benchmarks and benchmark not in counted
    }
    return sorted(tried)


def _notes(series: Series, runs: Runs, metrics: Sequence[str], *, per_device: bool) -> tuple[str, ...]:
    notes = []
    if per_device:
        notes.append(
            "per device: work per time is divided by the number of devices (on N), and the nearest scale stands in where a"
            " column has not the row's. Runs of different scale are different benchmarks: more devices also pay for"
            " communication. Other metrics are left out"
        )
    shown = {key.benchmark for key in series}
    unjudged = {
        run.benchmark
        for found in runs.values()
        for run in found
        if not run.judged and run.benchmark not in shown
    }
    if unjudged and not metrics and not per_device:
        judge = "benchmarks judge" if len(unjudged) > 1 else "benchmark judges"
        notes.append(f"{len(unjudged)} {judge} no metric; name one by --metric to see it")
    return tuple(notes)


def _busy(columns: Sequence[MachineColumn], runs: Runs) -> Iterator[str]:
    """Say of each column in how many of its runs the machine did something else as well, and what in the newest one."""
    for place, column in enumerate(columns):
        found = [run for (at, _), made in runs.items() if at == place for run in made]
        busy = [run for run in found if run.busy]
        if busy:
            newest = max(busy, key=lambda run: run.created_ns)
            yield (
                f"{column.name} was busy with something else in {len(busy)} of {len(found)} runs ({newest.busy}): repeat them "
                "when it is quiet"
            )


#: For each run that is wanted, so many records are looked at: some were made with other settings (--mlhpc-set).
_LOOKED_AT = 20

_MACHINE = "system, partition, environment, device_model, fingerprint"


def summarise(index: Index, since_ns: int) -> list[VerdictCount]:
    """Return what all first attempts became, by machine, benchmark and verdict.

    Raises:
        StoreError: the record files cannot be read.
    """
    rows = index.ask(
        f"SELECT {_MACHINE}, benchmark, definition, verdict, count(*), sum(created_ns >= :since), max(created_ns) FROM records"  # noqa: S608 - constants of this module
        f" WHERE attempt = 0 GROUP BY {_MACHINE}, benchmark, definition, verdict",
        {"since": since_ns},
    )
    return [VerdictCount(MeasuredMachine(*row[:5]), Benchmark(*row[5:7]), *row[7:]) for row in rows]


def newest(
    index: Index,
    columns: Sequence[MachineColumn],
    benchmarks: Collection[Benchmark],
    since_ns: int,
    count: int,
) -> dict[tuple[int, Benchmark], list[RecordedRun]]:
    """Return (place of the column, benchmark) -> its last *count* accepted runs since then, newest first.

    Records with settings that change figures (--mlhpc-set) are left out, as the judge leaves them out; so are second copies.

    Raises:
        StoreError: the record files cannot be read.
    """
    places: dict[MeasuredMachine, list[int]] = {}
    for place, column in enumerate(columns):
        for machine in column.sources:
            places.setdefault(machine, []).append(place)
    verdicts = ", ".join(f"'{verdict}'" for verdict in ACCEPTED)
    rows = index.ask(
        f"SELECT path, start, record_id, benchmark, definition, {_MACHINE} FROM records WHERE attempt = 0"  # noqa: S608 - constants of this module
        f" AND created_ns >= :since AND verdict IN ({verdicts}) ORDER BY created_ns DESC, id DESC",
        {"since": since_ns},
        since_ns,
    )
    found: dict[tuple[int, Benchmark], dict[str, tuple[str, int, str]]] = {}
    for path, start, record_id, name, definition, *machine in rows:
        benchmark = Benchmark(name, definition)
        if benchmark not in benchmarks:
            continue
        for place in places.get(MeasuredMachine(*machine), ()):
            lines = found.setdefault((place, benchmark), {})
            if len(lines) < count * _LOOKED_AT:
                lines.setdefault(record_id, (path, start, record_id))
    runs = {key: list(_counting(index, list(lines.values()), count)) for key, lines in found.items()}
    return {key: some for key, some in runs.items() if some}


def _counting(index: Index, lines: Sequence[tuple[str, int, str]], count: int) -> Iterator[RecordedRun]:
    left = count
    for record in index.read(lines):
        run = run_of(record) if neutral(record.overrides) else None
        if run is not None:
            yield run
            left -= 1
        if not left:
            return
