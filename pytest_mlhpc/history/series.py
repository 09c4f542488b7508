"""The history of benchmarks as plain data: series, nights and points, as the local store and InfluxDB both give them.

:class:`LocalSource` is the store's, read through its index: nothing is read from the record files themselves.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from pytest_mlhpc.store.index import Index
from pytest_mlhpc.store.record import (
    AGAINST,
    Epoch,
    Record,
    SeriesKey,
    calibration_rate,
    commit_of,
    environment_of,
    nodes_of,
    unfit_of,
)
from pytest_mlhpc.store.store import FOREVER_NS


@dataclass(frozen=True)
class Night:
    """One attempt of one run, as recorded: who, where, when and with what verdict.

    ``changes`` is what the environment of the run said of itself (driver, kernel, image ...), name -> value; what differs
    between two nights is a candidate cause. ``unfit`` is what vetting left out, host -> reason.
    """

    id: str  #: of the record
    session: str
    node_id: str  #: the test's
    system: str
    partition: str
    environment: str
    device_model: str
    fingerprint: str  #: empty except on `local`
    benchmark: str
    definition: str
    attempt: int
    created_ns: int
    verdict: str  #: a Verdict's value or a failure's name
    purpose: str = ""
    branch: str = ""
    commit: str = ""
    failure: str = ""
    nodes: tuple[str, ...] = ()
    unfit: Mapping[str, str] = field(default_factory=dict)
    node_hours: float = 0.0
    judged: tuple[str, ...] = ()
    changes: Mapping[str, str] = field(default_factory=dict)
    owner: str = ""  #: who is asked about the test, and about the nodes
    partition_owner: str = ""
    job_id: str = ""  #: the scheduler's own id of the allocation
    pipeline: str = ""  #: id of the CI pipeline
    calibration: float | None = None  #: rate of the calibration kernel around the run (1/s), where it was run

    def series(self, metric: str) -> SeriesKey:
        """Return the key of one of its metrics."""
        place = self.system, self.partition, self.environment, self.fingerprint
        return SeriesKey(*place, self.benchmark, metric)

    @property
    def epoch(self) -> Epoch:
        """What its figures may be compared with."""
        return Epoch(self.definition, self.device_model)


@dataclass(frozen=True)
class Point:
    """One figure of one night, in the metric's unit."""

    night: Night
    value: float


@dataclass(frozen=True)
class Series:
    """All figures of one metric, oldest first. ``better`` is higher, lower or none; ``judged`` says whether a test fails by it."""

    key: SeriesKey
    unit: str
    better: str
    judged: bool
    points: tuple[Point, ...]


class Source(Protocol):
    """Where history comes from. The local store and InfluxDB give the same answers to the same questions."""

    def nights(self, since_ns: int = 0, until_ns: int | None = None) -> Iterator[Night]:
        """Yield all records made in [since_ns, until_ns), oldest first; those of failures too.

        Raises:
            StoreError: the history cannot be read; says where and why.
        """

    def series(
        self, since_ns: int = 0, until_ns: int | None = None, *, system: str = "", benchmark: str = ""
    ) -> Iterator[Series]:
        """Yield every series with a figure in [since_ns, until_ns), by key, of one system or benchmark where given.

        Points are those of attempt 0 and of re-runs, of every verdict that has a measurement, of every purpose: whoever
        judges takes those that :func:`feeds` says.

        Raises:
            StoreError: the history cannot be read; says where and why.
        """


def feeds(night: Night, default_branch: str = "main") -> bool:
    """Whether a night's figures belong to the history that is watched over nights.

    First attempts of nightly runs of the default branch that measured something, whatever the verdict: a regression that
    stays is part of it. On `local` manual runs count too, as it has no nightly ones.
    """
    if night.attempt != 0:
        return False
    if night.purpose == "nightly":
        return night.branch == default_branch
    return bool(night.fingerprint) and night.purpose == "manual"


class NightFigure(NamedTuple):
    """One metric of one night."""

    night: Night
    value: float
    unit: str
    better: str


#: A night belongs to the day on which it ends: it begins at 18:00 UTC the evening before.
_EVENING_NS, _DAY_NS = 6 * 3600 * 10**9, 86_400 * 10**9


def day_of(created_ns: int) -> int:
    """Return the number of the day, since 1970, to whose night a record belongs."""
    return (created_ns + _EVENING_NS) // _DAY_NS


def night_of(record: Record) -> Night:
    """Return *record* without its figures."""
    measurement = record.measurement
    return Night(
        id=record.id,
        session=record.session,
        node_id=record.node_id,
        system=record.system,
        partition=record.partition,
        environment=record.environment,
        device_model=record.device_model,
        fingerprint=record.fingerprint,
        benchmark=record.benchmark,
        definition=record.definition,
        attempt=record.attempt,
        created_ns=record.created_ns,
        verdict=record.verdict,
        purpose=record.purpose,
        branch=record.branch,
        commit=commit_of(record),
        failure=record.failure,
        nodes=nodes_of(record),
        unfit=unfit_of(record),
        node_hours=record.node_hours,
        judged=record.judged,
        changes=environment_of(record),
        owner=record.owner,
        partition_owner=record.partition_owner,
        job_id=record.job_id,
        pipeline=record.pipeline,
        calibration=calibration_rate(measurement) if measurement else None,
    )


def assemble(key: SeriesKey, figures: Iterable[NightFigure]) -> Series:
    """Return the series of *figures*, of which there is at least one, in any order.

    A record that is there twice (a store that was copied into another) counts once. Unit, direction and whether it is judged
    are the newest figure's; figures in another unit are of another time and left out.
    """
    once = {figure.night.id: figure for figure in figures}
    ordered = sorted(once.values(), key=lambda figure: (figure.night.created_ns, figure.night.id))
    newest = ordered[-1]
    points = tuple(Point(figure.night, figure.value) for figure in ordered if figure.unit == newest.unit)
    return Series(key, newest.unit, newest.better, key.metric in newest.night.judged, points)


