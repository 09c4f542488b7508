"""PAYLOAD. A finding from a figure and its bound. Pure."""

from __future__ import annotations

from typing import Iterable, List, Tuple

from pytest_mlhpc.node.vet.finding import Finding, Origin, Severity
from pytest_mlhpc.node.vet.policy import Bound


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
