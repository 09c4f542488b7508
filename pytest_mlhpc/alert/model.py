"""What alerts are made of, as plain data: who is bad since when, incidents, and the book that holds them.

A :class:`Subject` is whatever can be good or bad by itself: a series, a benchmark, a node. Tonight's look at the history
gives a :class:`Bad` for each bad one. Bads with one cause are one :class:`Incident`, which is what people hear of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from pytest_mlhpc.alert.channels.base import AlertMessage, IncidentState, Kind
from pytest_mlhpc.history.events import JournalEntry
from pytest_mlhpc.node.protocol.schema import SCHEMA
from pytest_mlhpc.store.record import SeriesKey

DAY_NS = 86_400 * 10**9
#: "A night": older than this is never announced by a book that has just begun. The schedule's 24 h and two for delays.
NIGHT_NS = 26 * 3600 * 10**9


@dataclass(frozen=True, order=True)
class Subject:
    """Whose state it is; fields that do not apply to the kind are empty."""

    kind: Kind
    system: str
    partition: str = ""
    environment: str = ""
    fingerprint: str = ""
    benchmark: str = ""
    metric: str = ""
    node: str = ""

    @property
    def series(self) -> SeriesKey | None:
        """The series of which it is a figure; None of a test, system or node."""
        place = self.system, self.partition, self.environment, self.fingerprint, self.benchmark, self.metric
        return SeriesKey(*place) if self.metric else None


@dataclass(frozen=True)
class Bad:
    """One subject that is bad tonight. It became so after ``first_ns`` and not after ``last_ns``."""

    subject: Subject
    first_ns: int
    last_ns: int
    unit: str = ""
    before: float | None = None  #: in the unit; what it is compared with for as long as it is open
    after: float | None = None
    worse_by: float = 0.0  #: fraction of ``before``
    nodes: tuple[str, ...] = ()  #: of all nights since then
    reason: str = ""
    causes: tuple[str, ...] = ()  #: what else changed in that time, as text
    owner: str = ""  #: who is asked about the benchmark or node; several are one text with commas


@dataclass(frozen=True)
class Member:
    """One subject of an incident. ``announced`` is how bad it was when a message last spoke of it, ``now`` how bad it is."""

    announced: Bad
    now: Bad
    open: bool = True
    reason: str = ""  #: why it is no longer open, where that is not plain


@dataclass(frozen=True)
class Ack:
    """Somebody knows of it and wants to hear no more until then."""

    until_ns: int
    reason: str
    by: str
    at_ns: int


@dataclass(frozen=True)
class Incident:
    """What has one cause as far as one can tell. Labels, start and id stay as they were when it began."""

    id: str
    kind: Kind
    scope: str  #: all, io, communication, benchmarks, code, stale, failure, nodes
    systems: tuple[str, ...]
    started_ns: int
    first_ns: int  #: the range in which it began, of all members
    last_ns: int
    created_ns: int
    members: tuple[Member, ...]
    named: tuple[str, ...] = ()  #: benchmarks of which a message spoke
    #: those of which its newest message spoke first, where it was not the first one
    fresh: tuple[str, ...] = ()
    measured: int = 0  #: benchmarks of its systems that were measured then
    #: how often what is announced together falls into one night by chance; None where it is one alone
    chance: float | None = None
    announced: bool = False
    state: IncidentState = IncidentState.NEW
    ack: Ack | None = None
    messages: int = 0  #: of it so far
    message_id: str = ""  #: of the newest one
    ticket: str = ""  #: where people work on it, an address or a key
    changed_ns: int = 0  #: when that was made
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def open(self) -> bool:
        """Whether anything of it is still bad."""
        return any(member.open for member in self.members)

    @property
    def owners(self) -> tuple[str, ...]:
        """The owner of each benchmark or node that is bad, of all of them where none is; empty texts for those without."""
        members = [member.now for member in self.members if member.open] or [one.now for one in self.members]
        return tuple({replace(bad.subject, environment="", metric=""): bad.owner for bad in members}.values())

    @property
    def announced_as(self) -> IncidentState:
        """The state that its newest message gives; new, where there was none."""
        return IncidentState(self.message_id.rpartition("-")[2]) if self.message_id else IncidentState.NEW


def owner_names(owners: Iterable[str]) -> tuple[str, ...]:
    """Return each name in *owners* once, sorted; commas separate several names of one text."""
    return tuple(sorted({name.strip() for owner in owners for name in owner.split(",") if name.strip()}))


@dataclass(frozen=True)
class Pending:
    """A message in the outbox and the channels that have not got it."""

    message: AlertMessage
    waiting: tuple[str, ...]


@dataclass(frozen=True)
class Mute:
    """A system of which nothing new is sent until then."""

    until_ns: int
    reason: str
    by: str


@dataclass(frozen=True)
class KnownIssue:
    """A problem that people know and live with until then: what comes back of it begins acknowledged."""

    name: str  #: of the incident that it was
    subjects: tuple[Subject, ...]
    ack: Ack
    ticket: str = ""

    def covers(self, subject: Subject) -> bool:
        """Return whether *subject* is the same test or node with the same kind of problem, whatever its metric."""
        return any(_alike(one) == _alike(subject) for one in self.subjects)


def _alike(subject: Subject) -> Subject:
    return replace(subject, environment="", fingerprint="", metric="")


@dataclass(frozen=True)
class AcceptedSubject:
    """Somebody said that a subject shall stay as it was then: what is older is not bad any more, and no history of it."""

    subject: Subject
    since_ns: int  #: of the level that was accepted
    at_ns: int
    reason: str
    by: str


@dataclass(frozen=True)
class Book:
    """All that lasts from night to night. ``last_ns`` is when it was last advanced, 0 if never: it is new or was lost."""

    incidents: tuple[Incident, ...] = ()
    mutes: Mapping[str, Mute] = field(default_factory=dict)
    outbox: tuple[Pending, ...] = ()
    accepted: tuple[AcceptedSubject, ...] = ()
    issues: tuple[KnownIssue, ...] = ()
    closed: Mapping[str, int] = field(default_factory=dict)  #: ids of ended incidents, and when they ended
    last_ns: int = 0
    recovered: tuple[Incident, ...] = ()  #: whose end was announced within the last night
    morning_ns: int = 0  #: when the newest page of a night was made for channels
    journal: tuple[JournalEntry, ...] = ()  #: what happened and is not in the journal yet
    schema: int = SCHEMA

    def issue_of(self, subject: Subject, now_ns: int) -> KnownIssue | None:
        """Return the known issue that *subject* is part of now, or None."""
        found = (one for one in self.issues if one.ack.until_ns > now_ns and one.covers(subject))
        return next(found, None)

    def muted(self, system: str, now_ns: int) -> bool:
        """Whether *system* is muted now."""
        mute = self.mutes.get(system)
        return mute is not None and mute.until_ns > now_ns


@dataclass(frozen=True)
class Observation:
    """What tonight's look at the history found.

    ``known`` are subjects of which it can say whether they are bad: an open one among them that is not in ``bad`` has
    recovered. ``gone`` are those that will not come back, with the reason. ``measured`` are the benchmarks of a system, of which
    so many become worse in a night (``losses_a_night``), as its history says.
    """

    now_ns: int
    bad: Mapping[Subject, Bad]
    known: frozenset[Subject]
    gone: Mapping[Subject, str] = field(default_factory=dict)
    measured: Mapping[str, frozenset[str]] = field(default_factory=dict)
    losses_a_night: Mapping[str, float] = field(default_factory=dict)
