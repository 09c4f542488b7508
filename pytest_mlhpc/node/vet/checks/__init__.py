"""Checks of one node. A module lists its checks in ``CHECKS`` and its watches in ``WATCHES`` (either may be absent)."""

from __future__ import annotations

import importlib
import pkgutil
from typing import List, Tuple

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