#: Nights are asked for in portions of this many: a few MB each.
_PORTION = 2000

_KEY = ("system", "partition", "environment", "fingerprint", "benchmark")
_TEXTS = ("session", "node_id", *_KEY, "device_model", "definition", "verdict", "purpose", "branch")
#: Comparisons of two sides are no part of any history.
_OF_NIGHTS = f"purpose != '{AGAINST}'"
_NIGHT = f"records.id, record_id, {', '.join(_TEXTS)}, attempt, created_ns, node_hours, calibration, commit_id, more, text"
_NIGHTS = f"SELECT {_NIGHT} FROM records LEFT JOIN texts ON texts.id = surroundings"  # noqa: S608 - constants of this module


class LocalSource:
    """A :class:`~pytest_mlhpc.history.series.Source`: the records of one state directory.

    Series come one benchmark after the other, so that no more than one benchmark's figures are in memory. What the store
    cannot make sense of is reported to *on_problem*, once for each index. An *index* that is given stays its owner's to close.
    """

    def __init__(
        self, state_dir: Path, on_problem: Callable[[str], None] | None = None, index: Index | None = None
    ) -> None:
        self._index = index or Index(state_dir, on_problem)
        self._environments: dict[str, Mapping[str, str]] = {}

    def close(self) -> None:
        """Close the index. Idempotent."""
        self._index.close()

    def nights(self, since_ns: int = 0, until_ns: int | None = None) -> Iterator[Night]:
        """Yield all records made in [since_ns, until_ns), oldest first.

        Raises:
            StoreError: the record files cannot be read.
        """
        query = (
            f"{_NIGHTS} WHERE (created_ns, record_id) > (:after, :name) AND created_ns < :until AND {_OF_NIGHTS}"
            " ORDER BY created_ns, record_id, records.id LIMIT :most"
        )
        after, name = since_ns - 1, "\U0010ffff"  # sorts after every id
        while rows := self._index.ask(
            query, {"after": after, "name": name, "until": _until(until_ns), "most": _PORTION}, since_ns
        ):
            for row in rows:
                night = self._night(row)
                if (night.created_ns, night.id) != (after, name):  # else its second copy
                    yield night
                after, name = night.created_ns, night.id

    def series(
        self, since_ns: int = 0, until_ns: int | None = None, *, system: str = "", benchmark: str = ""
    ) -> Iterator[Series]:
        """Yield every series with a figure in [since_ns, until_ns), by key, of one system or benchmark where given.

        Raises:
            StoreError: the record files cannot be read.
        """
        window = {"since": since_ns, "until": _until(until_ns)}
        query = (
            f"SELECT DISTINCT {', '.join(_KEY)} FROM records WHERE created_ns >= :since AND created_ns < :until AND {_OF_NIGHTS}"  # noqa: S608 - constants of this module
            " AND (:system = '' OR system = :system) AND (:benchmark = '' OR benchmark = :benchmark)"
            f" ORDER BY {', '.join(_KEY)}"
        )
        values = {**window, "system": system, "benchmark": benchmark}
        for row in self._index.ask(query, values, since_ns, benchmark=benchmark):
            yield from self._of_benchmark({**window, **dict(zip(_KEY, row, strict=True))})

    def _of_benchmark(self, values: dict[str, Any]) -> Iterator[Series]:
        same = " AND ".join(f"{name} = :{name}" for name in _KEY)
        which = f"WHERE {same} AND created_ns >= :since AND created_ns < :until AND {_OF_NIGHTS}"
        of_points = f"SELECT metric, record, value, unit, better FROM records JOIN points ON record = id {which} ORDER BY metric"  # noqa: S608 - constants of this module
        rows, points = self._index.ask_at_once(
            [f"{_NIGHTS} {which}", of_points], values, values["since"], benchmark=values["benchmark"]
        )
        nights = {row[0]: self._night(row) for row in rows}
        metrics: dict[str, list[NightFigure]] = {}
        for metric, row, value, unit, better in points:
            metrics.setdefault(metric, []).append(NightFigure(nights[row], value, unit, better))
        for metric, figures in metrics.items():
            yield assemble(SeriesKey(**{name: values[name] for name in _KEY}, metric=metric), figures)

    def _night(self, row: tuple[Any, ...]) -> Night:
        _row, record_id, *texts, attempt, created_ns, node_hours, calibration, commit, more, text = row
        rest = json.loads(more)
        return Night(
            id=record_id,
            **dict(zip(_TEXTS, texts, strict=True)),
            attempt=attempt,
            created_ns=created_ns,
            node_hours=node_hours,
            calibration=calibration,
            commit=commit,
            failure=rest.get("failure", ""),
            nodes=tuple(rest.get("nodes", ())),
            unfit=rest.get("unfit", {}),
            judged=tuple(rest.get("judged", ())),
            changes=self._environment(text or "{}"),
            owner=rest.get("owner", ""),
            partition_owner=rest.get("partition_owner", ""),
            job_id=rest.get("job_id", ""),
            pipeline=rest.get("pipeline", ""),
        )

    def _environment(self, text: str) -> Mapping[str, str]:
        """Thousands of nights share one environment."""
        if text not in self._environments:
            self._environments[text] = json.loads(text)
        return self._environments[text]


def _until(until_ns: int | None) -> int:
    return FOREVER_NS if until_ns is None else until_ns
