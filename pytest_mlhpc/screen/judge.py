"""What limits a program: from courses and what was told to findings. Pure functions; each looks for one thing."""

from __future__ import annotations

from pytest_mlhpc.screen.findings import Finding, Seen
from pytest_mlhpc.screen.limits_machine import cores, memory, throttled
from pytest_mlhpc.screen.limits_program import communication, computing, data, host
from pytest_mlhpc.screen.slow_rank import find_slow_rank


def judge(seen: Seen) -> tuple[Finding, ...]:
    """Return what limits, the largest share first."""
    found = [
        *data(seen),
        *slow_rank(seen),
        *communication(seen),
        *host(seen),
        *memory(seen),
        *throttled(seen),
        *cores(seen),
    ]
    found += computing(seen)
    return tuple(sorted(found, key=lambda one: -one.share))


def slow_rank(seen: Seen) -> list[Finding]:
    """One rank that keeps the others waiting."""
    found = find_slow_rank(seen.ranks, seen.devices)
    if found is None:
        return []
    return [Finding("one slow rank", found.share, found.text, found.advice, found.certain)]
