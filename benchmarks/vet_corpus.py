"""What vetting says of the fault corpus, case by case: the same cases, loader and checks as in ``tests/node/vet/test_corpus.py``."""

from __future__ import annotations

import functools
import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import Row

TESTS = Path(__file__).parents[1] / "tests"

#: Kind of a case -> what is said of it. Odd ones have no group of their own in the aim; what they demand is said as well.
AIMS = {
    "bad": "known-bad found",
    "good": "known-good passed",
    "unreadable": "unreadable called UNKNOWN",
    "odd": "odd cases judged as their source demands",
}

#: The worst comes first.
WORDS = ("CRITICAL", "UNKNOWN", "WARNING")


@dataclass(frozen=True)
class Judged:
    """One case and what our checks say of it; ``right``: just what its source demands, neither more nor less."""

    case: Any
    rows: tuple[tuple[str, str, str, str], ...]
    right: bool

    @property
    def kind(self) -> str:
        """good, bad, unreadable or odd."""
        return str(self.case.data["kind"])

    @property
    def word(self) -> str:
        """The worst that is said, in capitals."""
        said = {row[1] for row in self.rows}
        return next((word for word in WORDS if word in said), "PASS")

    @property
    def rules(self) -> str:
        """By which rules, the worst first."""
        ranked = sorted(self.rows, key=lambda row: WORDS.index(row[1]))
        return ", ".join(dict.fromkeys(row[2] or row[0] for row in ranked))


@functools.cache
def judged() -> tuple[Judged, ...]:
    """Return all cases with what is said of them."""
    if str(TESTS) not in sys.path:
        sys.path.insert(0, str(TESTS))
    corpus = importlib.import_module("corpus")
    found = []
    for case in corpus.all_cases():
        if "broken" in case.data:
            found.append(Judged(case, (), right=False))
            continue
        rows = corpus.rows(corpus.outcomes(case))
        found.append(Judged(case, tuple(rows), rows == case.expected))
    return tuple(found)


def rows() -> list[Row]:
    """Count them, and name those that miss."""
    return [_row(kind, [one for one in judged() if one.kind == kind]) for kind in AIMS]


def _row(kind: str, cases: list[Judged]) -> Row:
    right = sum(one.right for one in cases)
    missed = ", ".join(one.case.name for one in cases if not one.right)
    groups = sorted({one.case.group for one in cases})
    by_group = ", ".join(f"{group} {sum(one.case.group == group for one in cases)}" for group in groups)
    return Row(
        f"corpus: {AIMS[kind]}",
        "100 %",
        f"{right} of {len(cases)}, {right / len(cases):.1%} ({by_group})"
        + (f"; not {missed}" if missed else ""),
        right == len(cases),
    )
