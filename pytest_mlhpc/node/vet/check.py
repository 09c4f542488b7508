"""What a check is: one row with what it reads and how it judges; and the examination of one node that every check makes."""

from __future__ import annotations

import functools
import math
import pkgutil
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from pytest_mlhpc.node.files import read_json
from pytest_mlhpc.node.vet.finding import CheckOutcome, Fact, Finding, Origin, Reading, Severity
from pytest_mlhpc.node.vet.machine import Context, Machine


@functools.lru_cache(maxsize=1)  # read from a zip on nodes
def _descriptions() -> Mapping[str, Mapping[str, Any]]:
    """Return ``checks.json``: a check's name -> all fields of its row but the functions."""
    found: Mapping[str, Mapping[str, Any]] = read_json(pkgutil.get_data(__package__, "checks.json") or b"")
    return found


def _description(name: str) -> Dict[str, Any]:
    found = _descriptions()[name]
    return {**found, "name": name, "reads": tuple(found["reads"])}


class Examination:
    """One check on one node: what it may read, and its findings, facts and readings so far."""

    def __init__(self, check: str, machine: Machine, context: Context, origin: Origin = Origin.NODE) -> None:
        self.check, self.machine, self.context = check, machine, context
        self.wanted = context.wanted
        self.findings: List[Finding] = []
        self.facts: List[Fact] = []
        self.readings: List[Reading] = []
        self.origin = origin

    def judge(
        self, key: str, value: float, reason: str, device: str = "", origin: Optional[Origin] = None
    ) -> bool:
        """Judge *value* by the bound *key*: only beyond it there is a finding. Return whether there is.

        *reason* says what was found and what to do.
        """
        bound = self.context.policy[key]
        value = float(min(value, 1 << 64)) if isinstance(value, int) else value
        severity = bound.severity(value)
        if severity is Severity.PASS:
            return False
        self.add(
            severity,
            reason,
            device,
            rule=key,
            origin=origin or self.origin,
            metric=key.partition(".")[2],
            value=value if math.isfinite(value) else None,
            unit=bound.unit or "1",
        )
        return True

    def unknown(self, key: str, reason: object, device: str = "") -> None:
        """Say that nobody can tell whether the bound *key* is met."""
        self.add(Severity.UNKNOWN, str(reason), device, rule=key)

    def info(self, reason: str, device: str = "", **about: Any) -> None:
        """Say something that asks for nothing; *about* are further fields of the finding."""
        self.add(Severity.INFO, reason, device, **about)

    def add(self, severity: Severity, reason: str, device: str = "", **about: Any) -> None:
        """Add a finding that no bound decides; *about* are further fields of it."""
        about.setdefault("origin", self.origin)
        self.findings.append(Finding(self.check, severity, reason, device, **about))

    def fact(self, name: str, value: str, scope: str = "", device: str = "", **about: Any) -> None:
        """Say what other nodes, or devices of the model *scope*, should have in common."""
        about.setdefault("origin", self.origin)
        self.facts.append(Fact(self.check, name, value, scope, device, **about))

    def reading(
        self, metric: str, key: str, model: str, value: float, unit: str = "B/s", **about: Any
    ) -> None:
        """Say a figure; *about* are further fields of the reading."""
        self.readings.append(Reading(self.check, metric, key, model, value, unit, **about))

    def outcome(self, passed: Optional[str]) -> CheckOutcome:
        """Return all of it; with *passed* as a PASS where nothing asks for anything."""
        if passed is not None and all(one.severity is Severity.INFO for one in self.findings):
            self.add(Severity.PASS, passed)
        return CheckOutcome(tuple(self.findings), tuple(self.readings), tuple(self.facts))


@dataclass(frozen=True)
class Check:
    """A check that reads a node once.

    ``what`` it does and what it ``reads`` are for docs/vetting-checks.md. ``judge`` reads the node, judges it, and returns what to say where
    all is well (None: nothing); it raises ``Unreadable`` where it cannot tell, which becomes UNKNOWN. ``cost_s`` is what it may
    take, in seconds. ``level`` is quick or deep (which includes quick), ``purpose`` "" or job (only with ``--for job``); what such a
    check finds is the user's to mend. One that ``loads`` the node is left out with ``--no-load``.
    """

    name: str
    what: str
    judge: Callable[[Examination], Optional[str]]
    reads: Tuple[str, ...]
    cost_s: float
    level: str = "quick"
    purpose: str = ""
    loads: bool = False

    @classmethod
    def named(cls, name: str, judge: Callable[[Examination], Optional[str]]) -> Check:
        """Return the check that ``checks.json`` describes."""
        return cls(judge=judge, **_description(name))

    def examine(self, machine: Machine, context: Context) -> CheckOutcome:
        """Return all that the check says of a node."""
        return _run(self, machine, context, self.judge)


@dataclass(frozen=True)
class LoadWatch:
    """A check over the time of the load; fields as those of :class:`Check`.

    ``start`` returns the state before the load, None where there is nothing to watch. ``observe`` returns the state with what is
    read under load, every half second. ``judge`` reads the node again after the load, and judges what it has shown.
    """

    name: str
    what: str
    start: Callable[[Machine, Context], Any]
    observe: Callable[[Machine, Any], Any]
    judge: Callable[[Examination, Any], Optional[str]]
    reads: Tuple[str, ...]
    cost_s: float
    level: str = "quick"
    purpose: str = ""

    @classmethod
    def named(
        cls,
        name: str,
        start: Callable[[Machine, Context], Any],
        observe: Callable[[Machine, Any], Any],
        judge: Callable[[Examination, Any], Optional[str]],
    ) -> LoadWatch:
        """Return the watch that ``checks.json`` describes."""
        return cls(start=start, observe=observe, judge=judge, **_description(name))

    def sample(self, machine: Machine, state: Any) -> Any:
        """Return the state with what is read now."""
        return None if state is None else self.observe(machine, state)

    def end(self, machine: Machine, context: Context, state: Any) -> CheckOutcome:
        """Return all that the load has shown."""
        if state is None:
            return CheckOutcome()
        return _run(self, machine, context, lambda exam: self.judge(exam, state))


def origin_of(check: Any) -> Origin:
    """Return whose to mend it is what a check finds."""
    return Origin.USER if check.purpose == "job" else Origin.NODE


def _run(check: Any, machine: Machine, context: Context, judge: Callable[[Examination], Any]) -> CheckOutcome:
    exam = Examination(check.name, machine, context, origin_of(check))
    return exam.outcome(judge(exam))
