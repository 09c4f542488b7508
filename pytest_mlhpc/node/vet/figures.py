"""Figures: how they are judged by peers where there are enough, else by floors and by history. Pure."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field, replace
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

from pytest_mlhpc.node.protocol.plan import Learned, VetSettings
from pytest_mlhpc.node.vet.finding import (
    OWN_HISTORY,
    UNCOMPARED,
    Finding,
    NodeReport,
    Reading,
    Report,
    Severity,
)
from pytest_mlhpc.node.vet.policy import Bound, Floor, Policy, find_floor

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


@dataclass(frozen=True)
class References:
    """Who can judge a group's figures.

    ``peers`` are there if one that is worse than the others can be named; they ``decide`` if the others are good for that.
    ``why`` says why they do not decide. ``confused``: there are enough, but they contradict each other, and ``low`` are those far below the better half.
    ``own`` is by host what a node has reached before, for where nobody else can judge.
    """

    floor: Optional[Floor]
    learned: Optional[Learned]
    peers: Optional[Peers[Place]] = None
    decide: bool = False
    why: str = ""
    confused: bool = False
    low: FrozenSet[Place] = frozenset()
    own: Mapping[str, Learned] = field(default_factory=dict)


def find_references(
    group: FigureGroup, values: Mapping[Place, float], settings: VetSettings, policy: Policy
) -> References:
    """Return who can judge these figures of a group."""
    floor = find_floor(group.sample.floor, group.sample.model)
    if floor is not None and floor.unit != group.sample.unit:
        floor = None  # a check that says another unit than the floor must not condemn
    model = group.sample.model
    learned = find_learned(group.sample.key, model, settings, policy) if model else None
    hosts, least = {host for host, _ in values}, _least(policy)
    few = "" if len(hosts) >= least else f"it takes {least:g} nodes to be peers, and {len(hosts)} measured it"
    if len(values) < least:
        return References(floor, learned, why=few, own=_find_own(group.sample, settings))
    peers = find_peers(values, group.sample.better, policy, group.sample.check)
    confused = _confusion(group.sample.check, peers, values, policy, by_host=not few)
    if confused:
        return References(floor, learned, why=few or confused, confused=True, low=peers.low)
    own = _find_own(group.sample, settings)
    return References(floor, learned, peers=peers, decide=not few, why=few, own=own)


def _confusion(
    check: str, peers: Peers[Place], values: Mapping[Place, float], policy: Policy, *, by_host: bool
) -> str:
    """Return why peers contradict each other, or nothing. Of few nodes their devices are counted, else nodes."""
    everyone = {host for host, _ in values} if by_host else set(values)
    low = {host for host, _ in peers.low} if by_host else set(peers.low)
    part, mads = policy["peers.low_part"].fail, bound_of(policy, "peers.mads", check).fail
    blind = bound_of(policy, "peers.blind", check).fail
    who = "nodes" if by_host else "devices"
    if part is not None and len(low) > part * len(everyone):
        return f"{len(low)} of {len(everyone)} {who} are far below the others, so that peers cannot decide"
    if not peers.median:
        return "" if peers.better == "lower" else f"most {who} measured nothing"
    if blind is not None and mads is not None and mads * peers.mad / peers.median > blind:
        return f"{who} differ too much to be compared: 1.4826 x MAD is {peers.mad / peers.median:.0%} of the median"
    return ""


def find_learned(key: str, model: str, settings: VetSettings, policy: Policy) -> Optional[Learned]:
    """Return what this site's history says of a quantity on devices of a model, where that is enough to judge by."""
    least = policy["history.count"].fail
    for one in settings.learned if least is not None else ():
        if (one.key, one.model, one.host) == (key, model, "") and one.count >= (least or 0):
            return one if one.median > 0 and one.mad >= 0 else None
    return None


def _find_own(sample: Reading, settings: VetSettings) -> Mapping[str, Learned]:
    """Return by host what nodes themselves have reached before."""
    return {
        one.host: one
        for one in settings.learned
        if one.host and sample.model and (one.key, one.model) == (sample.key, sample.model) and one.median > 0
    }


def _least(policy: Policy) -> float:
    least = policy["peers.nodes"].fail
    return float("inf") if least is None else least


