"""The tables of throughput for papers and programs: Markdown, LaTeX, CSV, JSON. Names obey nothing that opens them."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any, Final

from pytest_mlhpc.papers.sheets import Sheet, common, explained, headings_of, remarks, rows_of, sheets
from pytest_mlhpc.papers.throughput import EFFECTIVE, TABLES, Line, Section, Tables
from pytest_mlhpc.report.compare_files import escaped, plain
from pytest_mlhpc.store.text import clean

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
        lines += ["", f"### {escaped(sheet.title)}", "", _row(headings_of(sheet))]
        lines.append("|---" + "|---:" * (len(sheet.headings) - 1) + "|")
        for block in sheet.blocks:
            apart = f" (apart from the first: {block.apart})" if block.apart else ""
            lines.append(f"| **{escaped(block.heading + apart)}** " + "| " * (len(sheet.headings) - 1) + "|")
            lines += [_row(row) for row in block.rows]
    for heading, told in remarks(tables):
        lines += ["", f"{escaped(heading)}:", "", *(f"* {escaped(line)}" for line in told)]
    return "".join(f"{line}\n" for line in lines)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(escaped, cells))} |"


def latex_of(tables: Tables, head: Sequence[str]) -> str:
    """Return one ``table`` environment for each of the three; needs no package. What stands below follows as a list."""
    lines = [f"% {_comment(sentence)}" for sentence in head]
    for sheet in sheets(tables):
        lines += _tabular(sheet)
    for heading, told in [("parameters", common(tables)), *remarks(tables)]:
        if not told:  # an empty list is an error to LaTeX
            continue
        lines += [rf"\noindent {_tex(heading)}:", r"\begin{itemize}"]
        lines += [rf"  \item {{}}{_tex(line)}" for line in told]
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
    out = io.StringIO()
    writer = csv.DictWriter(out, _CSV, lineterminator="\n")
    writer.writeheader()
    for section, line, metric in rows_of(tables):
        values = {
            **_section(section, tables.parity),
            "table": metric,
            "unit": TABLES[metric],
            **_figures(line, metric),
        }
        flat = {name: _flat(value) for name, value in values.items()}
        writer.writerow({name: plain(value) for name, value in flat.items() if value not in (None, "")})
    return out.getvalue()


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


def _figures(line: Line, metric: str) -> dict[str, Any]:
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
