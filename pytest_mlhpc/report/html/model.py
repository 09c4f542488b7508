"""What the report shows, as plain data, and where the time of a run goes. Nothing here knows HTML."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from pytest_mlhpc.history.series import Night
from pytest_mlhpc.report.morning import MorningLine
from pytest_mlhpc.store.record import FAILURES, INFRASTRUCTURE, SeriesKey
from pytest_mlhpc.store.verdict import GOOD, WORSE

#: How a night ended, in the order in which a summary counts them; what each kind means stands beside it on the page.
KINDS = ("ok", "unsure", "slow", "broken", "machine", "missing")

#: The run was neither good nor bad: it could not be judged yet, was not judged, or did not come to an end.
_UNSURE = frozenset({"suspect", "inconclusive", "unjudged", "cancelled", "detached", "cannot_lower"})


def kind_of(verdict: str) -> str:
    """Return which of :data:`KINDS` a verdict or a failure's name is; what nobody here knows is ``unsure``."""
    if verdict in GOOD:
        return "ok"
    if verdict in WORSE:
        return "slow"
    if verdict in INFRASTRUCTURE:
        return "machine"
    if verdict in _UNSURE or verdict not in FAILURES:
        return "unsure"
    return "broken"


def short_id(*fields: str) -> str:
    """Return ten letters that stand for *fields* in a link, the same in every report."""
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()[:10]


@dataclass(frozen=True)
class Band:
    """The accepted value of a series, in its unit, and how far from it a figure may lie, as a share of it."""

    value: float
    width: float
    accepted_ns: int = 0
    reason: str = ""


@dataclass(frozen=True)
class ChangeMark:
    """A change point: indices into the nights of the bench; medians on both sides in the series' unit.

    ``size`` is relative, ``worse`` None where the metric has no direction; ``causes`` are what else changed there, and events.
    """

    index: int
    first: int
    last: int
    before: float
    after: float
    size: float
    worse: bool | None
    causes: tuple[str, ...] = ()


@dataclass(frozen=True)
class BenchmarkRow:
    """One metric of one bench. ``values`` has one entry for each of the bench's nights, None where it has no figure."""

    id: str
    metric: str
    unit: str
    better: str
    judged: bool
    values: tuple[float | None, ...]
    band: Band | None = None
    shifts: tuple[ChangeMark, ...] = ()
    change: float | None = (
        None  #: of the newest watched figure against the band's value, else the series' median
    )
    newest: float | None = None


@dataclass(frozen=True)
class BenchmarkNights:
    """One benchmark on one partition: its nights, oldest first, and its rows.

    ``watched`` says for each night whether it counts (``history.series.feeds``), ``changed`` what was different from the
    watched night before: index -> lines.
    """

    id: str
    key: SeriesKey  #: its metric is empty
    label: str
    nights: tuple[Night, ...]
    watched: tuple[bool, ...]
    rows: tuple[BenchmarkRow, ...] = ()
    changed: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    @property
    def definition(self) -> str:
        """What was computed in its newest night."""
        return self.nights[-1].definition

    @property
    def device_model(self) -> str:
        """On what, as the newest night says that knows it: broken runs do not."""
        return next((night.device_model for night in reversed(self.nights) if night.device_model), "")


@dataclass(frozen=True)
class SystemMark:
    """Something that was done to a system on purpose, such as a new driver; an empty partition means all."""

    at_ns: int
    system: str
    partition: str
    text: str


@dataclass(frozen=True)
class BenchmarkIssue:
    """A benchmark that needs a look: which, of what kind, and why."""

    bench: str
    kind: str
    verdict: str
    text: str


@dataclass(frozen=True)
class SystemNight:
    """The last night of a system. ``days`` counts kinds for each of the last nights: (date, counts in KINDS' order)."""

    system: str
    started_ns: int
    ended_ns: int
    counts: Mapping[str, int]
    troubles: tuple[BenchmarkIssue, ...]
    node_hours: float
    unfit: Mapping[str, str]
    stale: bool
    days: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Split:
    """Where the time of a bench's training epochs goes, each night with all figures: shares that sum to 1."""

    bench: str
    nights: tuple[int, ...]  #: indices into the bench's nights
    io: tuple[float, ...]
    compute: tuple[float, ...]
    communication: tuple[float, ...]
    communication_measured: bool  #: whether communication was measured; else it is part of compute


@dataclass(frozen=True)
class ScalePoint:
    """One scale of a scaling plot: the median of ``runs`` nights, its efficiency against the smallest scale."""

    devices: int
    value: float
    efficiency: float
    runs: int
    bench: str


@dataclass(frozen=True)
class MachineScales:
    """The scales of one machine."""

    machine: str
    steps: tuple[ScalePoint, ...]


@dataclass(frozen=True)
class Scaling:
    """One plot: work per time over devices. ``how`` is weak (the same batch on each device) or strong."""

    id: str
    label: str
    metric: str
    unit: str
    how: str
    curves: tuple[MachineScales, ...]


@dataclass(frozen=True)
class Host:
    """A node: what ran there, how fast it was against its peers, what vetting said.

    ``deviation`` is the median of (figure - level) / level over judged figures of runs on this node alone, positive when
    better, with the number of ``figures``; None where there were none. The level is that of its series at that time. ``days``: (date, kind).
    """

    system: str
    name: str
    runs: int
    failed: int
    last_ns: int
    deviation: float | None
    figures: int
    unfit: int
    reason: str
    reason_ns: int
    days: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Page:
    """All of it. ``morning`` is what `mlhpc status` says of the last night."""

    title: str
    made_ns: int
    since_ns: int
    source: str
    benches: tuple[BenchmarkNights, ...]
    systems: tuple[SystemNight, ...] = ()
    marks: tuple[SystemMark, ...] = ()
    splits: tuple[Split, ...] = ()
    scaling: tuple[Scaling, ...] = ()
    hosts: tuple[Host, ...] = ()
    notes: tuple[str, ...] = ()
    morning: tuple[MorningLine, ...] = ()
    links: Mapping[str, str] = field(
        default_factory=dict
    )  #: commit, job, pipeline -> address with {commit} ... in it


_NEEDED = ("epoch_time", "io_time")


def split_of(bench: BenchmarkNights) -> Split | None:
    """Return the shares of each watched night that has the figures, or None where no night has.

    Communication is reported for one step (``node/protocol/combine.py``), the epoch for all: its share is that of a median step
    (``exposed_communication_time / step_time``), never more than what I/O leaves. Compute is the rest.
    """
    figures = {row.metric: row.values for row in bench.rows}
    if not all(name in figures for name in _NEEDED):
        return None
    exposed, steps = figures.get("exposed_communication_time"), figures.get("step_time")
    nights, io, compute, communication = [], [], [], []
    communication_measured = False
    for place, counts in enumerate(bench.watched):
        epoch_s, io_s = figures["epoch_time"][place], figures["io_time"][place]
        if not counts or epoch_s is None or io_s is None or epoch_s <= 0 or io_s < 0:
            continue
        waits = min(io_s / epoch_s, 1.0)
        talks = 0.0
        exposed_s = exposed[place] if exposed else None
        step_s = steps[place] if steps else None
        if exposed_s is not None and step_s is not None and step_s > 0 and exposed_s >= 0:
            talks, communication_measured = min(exposed_s / step_s, 1.0 - waits), True
        nights.append(place)
        io.append(waits)
        communication.append(talks)
        compute.append(1.0 - waits - talks)
    if not nights:
        return None
    return Split(
        bench.id, tuple(nights), tuple(io), tuple(compute), tuple(communication), communication_measured
    )
