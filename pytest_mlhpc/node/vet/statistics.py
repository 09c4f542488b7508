"""Statistics of figures that can be compared: peers, their middle and spread, and floors where there are too few peers."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import (
    Dict,
    FrozenSet,
    Generic,
    Hashable,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Set,
    Tuple,
    TypeVar,
)

from pytest_mlhpc.node.vet.finding import Finding, NodeReport, Reading, Report, Severity
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
    usual = [value for who, value in values.items() if who not in low]
    middle = statistics.median(usual)
    return Peers(middle, mad(usual, middle), low, better)


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


#: A device: host, and the device's name on it, empty for the node as a whole.
Place = Tuple[str, str]

_PREFIXES: Mapping[float, str] = {1e15: "P", 1e12: "T", 1e9: "G", 1e6: "M", 1e3: "k"}


@dataclass
class FigureGroup:
    """Figures of one quantity on devices of one model: ``sample`` is any of them, ``rounds`` all, by round and place."""

    sample: Reading
    rounds: Dict[int, Dict[Place, float]] = field(default_factory=dict)
    seconds: Dict[Place, float] = field(default_factory=dict)

    def add(self, host: str, reading: Reading) -> None:
        """Take a reading in; of two for one device in one round, the later counts."""
        place = (host, reading.device)
        self.rounds.setdefault(reading.round, {})[place] = reading.value
        self.seconds[place] = self.seconds.get(place, 0.0) + reading.seconds

    @property
    def repeated(self) -> bool:
        """Whether any node has repeated it."""
        return any(number > 0 for number in self.rounds)

    def means(self) -> Dict[Place, float]:
        """Return each device's mean over the rounds that it took part in."""
        found: Dict[Place, List[float]] = {}
        for values in self.rounds.values():
            for place, value in values.items():
                found.setdefault(place, []).append(value)
        return {place: sum(values) / len(values) for place, values in found.items()}


def make_groups(report: Report) -> List[FigureGroup]:
    """Return all comparable figures in the order in which they are first met; those without model stand alone."""
    groups: Dict[Tuple[str, ...], FigureGroup] = {}
    for host, reading in _readings(report):
        if not is_figure(reading):
            continue
        alone = () if reading.model else (host, reading.device)
        key: Tuple[str, ...] = (reading.key, reading.model, reading.better, reading.unit, *alone)
        groups.setdefault(key, FigureGroup(reading)).add(host, reading)
    return list(groups.values())


def is_figure(reading: Reading) -> bool:
    """Return whether a reading's value can be compared at all: rates, times and counts are finite and not negative."""
    return math.isfinite(reading.value) and reading.value >= 0


def not_figures(report: Report) -> Iterator[Tuple[str, Finding]]:
    """Yield (host, finding) for readings that are no figures."""
    for host, reading in _readings(report):
        if not is_figure(reading):
            where = f" of {reading.device}" if reading.device else ""
            reason = f"{reading.metric}{where} was measured as {reading.value}, which is no figure; vet again"
            yield host, blank(reading, Severity.UNKNOWN, reason, device=reading.device)


def absent_figures(report: Report, groups: List[FigureGroup]) -> Iterator[Tuple[str, Finding]]:
    """Yield (host, finding) for nodes that say nothing of a quantity that others measured on the same model.

    A node that has hung is named for that alone; one whose check says itself that it could not tell, by that.
    """
    troubled = {node.host: _troubled_checks(node) for node in report.nodes}
    for group in groups:
        model, check = group.sample.model, group.sample.check
        if not model:
            continue
        places = {place for values in group.rounds.values() for place in values}
        everywhere = _on_each_device(report, model, places)
        for node in report.nodes:
            expected = node.models.get(model, 0)
            wanted = expected if everywhere else min(expected, 1)
            got = sum(place[0] == node.host for place in places)
            if got >= wanted or node.missing or check in troubled[node.host]:
                continue
            reason = (
                f"{group.sample.metric} was measured on {got} of {wanted} devices of model {model}; vet again"
            )
            yield node.host, blank(group.sample, Severity.UNKNOWN, reason)


def blank(reading: Reading, severity: Severity, reason: str, device: str = "") -> Finding:
    """Return a finding on a quantity, without a value."""
    return Finding(
        check=reading.check,
        severity=severity,
        reason=reason,
        device=device,
        rule="measured",
        metric=reading.metric,
        unit=reading.unit,
    )


def _readings(report: Report) -> Iterator[Tuple[str, Reading]]:
    for node in report.nodes:
        for outcome in node.outcomes:
            for reading in outcome.readings:
                yield node.host, reading


def _troubled_checks(node: NodeReport) -> FrozenSet[str]:
    findings = (finding for outcome in node.outcomes for finding in outcome.findings)
    return frozenset(
        finding.check for finding in findings if finding.severity in {Severity.CRITICAL, Severity.UNKNOWN}
    )


def _on_each_device(report: Report, model: str, places: Set[Place]) -> bool:
    """Return whether some node with several such devices measured all: else the check reads one of them only."""
    several = [node for node in report.nodes if node.models.get(model, 0) > 1]
    return any(sum(place[0] == node.host for place in places) >= node.models[model] for node in several)


def spell(value: float, unit: str) -> str:
    """Return a figure for people: ``612.3 TFLOP/s``, ``0.41 s``, ``12 pages``."""
    if unit in {"FLOP/s", "B/s", "B", "Hz", "1/s"}:
        for factor, prefix in _PREFIXES.items():
            if value >= factor:
                return f"{value / factor:.4g} {prefix}{unit.removeprefix('1')}"
    return f"{value:.4g} {unit}".rstrip()
