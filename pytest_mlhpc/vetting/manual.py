"""What vetting checks and by which bounds, made of the checks, bounds and loads themselves.

``python -m pytest_mlhpc.vetting.manual`` prints the whole tables: what each check reads, and the meaning and source of each
bound and floor. ``... docs/vetting-checks.md`` writes the two lists of that page anew between their markers, such as
``<!-- loads -->`` and ``<!-- end -->``; what stands outside is written by hand and stays.
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

_MARKED = re.compile(r"(<!-- (checks|loads) -->\n).*?(<!-- end -->)", re.DOTALL)


def completed(page: str) -> str:
    """Return a page with its lists made anew."""
    return _MARKED.sub(lambda match: f"{match[1]}{_LISTS[match[2]]()}{match[3]}", page)


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


def _checks() -> str:
    """Return which checks do not simply run with ``quick``."""
    special: dict[str, list[str]] = {}
    for name, (_, when) in sorted(_known().items()):
        if when != "quick":
            special.setdefault(when, []).append(f"`{name}`")
    return "; ".join(f"{when}: {', '.join(shown)}" for when, shown in sorted(special.items())) + ".\n"


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


def _loads() -> str:
    shown = [
        f"`{one.name}` {one.quick_s:g}/{one.deep_s:g}"
        if one.level == "quick"
        else f"`{one.name}` -/{one.deep_s:g}"
        for one in WORKS
    ]
    shown.append(f"`pairs` {PAIR_S['quick']:g}/{PAIR_S['deep']:g} a round")
    return f"Seconds, quick/deep: {', '.join(shown)}.\n"


_LISTS: dict[str, Callable[[], str]] = {"checks": _checks, "loads": _loads}


def main(arguments: list[str]) -> None:
    """Write the lists of the page that is named, or print the whole ones."""
    if arguments:
        target = Path(arguments[0])
        target.write_text(completed(target.read_text()))
    else:
        sys.stdout.write(whole())


if __name__ == "__main__":
    main(sys.argv[1:])
