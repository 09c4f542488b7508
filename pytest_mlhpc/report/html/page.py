"""What the report shows, as plain data, and the one file of it: head, style, scripts, and the content as JSON safe inside HTML."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from typing import Any
from urllib.parse import urlencode

from pytest_mlhpc.history.series import Night
from pytest_mlhpc.report.morning import MorningLine, NodeOut, Place, as_html
from pytest_mlhpc.store.record import FAILURES, GOOD, INFRASTRUCTURE, WORSE, SeriesKey

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
    #: of the newest watched figure against the band's value, else the series' median
    change: float | None = None
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
    #: commit, job, pipeline -> address with {commit} ... in it
    links: Mapping[str, str] = field(default_factory=dict)


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


_UPLOT = "vendor/uplot"


def document_of(title: str, body: str, styles: Sequence[str], scripts: Sequence[str], content: str) -> str:
    """Return the file's text. Its encoding is ASCII, so that it reads the same whatever a server says of it.

    Args:
        title: as it is, of whatever origin.
        body: HTML of what is visible, the texts of its *styles*, and of its *scripts*, which become one.
        styles: in the order in which they count, after uPlot's.
        scripts: in the order in which they are read.
        content: JSON that may stand inside of HTML.
    """
    uplot = read(__package__, f"{_UPLOT}/uPlot.iife.min.js")
    script = "\n".join(["(() => {", '"use strict";', *scripts, "})();"])
    style = "\n".join([read(__package__, f"{_UPLOT}/uPlot.min.css"), *styles])
    licence = "".join(f"\n  {line}".rstrip() for line in read(__package__, f"{_UPLOT}/LICENSE").splitlines())
    values = {
        "policy": f"default-src 'none'; script-src {_digest(uplot)} {_digest(script)}; style-src {_digest(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'",
        "title": escape(title),
        "style": style,
        "body": body,
        "content": content,
        "licence": licence.replace("--", "- -"),
        "uplot": uplot,
        "script": script,
    }
    text = filled(read(__package__, "parts/document.html"), values)
    return text.encode("ascii", "xmlcharrefreplace").decode("ascii")


def filled(text: str, values: Mapping[str, str]) -> str:
    """Return *text* with *values* in place of its marks, ``@@name@@``; what is filled in may hold the marks of others."""
    return "".join(values[part] if place % 2 else part for place, part in enumerate(text.split("@@")))


def read(package: str | None, name: str) -> str:
    """Return the text of a package's file.

    Raises:
        ValueError: a style or script holds letters that are not ASCII.
    """
    text = resources.files(package or "").joinpath(name).read_text(encoding="utf-8")
    if not name.endswith(".html") and not text.isascii():
        raise ValueError(f"{name} holds letters that are not ASCII; write them as escapes")
    return text


def _digest(text: str) -> str:
    """Return the source expression of CSP for an inline element with this text (Content Security Policy 3, 2.3.1)."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


#: Digits of a figure; more are noise in a chart of a few hundred pixels.
DIGITS = 6
_ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def encode(page: Page) -> str:
    """Return the JSON text of *page*."""
    texts = _Texts()
    content = {
        "title": page.title,
        "made": _seconds(page.made_ns),
        "since": _seconds(page.since_ns),
        "source": page.source,
        "links": dict(page.links),
        "kinds": KINDS,
        "benches": [_bench(bench, texts) for bench in page.benches],
        "systems": [
            {
                "name": one.system, "began": _seconds(one.started_ns), "ended": _seconds(one.ended_ns),
                "counts": dict(one.counts), "hours": round(one.node_hours, 3), "stale": one.stale,
                "unfit": sorted(one.unfit.items()),
                "troubles": [[trouble.bench, trouble.kind, trouble.verdict, trouble.text] for trouble in one.troubles],
                "days": [[date, *counts] for date, counts in one.days],
            }
            for one in page.systems
        ],
        "marks": [[_seconds(mark.at_ns), mark.system, mark.partition, mark.text] for mark in page.marks],
        "splits": [
            {
                "bench": one.bench, "at": _steps(one.nights), "told": one.communication_measured,
                "io": [_share(share) for share in one.io], "talk": [_share(share) for share in one.communication],
            }
            for one in page.splits
        ],
        "scaling": [
            {
                "id": one.id, "label": one.label, "metric": one.metric, "unit": one.unit, "how": one.how,
                "curves": [
                    [curve.machine, [[s.devices, _figure(s.value), round(s.efficiency, 4), s.runs, s.bench] for s in curve.steps]]
                    for curve in one.curves
                ],
            }
            for one in page.scaling
        ],
        "hosts": [
            {
                "system": one.system, "name": one.name, "runs": one.runs, "failed": one.failed,
                "last": _seconds(one.last_ns), "figures": one.figures, "unfit": one.unfit, "reason": one.reason,
                "reasonAt": _seconds(one.reason_ns), "days": one.days,
                "deviation": None if one.deviation is None else round(one.deviation, 5),
            }
            for one in page.hosts
        ],
        "notes": page.notes,
    }  # fmt: skip
    content["texts"] = texts.all()
    return json.dumps(content, separators=(",", ":"), allow_nan=False).translate(_ESCAPES)


