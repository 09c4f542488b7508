"""The names of all checks of nodes, for suites and manuals. Those ``--for job`` are about a user's own set-up."""

from __future__ import annotations

from typing import Tuple

from pytest_mlhpc.node.vet.checks import all_checks
from pytest_mlhpc.node.vet.workers import WORKS


def checks_of_nodes(level: str = "quick") -> Tuple[str, ...]:
    """Return the names of checks that a vetting of this level makes on each node, the passive ones first."""
    checks, watches = all_checks()
    levels = ("quick",) if level == "quick" else ("quick", "deep")
    passive = {one.name for one in checks if not one.purpose and one.level in levels}
    passive |= {one.name for one in watches if not one.purpose and one.level in levels}
    load = [work.name for work in WORKS if not work.purpose and work.level in levels]
    return (*sorted(passive), *load)
