"""The policy: every bound by which vetting judges, with its source and date, and the finding that follows from a value.

Our own bounds, floors and tables of events are in ``policy.json``, which travels to the nodes. Sites change bounds by a TOML file.
"""

from __future__ import annotations

import functools
import pkgutil
from dataclasses import dataclass, field
from typing import Any, Dict, Iterable, List, Mapping, Optional, Tuple

from pytest_mlhpc.node.files import read_json
from pytest_mlhpc.node.vet.finding import Finding, Origin, Severity


@functools.lru_cache(maxsize=1)  # read from a zip on nodes
def tables() -> Mapping[str, Any]:
    """Return what is in ``policy.json``: ``as_of``, ``bounds``, ``floors``, ``xid``, ``sxid``."""
    return read_json(pkgutil.get_data(__package__, "policy.json") or b"")


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


def weigh(
    check: str, bound: Bound, value: float, reason: str, *, device: str = "", origin: Origin = Origin.NODE
) -> Finding:
    """Return CRITICAL, WARNING or PASS by a bound; *reason* says what was found and what to do."""
    severity = Severity.PASS
    if bound.reached(value, bound.fail):
        severity = Severity.CRITICAL
    elif bound.reached(value, bound.warn):
        severity = Severity.WARNING
    return Finding(
        check,
        severity,
        reason,
        device=device,
        rule=bound.key,
        origin=origin,
        metric=bound.meaning,
        value=float(value),
        unit=bound.unit,
    )


def unknown(check: str, bound: Bound, error: Exception, *, device: str = "") -> Finding:
    """Return that nobody can tell whether a bound is kept."""
    return Finding(check, Severity.UNKNOWN, str(error), device=device, rule=bound.key)


def summed(check: str, findings: Iterable[Finding], passed: str) -> Tuple[Finding, ...]:
    """Return what is not PASS; where all pass, one PASS that says *passed*: a verdict with a line per counter is not read."""
    kept: List[Finding] = [one for one in findings if one.severity is not Severity.PASS]
    if all(one.severity is Severity.INFO for one in kept):
        kept.append(Finding(check, Severity.PASS, passed))
    return tuple(kept)


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
