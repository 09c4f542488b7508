"""Budgets: what a session may spend. Refused is what cannot fit before it starts; re-runs stop when it is used up.

A budget is compared with the first attempts at their time limits: these are sure to be run. Re-runs are not, so they are
asked for one by one (:class:`Budget`), against what was really used until then.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_mlhpc.jobs.node_hours import charged, most_of, text_of, total_bound
from pytest_mlhpc.jobs.spec import JobSpec
from pytest_mlhpc.system.quantities import parse_budget

_SHORT = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?([ndc])h\Z")
_UNITS = {"n": "node", "d": "device", "c": "core"}
#: How many of the dearest tests a refusal names.
_NAMED = 5
#: Hours below which a difference is rounding.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Limit:
    """So many ``unit``-hours (node, device or core). ``source`` says who set it."""

    hours: float
    unit: str = "node"
    source: str = "--budget"

    def __str__(self) -> str:
        """Return ``20 node-hours``."""
        return f"{self.hours:g} {self.unit}-hours"


def parse(value: object, source: str = "--budget") -> Limit:
    """Return the limit in ``20nh``, ``8dh`` (devices), ``100ch`` (cores) or ``20 node-hours``.

    Raises:
        ValueError: anything else.
    """
    if isinstance(value, str) and (match := _SHORT.match(value.strip())):
        return Limit(float(match[1]), _UNITS[match[2]], source)
    try:
        hours, unit = parse_budget(value)
    except ValueError as error:
        raise ValueError(f"{error}, or short: 20nh") from error
    return Limit(hours, unit, source)


def refusal(specs: Sequence[JobSpec], limit: Limit | None) -> str:
    """Return why *specs* are beyond *limit*, naming the dearest, or an empty string."""
    if limit is None:
        return ""
    need = total_bound(specs, 0, limit.unit)
    if need <= limit.hours + _ROUNDING:
        return ""
    dear = sorted(filter(charged, specs), key=lambda spec: -most_of(spec, limit.unit))
    named = ", ".join(f"{spec.node_id} {most_of(spec, limit.unit):.3g}" for spec in dear[:_NAMED])
    more = f", and {len(dear) - _NAMED} more" if len(dear) > _NAMED else ""
    return (
        f"{len(dear)} tests may take {text_of(need, limit.unit)} at their time limits, re-runs aside; the budget is {limit} "
        f"({limit.source}). The dearest: {named}{more}. Select fewer (-k), lower their time_limit, or raise the budget"
    )


class Budget:
    """What is left of a limit while a session runs; may be asked from several threads. Without a limit all is allowed.

    *planned* are the hours of all first attempts at their time limits; each ends with :meth:`settle`.
    """

    def __init__(self, limit: Limit | None, planned: float = 0.0) -> None:
        self.limit = limit
        self._outstanding = planned
        self._used = 0.0
        self._lock = threading.Lock()

    @property
    def used(self) -> float:
        """Hours that were really used."""
        with self._lock:
            return self._used

    @property
    def left(self) -> float:
        """Hours that are neither used nor promised; infinite without a limit."""
        with self._lock:
            return self._left()

    def allows(self, hours: float) -> bool:
        """Whether a re-run of at most *hours* still fits. If so they are promised to it, until :meth:`settle`."""
        with self._lock:
            if hours > self._left() + _ROUNDING:
                return False
            self._outstanding += hours
            return True

    def settle(self, promised: float, used: float) -> None:
        """Book what an attempt *used* and give back what was *promised* to it; one that never ran used nothing."""
        with self._lock:
            self._outstanding = max(0.0, self._outstanding - promised)
            self._used += max(0.0, used)

    def refused_text(self, hours: float) -> str:
        """Return why a re-run was not made: the text of ``inconclusive (budget)``."""
        if self.limit is None:
            return ""
        return (
            f"a re-run of at most {text_of(hours, self.limit.unit)} does not fit: {text_of(max(0.0, self.left), self.limit.unit)}"
            f" of {self.limit} ({self.limit.source}) are left"
        )

    def _left(self) -> float:
        return float("inf") if self.limit is None else self.limit.hours - self._used - self._outstanding
