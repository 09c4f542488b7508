"""The lists of docs/vetting-checks.md and its file of bounds, made of the checks, bounds and loads themselves.

``python tests/vetting/checks_page.py docs/vetting-checks.md`` writes lists anew between their markers, such as
``<!-- checks: edac pci -->`` and ``<!-- end -->``, and vetting-bounds.csv beside the page. What stands outside is written by hand
and stays. Without a file it prints what each check reads, and the source of each floor.
"""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from pytest_mlhpc.node.vet.check import Check, LoadWatch
from pytest_mlhpc.node.vet.checks import all_checks
from pytest_mlhpc.node.vet.policy import Bound, built_in, floors
from pytest_mlhpc.node.vet.workers import PAIR_S, WORKS
from pytest_mlhpc.store.text import quantity

_MARKED = re.compile(r"(<!-- (checks|loads)(?:: ([^>]*?))? -->\n).*?(<!-- end -->)", re.DOTALL)


def completed(page: str) -> str:
    """Return a page with all its tables made anew.

    Raises:
        KeyError: a marker names a check that does not exist.
    """

    def table(match: re.Match[str]) -> str:
        begin, kind, names, end = match[1], match[2], (match[3] or "").split(), match[4]
        return f"{begin}{_TABLES[kind](names)}{end}"

    return _MARKED.sub(table, page)


def named(page: str, kind: str) -> list[str]:
    """Return the names in all markers of a kind, in order."""
    return [name for match in _MARKED.finditer(page) if match[2] == kind for name in (match[3] or "").split()]


def _table(head: str, rows: Iterable[Iterable[str]]) -> str:
    lines = [head, re.sub(r"[^|]+", "---", head)]
    lines += ["| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _known() -> dict[str, tuple[Check | LoadWatch, str]]:
    """Return each check by name, and when it runs."""
    checks, watches = all_checks()
    known: dict[str, tuple[Check | LoadWatch, str]] = {one.name: (one, one.level) for one in checks}
    known.update({one.name: (one, f"{one.level}, under load") for one in watches})
    return known


def _checks(names: list[str]) -> str:
    known = _known()
    times: dict[str, list[str]] = {}
    for name in names:
        times.setdefault(known[name][1], []).append(f"`{name}` {known[name][0].cost_s:g} s")
    return "; ".join(f"{when}: {', '.join(shown)}" for when, shown in times.items()) + ".\n"


def bounds() -> str:
    """Return a table of all bounds as CSV: key, what is counted, both stages, where they are from."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["rule", "what is counted", "warning from", "unfit from", "source"])
    for one in sorted(built_in().bounds.values(), key=lambda bound: bound.key):
        rows.writerow([one.key, one.meaning, _stage(one, one.warn), _stage(one, one.fail), one.source])
    return text.getvalue()


def _stage(bound: Bound, stage: float | None) -> str:
    if stage is None:
        return "-"
    comparison = "<=" if bound.better == "higher" else ""
    return f"{comparison}{quantity(stage, bound.unit)}".strip()


def whole() -> str:
    """Return the tables of checks and floors: what checks read, and where each floor is from."""
    checks = [
        [
            f"`{name}`",
            one.what,
            when,
            f"{one.cost_s:g}",
            ", ".join(one.reads),
        ]
        for name, (one, when) in sorted(_known().items())
    ]
    lowest = [
        [one.hardware, f"`{one.name}`", quantity(one.fail, one.unit), one.confidence, one.source]
        for one in floors()
    ]
    return "\n".join(
        (
            _table("| check | what it does | when | seconds at most, usually | what it reads |", checks),
            _table("| device | figure | floor | confidence | source |", lowest),
        )
    )


def _loads(_names: list[str]) -> str:
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
    return _table("| load | from | seconds, quick | seconds, deep |", rows)


_TABLES: dict[str, Callable[[list[str]], str]] = {
    "checks": _checks,
    "loads": _loads,
}


def main(arguments: list[str]) -> None:
    """Write the tables of the page that is named and its file of bounds, or print the whole ones."""
    if arguments:
        target = Path(arguments[0])
        target.write_text(completed(target.read_text()))
        target.with_name("vetting-bounds.csv").write_text(bounds())
    else:
        sys.stdout.write(whole())


if __name__ == "__main__":
    main(sys.argv[1:])
