"""PAYLOAD. Clocks of nodes, compared: whoever is far from the median of all is named. Pure.

The leader reads a node's time from its greeting, which the node writes after it was challenged: it stands for the middle of
that exchange, and half of the round trip is the most by which this is wrong. Only what is beyond that error counts.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Iterator, Sequence, Tuple

from pytest_mlhpc.node.vet.finding import Finding, Severity
from pytest_mlhpc.node.vet.policy import Policy

#: Name of the check, and its rule.
CLOCKS, APART = "clocks", "clocks.apart"

_MEND = "have its time service (chrony, ntpd) looked at"


@dataclass(frozen=True)
class Clock:
    """How far one node's clock was ahead of the first node's, in seconds, and how wrong that may be at most."""

    host: str
    ahead_s: float
    error_s: float = 0.0


def compare_clocks(clocks: Sequence[Clock], policy: Policy) -> Iterator[Tuple[str, Finding]]:
    """Yield (host, finding) for each of at least two nodes.

    A node is unfit only where most clocks agree: of two that differ, nobody can tell which is wrong.
    """
    if len(clocks) < 2:
        return
    apart = [_apart(clock, clocks) for clock in clocks]
    bound = policy[APART]
    agree = sum(not bound.reached(abs(far) - error, _first(policy)) for far, error in apart)
    most = 2 * agree > len(clocks)
    for clock, (far, error) in zip(clocks, apart):
        other = next(one.host for one in clocks if one is not clock)
        of = f"{other}'s" if len(clocks) == 2 else f"the median of {len(clocks)} nodes"
        said = f"its clock is {_spell(abs(far))} {'ahead of' if far > 0 else 'behind'} {of}"
        sure = abs(far) - error
        severity, advice = Severity.PASS, ""
        if most and bound.reached(sure, bound.fail):
            severity, advice = Severity.CRITICAL, f": credentials for jobs are refused; {_MEND}"
        elif bound.reached(sure, _first(policy)):
            severity = Severity.WARNING
            advice = f"; {_MEND}" if most else f", and nobody can tell which is right; {_MEND} on all of them"
        elif bound.reached(abs(far) + error, _first(policy)):
            severity, advice = Severity.INFO, f", give or take {_spell(error)}: that is too coarse to judge"
        yield (
            clock.host,
            Finding(
                CLOCKS, severity, said + advice, rule=APART, metric="apart", value=round(far, 6), unit="s"
            ),
        )


def _first(policy: Policy) -> float:
    """Return the first stage at which anything is said."""
    bound = policy[APART]
    return min((stage for stage in (bound.warn, bound.fail) if stage is not None), default=float("inf"))


def _apart(clock: Clock, clocks: Sequence[Clock]) -> Tuple[float, float]:
    """Return how far a clock is ahead of the median (of two: of the other), and the error of that."""
    if len(clocks) == 2:
        (other,) = [one for one in clocks if one is not clock]
        return clock.ahead_s - other.ahead_s, clock.error_s + other.error_s
    middle = statistics.median(one.ahead_s for one in clocks)
    return clock.ahead_s - middle, clock.error_s + statistics.median(one.error_s for one in clocks)


def _spell(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1.0 else f"{seconds:.1f} s"
