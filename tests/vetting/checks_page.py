"""The tables of docs/vetting-checks.md, made of the checks, bounds, floors and loads themselves.

``python tests/vetting/checks_page.py docs/vetting-checks.md`` writes the table of loads anew between its markers
``<!-- loads -->`` and ``<!-- end -->``, and the files beside the page that it shows. What stands outside is written by hand and
stays.
"""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from pytest_mlhpc.node.vet.check import Check, LoadWatch
from pytest_mlhpc.node.vet.checks import all_checks
from pytest_mlhpc.node.vet.policy import Bound, built_in, floors
from pytest_mlhpc.node.vet.workers import PAIR_S, WORKS
from pytest_mlhpc.store.text import quantity

_MARKED = re.compile(r"(<!-- loads -->\n).*?(<!-- end -->)", re.DOTALL)


def completed(page: str) -> str:
    """Return a page with its table of loads made anew."""
    return _MARKED.sub(lambda match: f"{match[1]}{loads()}{match[2]}", page)


def loads() -> str:
    """Return a table of all loads, in Markdown."""
    rows = [
        [
            f"`{one.name}`",
            one.level + (", `--for job`" if one.purpose else ""),
            f"{one.quick_s:g}",
            f"{one.deep_s:g}",
        ]
        for one in WORKS
    ]
    rows.append(["`pairs`", "quick", f"{PAIR_S['quick']:g} a round", f"{PAIR_S['deep']:g} a round"])
    lines = ["| load | from | seconds, quick | seconds, deep |", "|---|---|---|---|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def bounds() -> str:
    """Return a table of all bounds: key, what is counted, both stages, where they are from."""
    head = ["rule", "what is counted", "warning from", "unfit from", "source"]
    found = sorted(built_in().bounds.values(), key=lambda bound: bound.key)
    return _csv(
        head,
        ([one.key, one.meaning, _stage(one, one.warn), _stage(one, one.fail), one.source] for one in found),
    )


def checks() -> str:
    """Return a table of all checks: when each runs, the seconds it usually takes, what it does and reads."""
    head = ["check", "when", "seconds", "what it does", "what it reads"]
    plain, watches = all_checks()
    known: list[tuple[Check | LoadWatch, str]] = [(one, one.level) for one in plain]
    known += [(one, f"{one.level}, under load") for one in watches]
    rows = ([one.name, when, f"{one.cost_s:g}", one.what, ", ".join(one.reads)] for one, when in known)
    return _csv(head, sorted(rows))


def lowest() -> str:
    """Return a table of all floors, each with its source."""
    head = ["device", "figure", "floor", "confidence", "source"]
    return _csv(
        head,
        (
            [one.hardware, one.name, quantity(one.fail, one.unit), one.confidence, one.source]
            for one in floors()
        ),
    )


#: What is shown by a page beside which it lies.
FILES: Mapping[str, Callable[[], str]] = {
    "vetting-bounds.csv": bounds,
    "vetting-checks.csv": checks,
    "vetting-floors.csv": lowest,
}


def _csv(head: list[str], rows: Iterable[list[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([head, *rows])
    return text.getvalue()


def _stage(bound: Bound, stage: float | None) -> str:
    if stage is None:
        return "-"
    comparison = "<=" if bound.better == "higher" else ""
    return f"{comparison}{quantity(stage, bound.unit)}".strip()


def main(page: Path) -> None:
    """Write the tables of *page*, and its files."""
    page.write_text(completed(page.read_text()))
    for name, table in FILES.items():
        page.with_name(name).write_text(table())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
