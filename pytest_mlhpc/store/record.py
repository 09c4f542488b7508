"""A record: one attempt's measurement with its verdict, as stored for ever (one JSON line)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pytest_mlhpc.node.protocol.schema import SCHEMA, Measurement


@dataclass(frozen=True)
class Vetted:
    """What vetting said of the nodes before the run.

    ``unfit`` (left out), ``warnings`` and ``kept_out`` (not even asked for, after earlier vettings) are host -> reason.
    """

    level: str
    seconds: float
    fit: tuple[str, ...] = ()
    unfit: Mapping[str, str] = field(default_factory=dict)
    warnings: Mapping[str, str] = field(default_factory=dict)
    kept_out: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Record:
    """One attempt of one run.

    ``system, partition, environment, benchmark`` (+ ``fingerprint`` on `local`) + a metric's name make the series;
    ``benchmark`` is the test's identity. Figures of one series are comparable while ``definition`` and ``device_model``
    stay as they were: another one begins a new epoch. ``purpose`` is nightly, change or manual. ``verdict`` is a Verdict's value or the failure's name.
    ``created_ns`` is when the record was written, UTC; a measurement carries the run's own times.
    """

    id: str  #: UUIDv7 of the run's attempt
    session: str
    node_id: str
    benchmark: str
    definition: str  #: see :mod:`pytest_mlhpc.store.definition`
    system: str
    partition: str
    environment: str
    device_model: str
    attempt: int
    created_ns: int
    verdict: str
    fingerprint: str = ""
    purpose: str = "manual"
    branch: str = ""
    commit: str = ""
    preset: str = ""
    asked: Mapping[str, Any] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    failure: str = ""  #: the failure's text where there is one
    explanation: tuple[str, ...] = ()
    node_hours: float = 0.0
    queue_s: float = 0.0
    run_s: float = 0.0  #: from the first process to the last
    account: str = ""  #: ``system:account`` that is charged
    nodes: tuple[str, ...] = ()
    job_id: str = ""  #: the scheduler's own id of the allocation, and of the run's step in it
    step_id: str = ""
    energy_j: float | None = None  #: as the scheduler accounts it
    judged: tuple[str, ...] = ()
    root: str = ""  #: pytest's root directory, to which ``node_id`` is relative, on the session's machine
    overrides: Mapping[str, str] = field(default_factory=dict)  #: what --mlhpc-set changed of systems.yaml
    vetting: Vetted | None = None  #: None: the nodes were not vetted
    measurement: Measurement | None = None
    schema: int = SCHEMA

    def series(self, metric: str = "") -> SeriesKey:
        """Return the key of one of its series."""
        place = self.system, self.partition, self.environment, self.fingerprint
        return SeriesKey(*place, self.benchmark, metric)

    @property
    def epoch(self) -> Epoch:
        """What it may be compared with."""
        return Epoch(self.definition, self.device_model)


class Epoch(NamedTuple):
    """What must be the same for figures of one series to be comparable."""

    definition: str
    device_model: str  #: empty where the run reports none, as programs do


@dataclass(frozen=True)
class SeriesKey:
    """One metric of one benchmark where it is measured."""

    system: str
    partition: str
    environment: str
    fingerprint: str  #: empty except on `local`
    benchmark: str  #: identity of the test
    metric: str
