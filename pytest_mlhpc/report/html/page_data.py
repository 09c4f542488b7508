"""From a source of history to all that a page shows. Pure but for what it reads of the source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pytest_mlhpc.history.events import Event
from pytest_mlhpc.history.level_changes import NightlyQuery, WatchedSeries, watch
from pytest_mlhpc.history.series import Night, Series, Source
from pytest_mlhpc.judge.baseline_files import Entry
from pytest_mlhpc.report import keys
from pytest_mlhpc.report.html import hosts, model, rows
from pytest_mlhpc.report.html.model import BenchmarkNights, Page, SystemMark
from pytest_mlhpc.store.record import SeriesKey

#: Figures on one page, at most, before those that no test is judged by are left out: some 35 bytes each in the file.
MOST_FIGURES = 400_000
#: Metrics that other parts of the page are made of; they stay as long as judged ones do.
NEEDED = frozenset(
    {"epoch_time", "io_time", "exposed_communication_time", "step_time", "effective_throughput"}
)


@dataclass(frozen=True)
class PageQuery:
    """What the page is asked to show: moments in ns UTC; empty words choose everything."""

    now_ns: int
    since_ns: int = 0
    system: str = ""
    benchmark: str = ""
    metrics: frozenset[str] = frozenset()
    default_branch: str = "main"
    title: str = "Benchmarks"
    source: str = "local"
    links: Mapping[str, str] = field(default_factory=dict)


def gather(
    source: Source,
    wanted: PageQuery,
    entries: Mapping[SeriesKey, Entry],
    events: Sequence[Event] = (),
) -> Page | None:
    """Return what *wanted* asks for, or None where nothing is recorded.

    Raises:
        StoreError: the history cannot be read.
    """
    nights = _nights(source, wanted)
    if not nights:
        return None
    found, notes = _chosen(_series(source, wanted), wanted.metrics)
    benchmarks = {key: keys.benchmark_of(max(some, key=_time)) for key, some in nights.items()}
    labels = keys.labels(sorted(set(benchmarks.values())))[1]
    known = rows.KnownSeries(
        entries, _watched(found, events, wanted.default_branch), events, wanted.default_branch
    )
    benches = [
        rows.make_bench(key, labels[benchmarks[key]], nights[key], found.get(key, ()), known)
        for key in sorted(nights, key=_order)
    ]
    return Page(
        title=wanted.title,
        made_ns=wanted.now_ns,
        since_ns=max(wanted.since_ns, min(night.created_ns for some in nights.values() for night in some)),
        source=wanted.source,
        benches=tuple(benches),
        systems=hosts.systems(benches, wanted.now_ns),
        marks=tuple(_marks(events, benches, wanted)),
        splits=tuple(one for bench in benches if (one := model.split_of(bench)) is not None),
        scaling=rows.plots(benches),
        hosts=hosts.hosts(benches),
        notes=tuple(notes),
        links=wanted.links,
    )


def _nights(source: Source, wanted: PageQuery) -> dict[SeriesKey, list[Night]]:
    found: dict[SeriesKey, list[Night]] = {}
    for night in source.nights(wanted.since_ns):
        if (not wanted.system or night.system == wanted.system) and keys.benchmark_of(night).holds(
            wanted.benchmark
        ):
            found.setdefault(night.series(""), []).append(night)
    return found


def _series(source: Source, wanted: PageQuery) -> dict[SeriesKey, list[Series]]:
    found: dict[SeriesKey, list[Series]] = {}
    for one in source.series(wanted.since_ns, system=wanted.system):
        newest = one.points[-1].night
        if keys.benchmark_of(newest).holds(wanted.benchmark):
            found.setdefault(rows.identity(one.key), []).append(one)
    return found


def _chosen(
    found: dict[SeriesKey, list[Series]], metrics: frozenset[str]
) -> tuple[dict[SeriesKey, list[Series]], list[str]]:
    """Return the series to show: those asked for, else all that fit in a page, judged ones first."""
    if metrics:
        return {key: [one for one in some if one.key.metric in metrics] for key, some in found.items()}, []
    figures = sum(len(one.points) for some in found.values() for one in some)
    if figures <= MOST_FIGURES:
        return found, []
    data = {
        key: [one for one in some if one.judged or one.key.metric in NEEDED] for key, some in found.items()
    }
    note = (
        f"{figures:,} figures are more than a page holds: only metrics that tests are judged by are shown; "
        "others with --metric NAME, or choose a --system, a --benchmark or a later --since"
    )
    return data, [note]


def _time(night: Night) -> tuple[int, str]:
    return night.created_ns, night.id


def _order(key: SeriesKey) -> tuple[object, ...]:
    return key.system, key.partition, keys.natural(key.benchmark), key.environment, key.fingerprint


def _marks(
    events: Sequence[Event], benches: Sequence[BenchmarkNights], wanted: PageQuery
) -> list[SystemMark]:
    systems = {bench.key.system for bench in benches}
    return [
        SystemMark(event.at_ns, event.system, event.partition, event.label)
        for event in sorted(events, key=lambda event: event.at_ns)
        if event.system in systems and event.at_ns >= wanted.since_ns
    ]


class _ReadSource:
    """The source again, of what was read of it: what is watched over nights is found in the same way for every reader."""

    def __init__(self, found: Mapping[SeriesKey, Sequence[Series]]) -> None:
        self._found = found

    def nights(self, since_ns: int = 0, until_ns: int | None = None) -> Iterator[Night]:
        """Yield none: nobody asks."""
        del since_ns, until_ns
        yield from ()

    def series(
        self, since_ns: int = 0, until_ns: int | None = None, *, system: str = "", benchmark: str = ""
    ) -> Iterator[Series]:
        """Yield all that have a direction, as no other change is good or bad; they were chosen when they were read."""
        del since_ns, until_ns, system, benchmark
        for some in self._found.values():
            yield from (one for one in some if one.better != "none")


def _watched(
    found: Mapping[SeriesKey, Sequence[Series]], events: Sequence[Event], default_branch: str
) -> dict[SeriesKey, WatchedSeries]:
    query = NightlyQuery(default_branch=default_branch)
    return {one.series.key: one for one in watch(_ReadSource(found), query, events)}
