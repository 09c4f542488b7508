"""PAYLOAD. What a figure's peers are like: their middle, their spread, and who is so low that he is no peer.

Plain statistics without input or output. A slow node among few inflates the MAD and hides behind it: one third of 64
nodes 15 % slow are found in 6 % of all simulations if they count as peers. So those that are *low*, far below the better
half of all, are left out of median and MAD; if more than a third is low, nobody can tell who is right, and the callers
ask floors and history instead.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import FrozenSet, Generic, Hashable, Mapping, Optional, Sequence, TypeVar

from pytest_mlhpc.node.vet.finding import Severity
from pytest_mlhpc.node.vet.policy import Bound, Policy

#: A normal distribution's standard deviation is this many median absolute deviations.
MAD_TO_SIGMA = 1.4826

#: The same for its better half alone: the MAD of a half-normal distribution is 0.40 standard deviations.
HALF_MAD_TO_SIGMA = 2.5

Who = TypeVar("Who", bound=Hashable)


@dataclass(frozen=True)
class Peers(Generic[Who]):
    """``median`` and ``mad`` (1.4826 x MAD) of those who are not ``low``; all in the figures' unit. ``better`` as in readings."""

    median: float
    mad: float
    low: FrozenSet[Who]
    better: str = "higher"

    def share(self, value: float) -> float:
        """Return by which share of the median *value* is worse than it; negative if better. The median must not be 0."""
        return shortfall(value, self.median, self.better)


def shortfall(value: float, middle: float, better: str) -> float:
    """Return by which share of *middle*, not 0, *value* is worse; negative if better."""
    change = (value - middle) / abs(middle)
    return change if better == "lower" else -change


def mad(values: Sequence[float], middle: float) -> float:
    """Return 1.4826 x the median absolute deviation of *values*, at least one, from *middle*."""
    return MAD_TO_SIGMA * statistics.median(abs(value - middle) for value in values)


def find_low(values: Mapping[Who, float], better: str, policy: Policy, check: str = "") -> FrozenSet[Who]:
    """Return who is far below the median of the better half: by ``peers.low_share`` and ``peers.low_mads`` of its spreads."""
    share = bound_of(policy, "peers.low_share", check).fail
    spreads = bound_of(policy, "peers.low_mads", check).fail
    if share is None or spreads is None:
        return frozenset()
    ranked = sorted(values.values(), reverse=better == "higher")
    half = ranked[: (len(ranked) + 1) // 2]
    middle = statistics.median(half)
    if not middle:
        return frozenset()
    spread = HALF_MAD_TO_SIGMA * statistics.median(abs(value - middle) for value in half) / abs(middle)
    limit = max(share, spreads * spread)
    return frozenset(who for who, value in values.items() if shortfall(value, middle, better) > limit)


def find_peers(values: Mapping[Who, float], better: str, policy: Policy, check: str = "") -> Peers[Who]:
    """Return what *values*, at least one, are like without those that are low."""
    low = find_low(values, better, policy, check)
    kept = [value for who, value in values.items() if who not in low]
    middle = statistics.median(kept)
    return Peers(middle, mad(kept, middle), low, better)


def stage(peers: Peers[Who], value: float, policy: Policy, rule: str = "peers", check: str = "") -> Severity:
    """Return CRITICAL, WARNING or PASS: beyond which bound (:func:`limit_of`) *value* is."""
    worse = peers.share(value)
    for severity in (Severity.CRITICAL, Severity.WARNING):
        limit = limit_of(peers, policy, severity, rule, check)
        if limit is not None and worse > limit:
            return severity
    return Severity.PASS


def limit_of(
    peers: Peers[Who], policy: Policy, severity: Severity, rule: str = "peers", check: str = ""
) -> Optional[float]:
    """Return the bound of CRITICAL or WARNING as a share of the median; None: a site's policy has taken this stage out.

    It is the larger of ``<rule>.mads`` and ``<rule>.share``, but not more than ``<rule>.most`` where there is one.
    """
    mads, share = bound_of(policy, f"{rule}.mads", check), bound_of(policy, f"{rule}.share", check)
    most = policy.bounds.get(f"{rule}.most")
    critical = severity is Severity.CRITICAL
    factor, least = (mads.fail, share.fail) if critical else (mads.warn, share.warn)
    if factor is None or least is None:
        return None
    limit = max(factor * peers.mad / abs(peers.median), least)
    return limit if most is None or most.fail is None else min(limit, most.fail)


def bound_of(policy: Policy, key: str, check: str = "") -> Bound:
    """Return a bound of comparison: ``<key>.<check>`` where a check has its own, else ``<key>``."""
    return policy.bounds.get(f"{key}.{check}") or policy[key]
