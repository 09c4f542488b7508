"""The lists of docs/vetting-checks.md, made of the checks, bounds and loads themselves.

``python -m pytest_mlhpc.vetting.manual docs/vetting-checks.md`` writes them anew between their markers, such as
``<!-- rules: edac pci -->`` and ``<!-- end -->``; what stands outside is written by hand and stays. Without a file
it prints the whole tables: what each check reads, and the meaning and source of each bound and floor.
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
from pytest_mlhpc.store.text import quantity

_MARKED = re.compile(r"(<!-- (checks|rules|loads)(?:: ([^>]*?))? -->\n).*?(<!-- end -->)", re.DOTALL)

#: Units of events and things; a bound of one of these needs no figure. Bounds of seconds or shares do.
_COUNTED = {"", "1", "devices", "errors", "generations", "links", "models", "processes", "tests"}
_SINGLE = {(1, None), (None, 1)}


def completed(page: str) -> str:
    """Return a page with all its tables made anew.

    Raises:
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


def _known() -> dict[str, tuple[Check | LoadWatch, str]]:
    """Return each check by name, and when it runs."""
    checks, watches = all_checks()
    known: dict[str, tuple[Check | LoadWatch, str]] = {one.name: (one, one.level) for one in checks}
    known.update({one.name: (one, f"{one.level}, under load") for one in watches})
    return known


def _checks(_names: list[str]) -> str:
    """Return which checks do not simply run with ``quick``."""
    special: dict[str, list[str]] = {}
    for name, (_, when) in sorted(_known().items()):
        if when != "quick":
            special.setdefault(when, []).append(f"`{name}`")
    return "; ".join(f"{when}: {', '.join(shown)}" for when, shown in sorted(special.items())) + ".\n"


def _bounds(prefix: str) -> list[Bound]:
    found = [bound for key, bound in built_in().bounds.items() if key.partition(".")[0] == prefix]
    if not found:
        raise ValueError(f"there are no rules {prefix}.*")
    return found


def _rules(prefixes: list[str]) -> str:
    """Return the rules of all prefixes. Those that a single event reaches stand together, without a figure."""
    groups: dict[str, list[str]] = {"Unfit at one": [], "Warning at one": [], "Warning/unfit from": []}
    for one in (bound for prefix in prefixes for bound in _bounds(prefix)):
        if one.better == "lower" and one.unit in _COUNTED and (one.warn, one.fail) in _SINGLE:
            groups["Unfit at one" if one.warn is None else "Warning at one"].append(f"`{one.key}`")
        else:
            stages = f"{_stage(one, one.warn)}/{_stage(one, one.fail)}"
            groups["Warning/unfit from"].append(f"`{one.key}` {stages}")
    return "\n\n".join(f"{what}: {', '.join(shown)}." for what, shown in groups.items() if shown) + "\n"


def _stage(bound: Bound, stage: float | None) -> str:
    if stage is None:
        return "-"
    comparison = "<=" if bound.better == "higher" else ""
    return f"{comparison}{quantity(stage, bound.unit)}".strip()


def whole() -> str:
    """Return the tables with all that is known: what checks read, what bounds mean, and where each figure is from."""
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
    rules = [
        [f"`{one.key}`", one.meaning, _stage(one, one.warn), _stage(one, one.fail), one.source]
        for one in built_in().bounds.values()
    ]
    lowest = [
        [one.hardware, f"`{one.name}`", quantity(one.fail, one.unit), one.confidence, one.source]
        for one in floors()
    ]
    return "\n".join(
        (
            _table("| check | what it does | when | seconds at most, usually | what it reads |", checks),
            _table("| rule | what is counted | warning from | unfit from | source |", rules),
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
    "rules": _rules,
    "loads": _loads,
}


def main(arguments: list[str]) -> None:
    """Write the tables of the page that is named, or print the whole ones."""
    if arguments:
        target = Path(arguments[0])
        target.write_text(completed(target.read_text()))
    else:
        sys.stdout.write(whole())


if __name__ == "__main__":
    main(sys.argv[1:])
