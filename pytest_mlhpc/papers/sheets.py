"""The tables of throughput as sheets: for a terminal, Markdown, LaTeX, CSV and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pytest_mlhpc.node.files import clean
from pytest_mlhpc.papers.throughput import EFFECTIVE, JOB, SOURCES, TABLES, Section, Tables, ThroughputLine
from pytest_mlhpc.report.figures import CONFIDENCE, Estimate
from pytest_mlhpc.store.text import (
    WIDTH,
    aligned,
    chopped,
    csv_text,
    escaped,
    figure,
    markdown_row,
    markdown_table,
    widest,
    wrapped,
)

#: What stands for a figure that is not known.
NONE: Final = "-"
_TITLES: Final = {
    "compute_throughput": "compute throughput [samples/s]: samples / (training epoch - I/O time)",
    "compute_fraction": "compute fraction: (training epoch - I/O time) / training epoch",
    "effective_throughput": "effective throughput [samples/s]: samples / training epoch",
}
#: Below this many runs there is no interval of that confidence (``report/figures.py``).
_FEWEST: Final = 6


@dataclass(frozen=True)
class SheetSection:
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
    blocks: tuple[SheetSection, ...]


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
            blocks.append(SheetSection(heading, ", ".join(section.apart), rows))
    return Sheet(metric, _TITLES[metric], (*headings, "runs"), tuple(blocks))


def _with_figure(section: Section, metric: str) -> list[ThroughputLine]:
    """Return the lines with that figure; none where only published ones have it."""
    lines = [
        line for line in section.lines
        if metric in line.figures or (metric == EFFECTIVE and line.per_device is not None)
    ]  # fmt: skip
    return lines if any(not line.source for line in lines) else []


def _row(
    line: ThroughputLine, metric: str, numbers: Mapping[str, int], *, rates: bool, joules: bool
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


def _chosen(workload: str, line: ThroughputLine) -> str:
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
    remark = [
        f"interval: holds the median in {100 * CONFIDENCE:.0f} of 100 cases from {_FEWEST} runs on; of fewer runs it is their range.",
    ]
    if any(line.energy_of == JOB for line in lines):
        remark.append(
            "/joule: samples by joule of the devices' own counters; with *, of the whole run as the scheduler"
            " accounts it, start and warm-up included. The two are not comparable."
        )
    elif any(line.efficiency for line in lines):
        remark.append("/joule: samples by joule of the devices' own counters.")
    return remark


def rows_of(tables: Tables) -> Iterator[tuple[Section, ThroughputLine, str]]:
    """Yield every figure that there is, as (section, line, table's metric)."""
    for metric in TABLES:
        for section in tables.sections:
            for line in _with_figure(section, metric):
                yield section, line, metric


def headings_of(sheet: Sheet) -> Sequence[str]:
    """Return the columns' names, the first being that of the systems."""
    return ("system", *sheet.headings[1:])


_CSV: Final = (
    "table", "unit", "parity", "workload", "parameters", "data_kind", "cache", "apart", "system", "source", "nodes", "devices",
    "median", "low", "high", "runs", "sure", "per_device", "per_node", "samples_per_joule", "energy_of", "chosen", "note",
)  # fmt: skip
#: What TeX would obey (Lamport, LaTeX, 2.2: the ten special characters), and the bracket that a tabular's `\\` would take for its own.
_TEX: Final = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "_": r"\_", "%": r"\%",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}", "[": "{[}",
    "|": r"\textbar{}", '"': "''",
}  # fmt: skip


def markdown_of(tables: Tables, head: Sequence[str]) -> str:
    """Return one table for each of the three, with a bold line above each section."""
    lines = [escaped(sentence) for sentence in [*head, *explained(tables)]]
    lines += ["", *(f"* {escaped(sentence)}" for sentence in common(tables))]
    for sheet in sheets(tables):
        lines += ["", f"### {escaped(sheet.title)}", ""]
        lines += markdown_table(headings_of(sheet), (), range(1, len(sheet.headings)))
        for block in sheet.blocks:
            apart = f" (apart from the first: {block.apart})" if block.apart else ""
            lines.append(f"| **{escaped(block.heading + apart)}** " + "| " * (len(sheet.headings) - 1) + "|")
            lines += [markdown_row(map(escaped, row)) for row in block.rows]
    for heading, remark in remarks(tables):
        lines += ["", f"{escaped(heading)}:", "", *(f"* {escaped(line)}" for line in remark)]
    return "".join(f"{line}\n" for line in lines)


def latex_of(tables: Tables, head: Sequence[str]) -> str:
    """Return one ``table`` environment for each of the three; needs no package. What stands below follows as a list."""
    lines = [f"% {_comment(sentence)}" for sentence in head]
    for sheet in sheets(tables):
        lines += _tabular(sheet)
    for heading, remark in [("parameters", common(tables)), *remarks(tables)]:
        if not remark:  # an empty list is an error to LaTeX
            continue
        lines += [rf"\noindent {_tex(heading)}:", r"\begin{itemize}"]
        lines += [rf"  \item {{}}{_tex(line)}" for line in remark]
        lines.append(r"\end{itemize}")
    return "".join(f"{line}\n" for line in lines)


def _tabular(sheet: Sheet) -> list[str]:
    many = len(sheet.headings)
    lines = [
        r"\begin{table}",
        r"\footnotesize\setlength{\tabcolsep}{3pt}",
        rf"\caption{{{_tex(sheet.title)}}}",
        rf"\begin{{tabular}}{{l{'r' * (many - 1)}}}",
        r"\hline",
    ]
    lines.append(_tex_row(headings_of(sheet)))
    for block in sheet.blocks:
        lines.append(r"\hline")
        parts = [block.heading, *([f"apart from the first: {block.apart}"] if block.apart else [])]
        # A section's terms are longer than any line of the table: a box of the text's width breaks them.
        lines += [
            rf"\multicolumn{{{many}}}{{p{{0.95\textwidth}}}}{{\textit{{{_tex(part)}}}}} \\" for part in parts
        ]
        lines += [_tex_row(row) for row in block.rows]
    return [*lines, r"\hline", r"\end{tabular}", r"\end{table}", ""]


def _tex_row(cells: Sequence[str]) -> str:
    return " & ".join(map(_tex, cells)) + r" \\"


def _tex(text: str) -> str:
    return "".join(_TEX.get(letter, letter) for letter in _comment(text))


def _comment(text: str) -> str:
    return clean(text).replace("\n", " ")


def csv_of(tables: Tables) -> str:
    """Return one line for each figure, under a line of headings."""
    rows = (
        {
            **_section(section, tables.parity),
            "table": metric,
            "unit": TABLES[metric],
            **_figures(line, metric),
        }
        for section, line, metric in rows_of(tables)
    )
    return csv_text(_CSV, ({name: _flat(value) for name, value in row.items()} for row in rows))


def _flat(value: Any) -> Any:
    if isinstance(value, dict):
        return " ".join(f"{name}={text}" for name, text in value.items())
    return ", ".join(value) if isinstance(value, list) else value


def data_of(tables: Tables, about: dict[str, Any]) -> dict[str, Any]:
    """Return it as one object for programs; *about* says what was asked for."""
    found: dict[str, list[dict[str, Any]]] = {metric: [] for metric in TABLES}
    for section, line, metric in rows_of(tables):
        found[metric].append({**_section(section, tables.parity), **_figures(line, metric)})
    refused = [
        {"workload": one.workload, "who": list(one.who), "why": one.why, "source": one.source or None}
        for one in tables.refused
    ]
    return {**about, "parity": tables.parity, "tables": found, "refused": refused}


def _section(section: Section, parity: str) -> dict[str, Any]:
    terms = section.terms
    return {
        "parity": parity,
        "workload": terms.workload,
        "parameters": dict(terms.fields),
        "data_kind": terms.data_kind,
        "cache": terms.cache,
        "apart": list(section.apart),
    }


def _figures(line: ThroughputLine, metric: str) -> dict[str, Any]:
    found = line.figures.get(metric)
    joules = line.efficiency if metric == EFFECTIVE else None
    return {
        "system": line.name,
        "source": line.source or None,
        "nodes": line.nodes,
        "devices": line.devices,
        "median": found.median if found else None,
        "low": found.low if found else None,
        "high": found.high if found else None,
        "runs": found.runs if found else 0,
        "sure": found.sure if found else None,
        "per_device": line.rate(metric, by="device"),
        "per_node": line.rate(metric, by="node"),
        "samples_per_joule": joules.median if joules else None,
        "energy_of": line.energy_of if joules else None,
        "chosen": dict(line.chosen),
        "note": line.note,
    }


#: A system's name has what the figures leave of a line, within these; longer ones are wrapped.
_LEAST, _MOST = 16, 40


def text_of(tables: Tables, head: Sequence[str]) -> str:
    """Return the tables, below the sentences *head*, and above what is not comparable and the sources."""
    lines = [line for sentence in [*head, *explained(tables)] for line in wrapped(sentence, "")]
    lines += [line for sentence in common(tables) for line in wrapped(sentence, "  ")]
    for sheet in sheets(tables):
        lines += ["", *wrapped(sheet.title, "  "), *_table(sheet)]
    for heading, remark in remarks(tables):
        lines += ["", f"{heading}:"]
        for line in remark:
            lines += [f"  {part}" for part in wrapped(line, "  ", WIDTH - 2)]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _table(sheet: Sheet) -> list[str]:
    rows = [row for block in sheet.blocks for row in block.rows]
    figures = [widest(row[at] for row in [sheet.headings, *rows]) for at in range(1, len(sheet.headings))]
    most = min(_MOST, max(_LEAST, WIDTH - 2 - sum(width + 2 for width in figures)))
    widths = [2 + widest(part for row in rows for part in chopped(row[0], most)), *figures]

    def line(cells: Sequence[str]) -> list[str]:
        *before, last = chopped(cells[0], most)
        shown = [[f"  {last}"], *([cell] for cell in cells[1:])]
        return [*(f"  {part}" for part in before), *aligned([shown], range(1, len(cells)), widths)]

    lines = line(sheet.headings)
    for block in sheet.blocks:
        lines += ["", *wrapped(block.heading, "  ")]
        lines += wrapped(f"  apart from the first: {block.apart}", "    ") if block.apart else []
        lines += [part for row in block.rows for part in line(row)]
    return lines
