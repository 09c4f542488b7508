"""Our own bounds, one module for each kind of hardware or check; ``mlhpc vet`` and the readiness step use all."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Tuple

from pytest_mlhpc.node.vet.policy import Bound, Policy


def all_bounds() -> Tuple[Bound, ...]:
    """Return the ``BOUNDS`` of every module here, in the order of their names; works inside the payload's zip."""
    found = []
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda one: one.name):
        found.extend(importlib.import_module(f"{__name__}.{module.name}").BOUNDS)
    return tuple(found)


def built_in() -> Policy:
    """Return our own policy: the ``BOUNDS`` of all modules in ``policies/``."""
    return Policy(all_bounds())
