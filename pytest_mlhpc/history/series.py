"""The history of benchmarks as plain data: one type for what the local store and InfluxDB say.

A :class:`Night` is one record without its figures, a :class:`Series` the figures of one metric of one benchmark. Everything
that looks back (change points, alerts, report, dashboards) reads these and knows no store.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pytest_mlhpc.store.record import Epoch, SeriesKey


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
