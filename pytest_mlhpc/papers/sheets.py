"""The tables of throughput as sheets of words, the same for text, Markdown and LaTeX. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pytest_mlhpc.papers.published import SOURCES
from pytest_mlhpc.papers.throughput import EFFECTIVE, JOB, TABLES, Line, Section, Tables
from pytest_mlhpc.report.intervals import CONFIDENCE, Estimate
from pytest_mlhpc.store.text import figure

#: What stands for a figure that is not known.
NONE: Final = "-"
_TITLES: Final = {
    "compute_throughput": "compute throughput [samples/s]: samples / (training epoch - I/O time)",
    "compute_fraction": "compute fraction: (training epoch - I/O time) / training epoch",
    "effective_throughput": "effective throughput [samples/s]: samples / training epoch",
}
#: Below this many runs there is no interval of that confidence (``report/intervals.py``).
_FEWEST: Final = 6


@dataclass(frozen=True)
class Block:
    """One section of a sheet: its lines are comparable. ``apart``: why they are not with those of the first."""

    heading: str
    apart: str
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Sheet:
    """One of the three tables."""

    metric: str
    title: str
    headings: tuple[str, ...]
    blocks: tuple[Block, ...]


def sheets(tables: Tables) -> tuple[Sheet, ...]:
    """Return the tables that have any figure."""
    numbers = {name: number for number, name in enumerate(tables.sources, 1)}
    found = (_sheet(tables, metric, numbers) for metric in TABLES)
    return tuple(sheet for sheet in found if sheet.blocks)


def _sheet(tables: Tables, metric: str, numbers: Mapping[str, int]) -> Sheet:
    rates = TABLES[metric] != "1"
    known = [(section, _with_figure(section, metric)) for section in tables.sections]
    joules = metric == EFFECTIVE and any(line.efficiency for _, lines in known for line in lines)
    headings = ["", "nodes", "devices", "median", "interval"]
    headings += ["/device", "/node"] if rates else []
    headings += ["/joule"] if joules else []
    blocks = []
    for section, lines in known:
        if lines:
            rows = tuple(_row(line, metric, numbers, rates=rates, joules=joules) for line in lines)
            heading = section.terms.without(tables.shared[section.terms.workload])
            blocks.append(Block(heading, ", ".join(section.apart), rows))
    return Sheet(metric, _TITLES[metric], (*headings, "runs"), tuple(blocks))


def _with_figure(section: Section, metric: str) -> list[Line]:
    """Return the lines with that figure; none where only published ones have it."""
    lines = [
        line for line in section.lines
        if metric in line.figures or (metric == EFFECTIVE and line.per_device is not None)
    ]  # fmt: skip
    return lines if any(not line.source for line in lines) else []


def _row(
    line: Line, metric: str, numbers: Mapping[str, int], *, rates: bool, joules: bool
) -> tuple[str, ...]:
    found = line.figures.get(metric)
    name = f"{line.name} [{numbers[line.source]}]" if line.source else line.name
    cells = [
        name,
        _count(line.nodes),
        _count(line.devices),
        figure(found.median) if found else NONE,
        "published" if line.source else interval(found),
    ]
    if rates:
        cells += [_rate(line.rate(metric, by="device")), _rate(line.rate(metric, by="node"))]
    if joules:
        mark = "*" if line.energy_of == JOB else ""
        cells.append(f"{figure(line.efficiency.median)}{mark}" if line.efficiency else NONE)
    return (*cells, str(found.runs) if found and found.runs else NONE)


def interval(found: Estimate | None) -> str:
    """Return the interval as people write it."""
    if found is None or found.low is None or found.high is None or found.runs < 2:
        return NONE
    return f"[{figure(found.low)}, {figure(found.high)}]"


def _rate(value: float | None) -> str:
    return NONE if value is None else figure(value)


def _count(value: int | None) -> str:
    return NONE if value is None else str(value)


def common(tables: Tables) -> list[str]:
    """Return what all sections of each workload have in common."""
    return [
        f"all of {workload}: {' '.join(f'{name}={value}' for name, value in fields.items())}"
        for workload, fields in tables.shared.items()
        if fields
    ]


def remarks(tables: Tables) -> Iterator[tuple[str, list[str]]]:
    """Yield what stands below the tables: a heading, and its lines."""
    lines = [(section.terms.workload, line) for section in tables.sections for line in section.lines]
    if chosen := [_chosen(workload, line) for workload, line in lines if line.chosen]:
        yield "settings of each at its best", chosen
    if refused := list(_refused(tables)):
        yield "not comparable, or not there", refused
    numbers = {name: number for number, name in enumerate(tables.sources, 1)}
    sources = [f"[{number}] {SOURCES.get(name, name)}" for name, number in numbers.items()]
    odd = [
        f"[{numbers[line.source]}] {line.name}, {workload}: {line.note}"
        for workload, line in lines
        if line.note
    ]
    if sources:
        yield "published figures are from", [*sources, *dict.fromkeys(odd)]


def _chosen(workload: str, line: Line) -> str:
    settings = " ".join(f"{name}={value}" for name, value in line.chosen.items())
    many = f" (best of {line.tried} settings)" if line.tried > 1 else ""
    scale = f"{line.devices} device{'s' if line.devices != 1 else ''}"
    return f"{line.name}, {workload} on {scale}: {settings}{many}"


def _refused(tables: Tables) -> Iterator[str]:
    numbers = {name: number for number, name in enumerate(tables.sources, 1)}
    for one in tables.refused:
        who = ", ".join(one.who)
        source = f" [{numbers[one.source]}]" if one.source else ""
        # Names of published systems hold commas themselves.
        yield f"{one.workload}: {'; '.join(one.who) if source else who}{source}: {one.why}"


def explained(tables: Tables) -> list[str]:
    """Return what a reader has to know of the columns."""
    lines = [line for section in tables.sections for line in section.lines]
    told = [
        f"interval: holds the median in {100 * CONFIDENCE:.0f} of 100 cases from {_FEWEST} runs on; of fewer runs it is their range.",
    ]
    if any(line.energy_of == JOB for line in lines):
        told.append(
            "/joule: samples by joule of the devices' own counters; with *, of the whole run as the scheduler"
            " accounts it, start and warm-up included. The two are not comparable."
        )
    elif any(line.efficiency for line in lines):
        told.append("/joule: samples by joule of the devices' own counters.")
    return told


def rows_of(tables: Tables) -> Iterator[tuple[Section, Line, str]]:
    """Yield every figure that there is, as (section, line, table's metric)."""
    for metric in TABLES:
        for section in tables.sections:
            for line in _with_figure(section, metric):
                yield section, line, metric


def headings_of(sheet: Sheet) -> Sequence[str]:
    """Return the columns' names, the first being that of the systems."""
    return ("system", *sheet.headings[1:])
