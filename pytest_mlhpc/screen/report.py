"""Findings of a screening as ten lines of text and as one file with the curves behind them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from operator import itemgetter
from typing import Any, TypeVar

from pytest_mlhpc.node.telemetry.samples import DeviceSample, ProcessSample, Sample
from pytest_mlhpc.report.html import page
from pytest_mlhpc.screen.hook_output import TrainingTrace
from pytest_mlhpc.screen.limits import ProgramEvidence, ProgramFinding
from pytest_mlhpc.screen.usage import many, percent, seconds_text

#: Most curves of one chart, and points of one curve: more cannot be distinguished.
MOST_CURVES, MOST_POINTS = 16, 2000

Values = tuple[float | None, ...]
_Curves = dict[str, dict[float, float]]  # name -> time -> value
_Found = tuple[str, str, _Curves]  # title, unit
GIB, MHZ = 1 << 30, 1e6


@dataclass(frozen=True)
class Chart:
    """One chart: seconds since the first look of all, and for each curve a name and as many values (None: not known).

    The first and the last time are those of the whole page: there its sampling begins and ends, whatever this chart has to show.
    """

    title: str
    unit: str
    times: tuple[float, ...]
    curves: tuple[tuple[str, Values], ...]


One = TypeVar("One")


def charts(samples: Sequence[Sample], trace: Sequence[TrainingTrace]) -> tuple[Chart, ...]:
    """Return the charts that have something to show, all over the same time. All samples' times are of one clock."""
    if not samples:
        return ()
    begin = min(sample.time_s for sample in samples)
    made = [*_steps(trace, samples, begin), *_processes(samples, begin), *_devices(samples, begin)]
    shown = [(title, unit, curves) for title, unit, curves in made if any(curves.values())]
    times = [sample.time_s - begin for sample in samples]
    times += [time for _, _, curves in shown for curve in curves.values() for time in curve]
    return tuple(_aligned(title, unit, curves, (min(times), max(times))) for title, unit, curves in shown)


def _steps(trace: Sequence[TrainingTrace], samples: Sequence[Sample], begin: float) -> list[_Found]:
    hosts = {sample.node.host for sample in samples}
    steps: _Curves = {}
    waits: _Curves = {}
    for place, one in enumerate(trace[:MOST_CURVES]):
        name = f"rank {place if one.rank is None else one.rank}"
        zero = begin if one.host in hosts else one.ends[0] if one.ends else 0.0  # another node's clock
        for before, after, wait in zip(one.ends, one.ends[1:], one.waits[1:], strict=False):
            steps.setdefault(name, {})[after - zero] = after - before
            waits.setdefault(name, {})[after - zero] = wait
    return [("Time of a step", "s", steps), ("Wait for data in a step", "s", waits)]


def _processes(samples: Sequence[Sample], begin: float) -> list[_Found]:
    names = _names(samples)
    cores: _Curves = {}
    for host in {sample.node.host: None for sample in samples}:
        of_host = [sample for sample in samples if sample.node.host == host]
        for before, after in pairwise(of_host):
            old = {(one.pid, one.start_ticks): one for one in before.processes}
            for one in after.processes:
                name, evidence = names.get((host, one.pid)), old.get((one.pid, one.start_ticks))
                if name is not None and evidence is not None:
                    used = max(0.0, one.cpu_s - evidence.cpu_s) / max(after.time_s - before.time_s, 1e-9)
                    cores.setdefault(name, {})[after.time_s - begin] = used
    memory = _levels(samples, begin, lambda sample: sample.processes, lambda one, host: names.get((host, one.pid)),
                     lambda one: one.rss_bytes / GIB)  # fmt: skip
    return [("Cores busy", "cores", cores), ("Memory of processes", "GiB", memory)]


def _names(samples: Sequence[Sample]) -> dict[tuple[str, int], str]:
    """Name the processes that used most CPU time."""
    last: dict[tuple[str, int], ProcessSample] = {}
    for sample in samples:
        for one in sample.processes:
            last[sample.node.host, one.pid] = one
    most = sorted(last, key=lambda key: -last[key].cpu_s)[:MOST_CURVES]
    several = len({host for host, _ in last}) > 1
    return {
        (host, pid): " ".join(
            [
                *([host] if several else []),
                last[host, pid].name,
                str(pid),
                *([] if last[host, pid].rank is None else [f"(rank {last[host, pid].rank})"]),
            ]
        )
        for host, pid in most
    }


def _devices(samples: Sequence[Sample], begin: float) -> list[_Found]:
    kinds: tuple[tuple[str, str, Callable[[DeviceSample], float | None]], ...] = (
        ("Time in which a kernel ran", "%", lambda one: None if one.busy is None else 100 * one.busy),
        ("Power", "W", lambda one: one.power_w),
        ("Temperature", "C", lambda one: one.celsius),
        ("Clock", "MHz", lambda one: None if one.clock_hz is None else one.clock_hz / MHZ),
        (
            "Device memory",
            "GiB",
            lambda one: None if one.memory_used_bytes is None else one.memory_used_bytes / GIB,
        ),
    )
    return [
        (
            title,
            unit,
            _levels(
                samples, begin, lambda sample: sample.devices, lambda one, host: f"{host} {one.index}", value
            ),
        )
        for title, unit, value in kinds
    ]


