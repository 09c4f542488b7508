"""Budgets: what a session may spend. Refused is what cannot fit before it starts; re-runs stop when it is used up.

A budget is compared with the first attempts at their time limits: these are sure to be run. Re-runs are not, so they are
asked for one by one (:class:`Budget`), against what was really used until then.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Hashable, Iterable, Sequence
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

    Hours are promised to keys: one for each attempt that is to be made. What was used may be booked without a promise, as
    attempts that an earlier session submitted, or that were lost and made again, cost as much as others.
    """

    def __init__(self, limit: Limit | None) -> None:
        self.limit = limit
        self._promised: dict[Hashable, float] = {}
        self._settled: set[Hashable] = set()
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

    def promise(self, key: Hashable, hours: float) -> None:
        """Promise *hours* to *key* without asking: first attempts, which are sure to be made. The last promise counts."""
        with self._lock:
            self._promised[key] = hours

    def allows(self, keys: Iterable[Hashable], hours: float) -> bool:
        """Whether re-runs of at most *hours* each still fit. If so they are promised to *keys*, until :meth:`settle`."""
        with self._lock:
            wanted = dict.fromkeys(keys, hours)
            if sum(wanted.values()) > self._left() + _ROUNDING:
                return False
            self._promised.update(wanted)
            return True

    def settle(self, key: Hashable, used: float) -> None:
        """Book what *key* has *used* and give back what was promised to it. The second time changes nothing."""
        with self._lock:
            if key not in self._settled:
                self._settled.add(key)
                self._promised.pop(key, None)
                self._used += max(0.0, used)

    def give_back(self, keys: Iterable[Hashable]) -> None:
        """Take back what was promised to *keys*: they will not be made, or not now."""
        with self._lock:
            for key in keys:
                self._promised.pop(key, None)

    def refused_text(self, hours: float) -> str:
        """Return why a re-run was not made: the text of ``inconclusive (budget)``."""
        if self.limit is None:
            return ""
        left = self.left if self.left > _ROUNDING else 0.0
        return (
            f"a re-run of at most {text_of(hours, self.limit.unit)} does not fit: {text_of(left, self.limit.unit)}"
            f" of {self.limit} ({self.limit.source}) are left"
        )

    def _left(self) -> float:
        return (
            float("inf")
            if self.limit is None
            else self.limit.hours - self._used - sum(self._promised.values())
        )