class _Texts:
    """Texts that many nights share, each once: nodes, commits, verdicts."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}

    def place(self, text: str) -> int:
        """Return where *text* stands."""
        return self._places.setdefault(text, len(self._places))

    def all(self) -> list[str]:
        """Return them in order."""
        return list(self._places)


def _bench(bench: BenchmarkNights, texts: _Texts) -> dict[str, Any]:
    key, nights = bench.key, bench.nights
    return {
        "id": bench.id, "label": bench.label, "benchmark": key.benchmark, "system": key.system,
        "partition": key.partition, "environment": key.environment, "device": bench.device_model,
        "fingerprint": key.fingerprint, "definition": bench.definition,
        "at": _steps(_seconds(night.created_ns) for night in nights),
        "watched": _runs(bench.watched),
        "verdict": [texts.place(night.verdict) for night in nights],
        "kind": "".join(str(KINDS.index(kind_of(night.verdict))) for night in nights),
        "nodes": [texts.place(" ".join(night.nodes)) for night in nights],
        "commit": [texts.place(night.commit) for night in nights],
        "job": [texts.place(night.job_id) for night in nights],
        "pipeline": [texts.place(night.pipeline) for night in nights],
        "owner": nights[-1].owner,
        "failure": [[place, night.failure[:500]] for place, night in enumerate(nights) if night.failure],
        "more": [[place, _more(night)] for place, night in enumerate(nights) if _more(night)],
        "changed": [[place, list(lines)] for place, lines in sorted(bench.changed.items())],
        "test": nights[-1].node_id,
        "rows": [_row(row) for row in bench.rows],
    }  # fmt: skip


def _more(night: Night) -> str:
    """Return what is not as usual of a night: no first attempt, not nightly, a branch of its own."""
    remarks = [f"re-run {night.attempt}"] if night.attempt else []
    if night.purpose not in {"", "nightly"}:
        remarks.append(night.purpose)
    if night.branch not in {"", "main"}:
        remarks.append(f"branch {night.branch}")
    return ", ".join(remarks)


def _row(row: BenchmarkRow) -> dict[str, Any]:
    band = row.band
    return {
        "id": row.id, "metric": row.metric, "unit": row.unit, "better": row.better, "judged": row.judged,
        "values": [None if value is None else _figure(value) for value in row.values],
        "band": None if band is None else [_figure(band.value), round(band.width, 5), _seconds(band.accepted_ns), band.reason],
        "shifts": [
            [one.index, one.first, one.last, _figure(one.before), _figure(one.after), _share(one.size), one.worse, one.causes]
            for one in row.shifts
        ],
        "change": None if row.change is None else round(row.change, 5),
        "newest": None if row.newest is None else _figure(row.newest),
    }  # fmt: skip


def _seconds(moment_ns: int) -> int:
    return moment_ns // 1_000_000_000


def _figure(value: float) -> float | int | None:
    """Return *value* to six digits, as an integer where it is one: shorter in the file, the same in the script."""
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.{DIGITS}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def _share(value: float) -> float | None:
    return round(value, 5) if math.isfinite(value) else None


def _steps(values: Iterable[int]) -> list[int]:
    """Return the first value, and the difference of each other to the one before."""
    before, found = 0, []
    for value in values:
        found.append(value - before)
        before = value
    return found


def _runs(flags: Sequence[bool]) -> list[int]:
    """Return how many are false, then true, then false ... at a stretch."""
    found, state = [0], False
    for flag in flags:
        if flag != state:
            found.append(0)
            state = flag
        found[-1] += 1
    return found


#: In the order in which they are read; all are one script.
SCRIPTS = (
    "dom.js", "data.js", "format.js", "tooltip.js", "chart.js", "row.js", "benchmarks.js", "list.js", "overview.js", "bars.js",
    "split.js", "scaling.js", "overlay.js", "hosts.js", "route.js", "main.js",
)  # fmt: skip
STYLES = ("page.css", "rows.css", "views.css")


def html_of(page: Page) -> str:
    """Return the file's text, which is ASCII."""
    body = filled(_read("page.html"), {"title": escape(page.title), "morning": _morning(page)})
    return document_of(page.title, body, list(map(_read, STYLES)), list(map(_read, SCRIPTS)), encode(page))


def _morning(page: Page) -> str:
    """Return the lines of the last night, with links to what is on the page."""
    if not page.morning:
        return ""
    ids = {bench.key: bench.id for bench in page.benches}

    def address(target: Place) -> str:
        if isinstance(target, NodeOut):
            return f"#{urlencode({'view': 'nodes', 'q': target.node, 'system': target.system})}"
        if target in ids:
            return f"#{urlencode({'view': 'benchmarks', 'bench': ids[target]})}"
        return "" if target.benchmark else f"#{urlencode({'view': 'benchmarks', 'system': target.system})}"

    return f'<section id="morning" aria-label="Last night">\n{as_html(page.morning, address)}\n</section>\n'


def _read(name: str) -> str:
    return read(__package__, f"parts/{name}")
