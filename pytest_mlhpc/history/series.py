"""The history of benchmarks as plain data: series, nights and points, as the local store and InfluxDB both give them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from pytest_mlhpc.store.record import (
    Epoch,
    Record,
    SeriesKey,
    calibration_rate,
    commit_of,
    environment_of,
    nodes_of,
    unfit_of,
)


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
