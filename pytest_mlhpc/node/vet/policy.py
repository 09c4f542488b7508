"""PAYLOAD. The policy: every bound by which vetting judges, with its source and date; sites change them by a TOML file.

[bounds."nvidia.dram_corrected"]
warn = 50e6
source = "our vendor, ticket 4711"
date = "2026-11-21"
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Iterable, Mapping, Optional

#: State of knowledge of our own entries.
AS_OF = "2026-11-21"


@dataclass(frozen=True)
class Bound:
    """One entry. A value at or beyond ``warn`` or ``fail`` counts; None: this stage does not exist.

    ``better`` is lower for counters of trouble, higher for what there must be enough of.
    """

    key: str
    meaning: str
    source: str
    warn: Optional[float] = None
    fail: Optional[float] = None
    unit: str = ""
    better: str = "lower"
    date: str = AS_OF

    def reached(self, value: float, stage: Optional[float]) -> bool:
        """Return whether *value* is at or beyond *stage* on the bad side."""
        if stage is None:
            return False
        return value >= stage if self.better == "lower" else value <= stage


class Policy:
    """All bounds by key."""

    def __init__(self, bounds: Iterable[Bound]) -> None:
        self._bounds: Dict[str, Bound] = {bound.key: bound for bound in bounds}

    def __getitem__(self, key: str) -> Bound:
        """Return one bound; a missing one is a defect of ours, a KeyError."""
        return self._bounds[key]

    @property
    def bounds(self) -> Mapping[str, Bound]:
        """All of them."""
        return self._bounds

    def changed(self, bounds: Iterable[Bound]) -> Policy:
        """Return a policy with these in the place of those of the same key."""
        return Policy([*self._bounds.values(), *bounds])


def built_in() -> Policy:
    """Return our own policy: the ``BOUNDS`` of all modules in ``policies/``."""
    from pytest_mlhpc.node.vet.policies import all_bounds

    return Policy(all_bounds())
