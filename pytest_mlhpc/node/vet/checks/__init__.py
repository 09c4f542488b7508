"""Checks of one node. A module lists its checks in ``CHECKS`` and its watches in ``WATCHES`` (either may be absent)."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any, FrozenSet, List, Tuple

from pytest_mlhpc.node.vet.check import Check, LoadWatch


def all_checks() -> Tuple[Tuple[Check, ...], Tuple[LoadWatch, ...]]:
    """Return checks and watches of every module here, by module name; works inside the payload's zip."""
    checks: List[Check] = []
    watches: List[LoadWatch] = []
    for found in sorted(pkgutil.iter_modules(__path__), key=lambda one: one.name):
        module = importlib.import_module(f"{__name__}.{found.name}")
        checks.extend(getattr(module, "CHECKS", ()))
        watches.extend(getattr(module, "WATCHES", ()))
    return tuple(checks), tuple(watches)


def names_of(*, purpose: str, level: str = "deep", unloaded: bool = False) -> FrozenSet[str]:
    """Return the names of checks of a purpose that a vetting of this level makes; *unloaded*: also without load."""
    checks, watches = all_checks()
    every: List[Any] = [one for one in checks if not one.loads] if unloaded else [*checks, *watches]
    return frozenset(one.name for one in every if one.purpose == purpose and level in (one.level, "deep"))
