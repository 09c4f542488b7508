"""What checks for jobs share: findings that are the user's to mend, sizes in words, lists of numbers."""

from __future__ import annotations

import math
from typing import FrozenSet, Set, Tuple

from pytest_mlhpc.node.vet.finding import CheckOutcome, Finding, Origin, Severity
from pytest_mlhpc.node.vet.machine import Unreadable
from pytest_mlhpc.node.vet.policy import Policy


def judged(check: str, policy: Policy, key: str, value: float, reason: str) -> Tuple[Finding, ...]:
    """Return a finding if *value* is beyond a bound, else none. *reason* says what is found and what to do."""
    bound = policy[key]
    if bound.reached(value, bound.fail):
        severity = Severity.CRITICAL
    elif bound.reached(value, bound.warn):
        severity = Severity.WARNING
    else:
        return ()
    metric = key.partition(".")[2]
    shown = value if math.isfinite(value) else None
    return (
        Finding(
            check,
            severity,
            reason,
            rule=key,
            origin=Origin.USER,
            metric=metric,
            value=shown,
            unit=bound.unit or "1",
        ),
    )


def unknown(check: str, key: str, reason: str) -> Tuple[Finding, ...]:
    """Return what is said where nobody can tell."""
    return (Finding(check, Severity.UNKNOWN, reason, rule=key, origin=Origin.USER),)


def outcome(check: str, findings: Tuple[Finding, ...], well: str) -> CheckOutcome:
    """Return *findings*, or that all is *well*."""
    return CheckOutcome(findings or (Finding(check, Severity.PASS, well, origin=Origin.USER),))


def size(value: float) -> str:
    """Return bytes in words: ``64 MiB``."""
    if not math.isfinite(value):
        return "unlimited"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.4g} PiB"


def is_number(text: str) -> bool:
    """Return whether a text is a whole number that an int can be made of: ASCII digits, at most 18 of them."""
    return len(text) <= 18 and text.isascii() and text.isdigit()


def numbers(text: str) -> FrozenSet[int]:
    """Return the numbers of a list as the kernel writes it, ``0-3,8``.

    Raises:
        Unreadable: it is none.
    """
    found: Set[int] = set()
    for part in text.replace("\n", ",").split(","):
        first, dash, last = part.strip().partition("-")
        if not first and not dash:
            continue
        try:
            low, high = int(first), int(last) if dash else int(first)
        except ValueError as error:
            raise Unreadable(f"{text[:40]!r} is no list of numbers") from error
        if high - low > 1 << 20:
            raise Unreadable(f"{text[:40]!r} is no list of processors")
        found.update(range(low, high + 1))
    return frozenset(found)


def some(names: Tuple[str, ...], most: int = 4) -> str:
    """Return at most *most* of them, and how many more there are."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