def _levels(
    samples: Sequence[Sample],
    begin: float,
    ones: Callable[[Sample], Iterable[One]],
    name: Callable[[One, str], str | None],
    value: Callable[[One], float | None],
) -> _Curves:
    found: _Curves = {}
    for sample in samples:
        for one in ones(sample):
            called, level = name(one, sample.node.host), value(one)
            if called is not None and level is not None:
                found.setdefault(called, {})[sample.time_s - begin] = level
    return found


def _aligned(title: str, unit: str, found: _Curves, ends: tuple[float, float]) -> Chart:
    """Return a chart in which all curves share one axis of times; what one has no value for is None."""
    curves = {name: _thinned(found[name]) for name in list(found)[:MOST_CURVES]}
    times = sorted({*ends, *(time for curve in curves.values() for time in curve)})
    return Chart(
        title,
        unit,
        tuple(times),
        tuple((name, tuple(curve.get(time) for time in times)) for name, curve in curves.items()),
    )


def _thinned(curve: dict[float, float]) -> dict[float, float]:
    """Return at most so many points, each the highest of its neighbours: one slow step is what a reader wants to find."""
    points = list(curve.items())
    each = -(-len(points) // MOST_POINTS)
    return dict(max(points[at : at + each], key=itemgetter(1)) for at in range(0, len(points), each or 1))


_REPORT, _OWN = "pytest_mlhpc.report.html", "pytest_mlhpc.screen"
_ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def html_of(lines: Sequence[str], charts: Iterable[Chart]) -> str:
    """Return the file's text, which is ASCII; *lines* are those of the report, its first the heading."""
    evidence = {
        "title": escape(lines[0]),
        "lines": "\n".join(f"<li>{escape(line)}</li>" for line in lines[1:]),
    }
    body = page.filled(page.read(_OWN, "parts/curves.html"), evidence)
    styles = (page.read(_REPORT, "parts/page.css"), page.read(_OWN, "parts/curves.css"))
    scripts = (page.read(_REPORT, "parts/dom.js"), page.read(_OWN, "parts/curves.js"))
    return page.document_of(lines[0], body, styles, scripts, encode(charts))


def encode(charts: Iterable[Chart]) -> str:
    """Return the charts as JSON that may stand inside of HTML."""
    content: list[dict[str, Any]] = [
        {
            "title": chart.title,
            "unit": chart.unit,
            "times": [round(time, 3) for time in chart.times],
            "names": [name for name, _ in chart.curves],
            "curves": [
                [None if value is None else float(f"{value:.5g}") for value in values]
                for _, values in chart.curves
            ],
        }
        for chart in charts
    ]
    return json.dumps(content, allow_nan=False, separators=(",", ":")).translate(_ESCAPES)


#: Lines in all, the first and the last included.
LINES = 10


def report_lines(
    what: str, evidence: ProgramEvidence, findings: Sequence[ProgramFinding], missing: Sequence[str]
) -> list[str]:
    """Return the report: what was observed; what limits it, the largest share first; what could not be read."""
    trace = [_line(number, one) for number, one in enumerate(findings[: LINES - 2], 1)]
    if not trace:
        trace = ["nothing stands out: no share of the time above 10 % could be laid on any one thing"]
    last = [f"not seen: {'; '.join(missing)}"] if missing else []
    return [f"screened {_scale(what, evidence)}", *trace, *last]


def report_data(
    what: str, evidence: ProgramEvidence | None, findings: Sequence[ProgramFinding], missing: Sequence[str]
) -> dict[str, Any]:
    """Return the report for programs; times are in seconds, shares of 1. Without *evidence*, nothing was found out."""
    steps = _step_times(evidence) if evidence else []
    return {
        "what": what,
        "seconds": evidence.seconds if evidence else 0.0,
        "ranks": len(evidence.ranks) if evidence else 0,
        "nodes": len(evidence.nodes) if evidence else 0,
        "devices": [one.model for one in evidence.devices] if evidence else [],
        "step_s": sum(steps) / len(steps) if steps else None,
        "looking": _cost(evidence) if evidence else 0.0,
        "findings": [vars(one) for one in findings],
        "not_seen": list(missing),
    }


def _step_times(evidence: ProgramEvidence) -> list[float]:
    return [step for rank in evidence.ranks if rank.trace is not None for step, _ in rank.trace.steps()]


def _cost(evidence: ProgramEvidence) -> float:
    """Return what looking took, of one core."""
    return max((node.cost for node in evidence.nodes), default=0.0)


def _scale(what: str, evidence: ProgramEvidence) -> str:
    summary = [many(len(evidence.ranks), "rank"), "on", many(len(evidence.nodes), "node")]
    steps = _step_times(evidence)
    text = f"{what} for {seconds_text(evidence.seconds)}: {' '.join(summary)}"
    if evidence.devices:
        text += f", {len(evidence.devices)} x {evidence.devices[0].model}"
    if steps:
        text += f", {seconds_text(sum(steps) / len(steps))} a step"
    return f"{text}; screening took {100 * _cost(evidence):.1f} % of a core"


def _line(number: int, finding: ProgramFinding) -> str:
    sure = "" if finding.certain else " (seen from outside)"
    share = f" {percent(finding.share)}" if finding.share >= 0.005 else ""
    advice = f" -> {finding.advice}" if finding.advice else ""
    return f"{number}. {finding.kind}{share}{sure}: {finding.text}{advice}"