#: The worse, the higher. UNKNOWN yields to CRITICAL alone.
RANKS: Mapping[Severity, int] = {
    Severity.PASS: 0,
    Severity.INFO: 1,
    Severity.WARNING: 2,
    Severity.UNKNOWN: 3,
    Severity.CRITICAL: 4,
}

_ADVICE: Mapping[Severity, str] = {
    Severity.CRITICAL: "; leave the node out and have it checked",
    Severity.WARNING: "; watch it",
}


@dataclass(frozen=True)
class RuleResult:
    """What one rule says of one figure."""

    severity: Severity
    rule: str
    reason: str
    floor: Optional[float] = None


def judge_readings(report: Report, settings: VetSettings, policy: Policy) -> Iterator[Tuple[str, Finding]]:
    """Yield (host, finding) for every figure that was measured, and for those that were not."""
    groups = make_groups(report)
    yield from not_figures(report)
    yield from absent_figures(report, groups)
    for group in groups:
        values = group.means()
        references = find_references(group, values, settings, policy)
        for place, value in values.items():
            result = _judge_figure(group, place, value, references, policy)
            yield place[0], _figure_finding(group, place, value, references, result)


def keys_to_repeat(report: Report, settings: VetSettings, policy: Policy) -> Tuple[str, ...]:
    """Return keys of readings that all nodes have to repeat: some figure is bad, or peers are confused, after one round."""
    groups = make_groups(report)
    return tuple(sorted({group.sample.key for group in groups if _is_suspicious(group, settings, policy)}))


def _is_suspicious(group: FigureGroup, settings: VetSettings, policy: Policy) -> bool:
    if group.repeated:
        return False
    values = group.means()
    references = find_references(group, values, settings, policy)
    results = [_judge_figure(group, place, value, references, policy) for place, value in values.items()]
    # A floor that peers miss together would be missed again, and what nobody can judge would not be judged then.
    idle = {"unjudged", UNCOMPARED, "floor"} if references.decide else {"unjudged", UNCOMPARED}
    return references.confused or any(
        result.severity is not Severity.PASS and result.rule not in idle for result in results
    )


def _judge_figure(
    group: FigureGroup, place: Place, value: float, references: References, policy: Policy
) -> RuleResult:
    """Return the worst that anybody who may judge says; of equals, peers come first."""
    what = _what(group, place, value)
    results: List[RuleResult] = []
    if references.peers is not None:
        peer = _by_peers(group, what, value, references.peers, policy)
        if references.decide or peer.severity is not Severity.PASS:
            results.append(peer)
    if references.floor is not None:
        results.append(_by_floor(what, value, references.floor, agreed=references.decide))
    if references.learned is not None:
        results.append(_by_history(group, what, value, references.learned, policy))
    own = references.own.get(place[0])
    if not results and own is not None:
        results.append(_by_own(group, what, value, own, policy))
    if not results:
        reason = (
            f"{what}, not compared: {references.why}, there is no floor for {_model(group)}, and no history"
        )
        rule = "unjudged" if references.confused else UNCOMPARED
        return RuleResult(Severity.UNKNOWN, rule, f"{reason}; vet again, or more nodes at once")
    worst = max(results, key=lambda result: RANKS[result.severity])  # of equals the first
    if references.confused and place in references.low and worst.severity is Severity.PASS:
        return replace(
            worst,
            severity=Severity.WARNING,
            reason=f"{worst.reason}; yet {references.why}, and this is a low one",
        )
    return worst


def _by_peers(group: FigureGroup, what: str, value: float, peers: Peers[Place], policy: Policy) -> RuleResult:
    if not peers.median:  # a counter that stands at 0 elsewhere: no share of it can be computed
        if not value:
            return RuleResult(Severity.PASS, "peers", f"{what}, as with its peers")
        return RuleResult(
            Severity.WARNING, "peers", f"{what}, while most of its peers have 0{_ADVICE[Severity.WARNING]}"
        )
    check, unit = group.sample.check, group.sample.unit
    severity = stage(peers, value, policy, check=check)
    worse, middle = peers.share(value), spell(peers.median, unit)
    if severity is Severity.PASS:
        return RuleResult(severity, "peers", f"{what}; the median of its peers is {middle}")
    limit = limit_of(peers, policy, severity, check=check) or 0.0  # not None where stage() has reached it
    reason = (
        f"{what}, {worse:.1%} worse than the median of its peers, {middle}, where {limit:.1%} is the bound"
    )
    return RuleResult(severity, "peers", reason + _ADVICE[severity])


