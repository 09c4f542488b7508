"""The tables of docs/vetting-checks.md, made of the checks, bounds, floors and loads themselves.

``python -m pytest_mlhpc.vetting.manual docs/vetting-checks.md`` writes them anew between their markers, such as
``<!-- checks: edac pci -->`` and ``<!-- end -->``; what stands outside is written by hand and stays.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from pytest_mlhpc.node.vet.check import Check, LoadWatch
from pytest_mlhpc.node.vet.checks import all_checks
from pytest_mlhpc.node.vet.policy import Bound, built_in, floors
from pytest_mlhpc.node.vet.workers import PAIR_S, WORKS

_MARKED = re.compile(r"(<!-- (checks|rules|floors|loads)(?:: ([^>]*?))? -->\n).*?(<!-- end -->)", re.DOTALL)


def completed(page: str) -> str:
    """Return a page with all its tables made anew.

    Raises:
        KeyError: a marker names a check that does not exist.
        ValueError: a marker names rules of which there are none.
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


def _checks(names: list[str]) -> str:
    looks, watches = all_checks()
    known: dict[str, Check | LoadWatch] = {one.name: one for one in looks}
    known.update({one.name: one for one in watches})
    under_load = {one.name for one in watches}

    def row(name: str) -> list[str]:
        one = known[name]
        when = one.level + (", under load" if name in under_load else "")
        return [f"`{name}`", one.what, when, f"{one.cost_s:g}", ", ".join(f"`{read}`" for read in one.reads)]

    return _table(
        "| check | what it does | when | seconds at most, usually | what it reads |", map(row, names)
    )


def _rules(prefixes: list[str]) -> str:
    bounds = built_in().bounds

    def of(prefix: str) -> list[Bound]:
        found = [bound for key, bound in bounds.items() if key.partition(".")[0] == prefix]
        if not found:
            raise ValueError(f"there are no rules {prefix}.*")
        return found

    rows = [
        [f"`{one.key}`", one.meaning, _stage(one, one.warn), _stage(one, one.fail), one.source]
        for prefix in prefixes
        for one in of(prefix)
    ]
    return _table("| rule | what is counted | warning from | unfit from | source |", rows)


def _stage(bound: Bound, stage: float | None) -> str:
    if stage is None:
        return ""
    comparison = "<= " if bound.better == "higher" else ""
    return f"{comparison}{stage:.4g} {bound.unit}".strip()


def _floors(_names: list[str]) -> str:
    rows = [
        [one.hardware, f"`{one.name}`", f"{one.fail:.4g} {one.unit}", one.confidence, one.source]
        for one in floors()
    ]
    return _table("| device | figure | floor | confidence | source |", rows)


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
    "rules": _rules,
    "floors": _floors,
    "loads": _loads,
}


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(completed(target.read_text()))
