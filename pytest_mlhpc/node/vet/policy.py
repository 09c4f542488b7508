"""The policy: every bound by which vetting judges, with its source and date, and the severity that follows from a value.

Our own bounds, floors and tables of events are in ``policy.json``, which travels to the nodes. Sites change bounds by a TOML file.
"""

from __future__ import annotations

import functools
import pkgutil
import re
from dataclasses import dataclass, field
from typing import Any, Dict, Iterable, Mapping, Optional, Tuple

from pytest_mlhpc.node.files import read_json
from pytest_mlhpc.node.vet.finding import Severity


@functools.lru_cache(maxsize=1)  # read from a zip on nodes
def tables() -> Mapping[str, Any]:
    """Return what is in ``policy.json``: ``as_of``, ``bounds``, ``floors``, ``xid``, ``sxid``, ``kernel_log``."""
    found: Mapping[str, Any] = read_json(pkgutil.get_data(__package__, "policy.json") or b"")
    return found


def built_in() -> Policy:
    """Return our own policy."""
    return Policy(Bound(date=tables()["as_of"], **entry) for entry in tables()["bounds"])


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
    date: str = ""

    def reached(self, value: float, stage: Optional[float]) -> bool:
        """Return whether *value* is at or beyond *stage* on the bad side."""
        if stage is None:
            return False
        return value >= stage if self.better == "lower" else value <= stage

    def severity(self, value: float) -> Severity:
        """Return CRITICAL or WARNING if *value* reaches that stage, else PASS."""
        if self.reached(value, self.fail):
            return Severity.CRITICAL
        return Severity.WARNING if self.reached(value, self.warn) else Severity.PASS


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


@dataclass(frozen=True)
class ExpectedNode:
    """What a node should have and what the user is about to do; None, 0 or empty: nobody has said.

    Sizes are in bytes. ``accelerator`` is cpu, cuda, rocm, xpu, ipu, wse or auto. ``expect`` are further properties by name
    (``driver``, ``numa``, ``hugepages``, ``governor``, ``firmware``), as text, from the partition's ``expect:``. ``purpose`` is
    "" or "job". ``paths`` are for job checks: ``checkpoint``, ``data``; ``storage`` is
    the folder that is measured (default: that for temporary files). ``ranks`` are those that one node will have.
    """

    accelerator: str = "auto"
    devices: Optional[int] = None
    device_model: str = ""
    cores: Optional[int] = None
    memory: Optional[int] = None
    expect: Mapping[str, str] = field(default_factory=dict)
    purpose: str = ""
    hours: float = 0.0
    ranks: int = 0
    paths: Mapping[str, str] = field(default_factory=dict)
    checkpoint_bytes: int = 0


#: Quantities that have floors. ``all_reduce/N``: bus bandwidth over N devices of one
#: node. ``host_copy``: one direction. ``memory/device``: read and written together.
FLOOR_NAMES = (
    "gemm/fp64", "gemm/fp32", "gemm/fp16", "gemm/bf16", "gemm/fp8",
    "memory/device", "host_copy", "all_reduce/2", "all_reduce/4", "all_reduce/8",
    "storage/write", "storage/read", "storage/create", "storage/stat",
)  # fmt: skip


@dataclass(frozen=True)
class Floor:
    """What devices whose model matches ``model`` reach; ``fail`` and ``warn`` in ``unit``. ``confidence`` is high, medium or low."""

    name: str
    hardware: str
    model: str
    fail: float
    source: str
    confidence: str
    unit: str = "FLOP/s"
    warn: Optional[float] = None

    def matches(self, name: str, model: str) -> bool:
        """Return whether this is the floor of *name* for a device called *model* by its driver."""
        return self.name == name and re.search(self.model, model, re.IGNORECASE) is not None


def floors() -> Tuple[Floor, ...]:
    """Return all floors that we know (``policy.json``)."""
    return tuple(Floor(**entry) for entry in tables()["floors"])


def find_floor(name: str, model: str) -> Optional[Floor]:
    """Return the floor of *name* for devices called *model*, or None where we know none."""
    if not name:
        return None
    return next((floor for floor in floors() if floor.matches(name, model)), None)