def _by_floor(what: str, value: float, floor: Floor, *, agreed: bool) -> RuleResult:
    """Judge by a floor; *agreed*: its peers are as they are, so that it is the floor that may not fit."""
    source = f"floor of {floor.hardware}, {floor.confidence} confidence, {floor.source}"
    bound = spell(floor.fail, floor.unit)
    if value < floor.fail:
        reason = f"{what}, below {bound} ({source})"
        if agreed:
            return RuleResult(
                Severity.WARNING, "floor", f"{reason}, as its peers may be; look at all nodes", floor.fail
            )
        if floor.confidence == "low":
            return RuleResult(
                Severity.UNKNOWN,
                "floor",
                f"{reason}: too little is known of it to condemn a node",
                floor.fail,
            )
        return RuleResult(Severity.CRITICAL, "floor", reason + _ADVICE[Severity.CRITICAL], floor.fail)
    if floor.warn is not None and value < floor.warn:
        reason = f"{what}, below {spell(floor.warn, floor.unit)} ({source}){_ADVICE[Severity.WARNING]}"
        return RuleResult(Severity.WARNING, "floor", reason, floor.fail)
    return RuleResult(Severity.PASS, "floor", f"{what}, not below {bound} ({source})", floor.fail)


def _by_history(group: FigureGroup, what: str, value: float, learned: Learned, policy: Policy) -> RuleResult:
    past: Peers[Place] = Peers(learned.median, learned.mad, frozenset(), group.sample.better)
    severity = stage(past, value, policy, check=group.sample.check)
    middle = spell(learned.median, group.sample.unit)
    if severity is Severity.PASS:
        return RuleResult(
            severity, "history", f"{what}; the median of {learned.count} in this site's history is {middle}"
        )
    worse = (
        f"{past.share(value):.1%} worse than the median of {learned.count} in this site's history, {middle}"
    )
    return RuleResult(severity, "history", f"{what}, {worse}{_ADVICE[severity]}")


def _by_own(group: FigureGroup, what: str, value: float, own: Learned, policy: Policy) -> RuleResult:
    """Judge by what the node itself has reached before: a warning at most, as it may always have been slow."""
    past: Peers[Place] = Peers(own.median, own.mad, frozenset(), group.sample.better)
    figures = "1 earlier figure" if own.count == 1 else f"the median of {own.count} earlier figures"
    middle = f"{figures} of this node is {spell(own.median, group.sample.unit)}"
    bound, worse = _own_bound(own, policy), past.share(value)
    if bound is None or worse < bound:
        return RuleResult(Severity.PASS, OWN_HISTORY, f"{what}; {middle}")
    reason = f"{what}, {worse:.1%} worse than before: {middle}"
    return RuleResult(Severity.WARNING, OWN_HISTORY, reason + _ADVICE[Severity.WARNING])


def _own_bound(own: Learned, policy: Policy) -> Optional[float]:
    """Return the share of the median by which a figure must be worse; the figures' own spread, where there are enough of them."""
    count = policy["history.own_count"].warn
    if count is None or own.count < count:
        return policy["history.own"].warn
    mads, least = policy["history.own_mads"].warn, policy["history.own_least"].warn
    if mads is None or least is None:
        return None
    return max(mads * own.mad / own.median, least)


def _figure_finding(
    group: FigureGroup, place: Place, value: float, references: References, result: RuleResult
) -> Finding:
    sample, peers = group.sample, references.peers
    return Finding(
        check=sample.check,
        severity=result.severity,
        reason=result.reason,
        device=place[1],
        rule=result.rule,
        metric=sample.metric,
        value=value,
        unit=sample.unit,
        peer_median=None if peers is None else peers.median,
        mad=None if peers is None else peers.mad,
        floor=result.floor if references.floor is None else references.floor.fail,
        seconds=group.seconds[place],
    )


def _what(group: FigureGroup, place: Place, value: float) -> str:
    where = f" of {place[1]}" if place[1] else ""
    mean = ", mean of two rounds" if group.repeated else ""
    return f"{group.sample.metric}{where} is {spell(value, group.sample.unit)}{mean}"


def _model(group: FigureGroup) -> str:
    return group.sample.model or "an unnamed model"
