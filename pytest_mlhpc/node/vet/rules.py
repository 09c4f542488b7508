"""PAYLOAD. The rule by which figures are judged: peers, where they can tell; else floor and history; else nobody knows.

1. A figure beyond the warn bound (3.5 MAD and 3 % of the peers' median) makes all nodes repeat it; the mean of both
   rounds is judged. CRITICAL beyond max(5 MAD, 5 %), WARNING beyond the warn bound.
2. Peers cannot decide with fewer than 4 nodes, with more than a third of the nodes *low* (``spread.py``), or where they
   differ so much that nothing would be beyond the bound. Then a floor (``floors.py``) and what this site has learned
   decide. Of few nodes with four or more devices, one that is worse than the others is still named.
3. History tightens: it can make a verdict worse, never better. A floor that all peers miss warns only, as it is the floor
   that may not fit them.
4. Where nothing decides, what the node itself has reached before does, by a warning at most.
5. Without that the finding is UNKNOWN: ``unjudged`` where peers contradict each other, else ``uncompared``, which
   the judge takes for INFO unless a comparison is required.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Iterator, List, Mapping, Optional, Tuple

from pytest_mlhpc.node.protocol.vet_settings import Learned, Settings
from pytest_mlhpc.node.vet import floors
from pytest_mlhpc.node.vet.figures import Group, Place, absent_figures, make_groups, not_figures, spell
from pytest_mlhpc.node.vet.finding import OWN_HISTORY, UNCOMPARED, Finding, Severity
from pytest_mlhpc.node.vet.jury import Jury, call_jury
from pytest_mlhpc.node.vet.policy import Policy
from pytest_mlhpc.node.vet.report import Report
from pytest_mlhpc.node.vet.spread import Peers, limit_of, stage

#: The worse, the higher. UNKNOWN yields to CRITICAL alone.
RANKS: Mapping[Severity, int] = {
    Severity.PASS: 0,
    Severity.INFO: 1,
    Severity.WARNING: 2,
    Severity.UNKNOWN: 3,
    Severity.CRITICAL: 4,
}

_ADVICE: Mapping[Severity, str] = {
    Severity.CRITICAL: "; leave the node out and have it looked at",
    Severity.WARNING: "; watch it",
}


@dataclass(frozen=True)
class Mark:
    """What one rule says of one figure."""

    severity: Severity
    rule: str
    reason: str
    floor: Optional[float] = None


def judge_readings(report: Report, settings: Settings, policy: Policy) -> Iterator[Tuple[str, Finding]]:
    """Yield (host, finding) for every figure that was measured, and for those that were not."""
    groups = make_groups(report)
    yield from not_figures(report)
    yield from absent_figures(report, groups)
    for group in groups:
        values = group.means()
        jury = call_jury(group, values, settings, policy)
        for place, value in values.items():
            mark = _judge(group, place, value, jury, policy)
            yield place[0], _finding(group, place, value, jury, mark)


def keys_to_repeat(report: Report, settings: Settings, policy: Policy) -> Tuple[str, ...]:
    """Return keys of readings that all nodes have to repeat: some figure is bad, or peers are confused, after one round."""
    groups = make_groups(report)
    return tuple(sorted({group.sample.key for group in groups if _is_suspicious(group, settings, policy)}))


def _is_suspicious(group: Group, settings: Settings, policy: Policy) -> bool:
    if group.repeated:
        return False
    values = group.means()
    jury = call_jury(group, values, settings, policy)
    marks = [_judge(group, place, value, jury, policy) for place, value in values.items()]
    # A floor that peers miss together would be missed again, and what nobody can judge would not be judged then.
    idle = {"unjudged", UNCOMPARED, "floor"} if jury.decide else {"unjudged", UNCOMPARED}
    return jury.confused or any(
        mark.severity is not Severity.PASS and mark.rule not in idle for mark in marks
    )


def _judge(group: Group, place: Place, value: float, jury: Jury, policy: Policy) -> Mark:
    """Return the worst that anybody who may judge says; of equals, peers come first."""
    what = _what(group, place, value)
    marks: List[Mark] = []
    if jury.peers is not None:
        peer = _by_peers(group, what, value, jury.peers, policy)
        if jury.decide or peer.severity is not Severity.PASS:
            marks.append(peer)
    if jury.floor is not None:
        marks.append(_by_floor(what, value, jury.floor, agreed=jury.decide))
    if jury.learned is not None:
        marks.append(_by_history(group, what, value, jury.learned, policy))
    own = jury.own.get(place[0])
    if not marks and own is not None:
        marks.append(_by_own(group, what, value, own, policy))
    if not marks:
        reason = f"{what}, not compared: {jury.why}, there is no floor for {_model(group)}, and no history"
        rule = "unjudged" if jury.confused else UNCOMPARED
        return Mark(Severity.UNKNOWN, rule, f"{reason}; vet again, or more nodes at once")
    worst = max(marks, key=lambda mark: RANKS[mark.severity])  # of equals the first
    if jury.confused and place in jury.low and worst.severity is Severity.PASS:
        return replace(
            worst, severity=Severity.WARNING, reason=f"{worst.reason}; yet {jury.why}, and this is a low one"
        )
    return worst


def _by_peers(group: Group, what: str, value: float, peers: Peers[Place], policy: Policy) -> Mark:
    if not peers.median:  # a counter that stands at 0 elsewhere: no share of it can be told
        if not value:
            return Mark(Severity.PASS, "peers", f"{what}, as with its peers")
        return Mark(
            Severity.WARNING, "peers", f"{what}, while most of its peers have 0{_ADVICE[Severity.WARNING]}"
        )
    check, unit = group.sample.check, group.sample.unit
    severity = stage(peers, value, policy, check=check)
    worse, middle = peers.share(value), spell(peers.median, unit)
    if severity is Severity.PASS:
        return Mark(severity, "peers", f"{what}; the median of its peers is {middle}")
    limit = limit_of(peers, policy, severity, check=check) or 0.0  # not None where stage() has reached it
    reason = (
        f"{what}, {worse:.1%} worse than the median of its peers, {middle}, where {limit:.1%} is the bound"
    )
    return Mark(severity, "peers", reason + _ADVICE[severity])


def _by_floor(what: str, value: float, floor: floors.Floor, *, agreed: bool) -> Mark:
    """Judge by a floor; *agreed*: its peers are as they are, so that it is the floor that may not fit."""
    source = f"floor of {floor.hardware}, {floor.confidence} confidence, {floor.source}"
    bound = spell(floor.fail, floor.unit)
    if value < floor.fail:
        reason = f"{what}, below {bound} ({source})"
        if agreed:
            return Mark(
                Severity.WARNING, "floor", f"{reason}, as its peers may be; look at all nodes", floor.fail
            )
        if floor.confidence == "low":
            return Mark(
                Severity.UNKNOWN, "floor", f"{reason}: that is too little known to condemn a node", floor.fail
            )
        return Mark(Severity.CRITICAL, "floor", reason + _ADVICE[Severity.CRITICAL], floor.fail)
    if floor.warn is not None and value < floor.warn:
        reason = f"{what}, below {spell(floor.warn, floor.unit)} ({source}){_ADVICE[Severity.WARNING]}"
        return Mark(Severity.WARNING, "floor", reason, floor.fail)
    return Mark(Severity.PASS, "floor", f"{what}, not below {bound} ({source})", floor.fail)


def _by_history(group: Group, what: str, value: float, learned: Learned, policy: Policy) -> Mark:
    past: Peers[Place] = Peers(learned.median, learned.mad, frozenset(), group.sample.better)
    severity = stage(past, value, policy, check=group.sample.check)
    middle = spell(learned.median, group.sample.unit)
    if severity is Severity.PASS:
        return Mark(
            severity, "history", f"{what}; the median of {learned.count} in this site's history is {middle}"
        )
    worse = (
        f"{past.share(value):.1%} worse than the median of {learned.count} in this site's history, {middle}"
    )
    return Mark(severity, "history", f"{what}, {worse}{_ADVICE[severity]}")


def _by_own(group: Group, what: str, value: float, own: Learned, policy: Policy) -> Mark:
    """Judge by what the node itself has reached before: a warning at most, as it may always have been slow."""
    past: Peers[Place] = Peers(own.median, own.mad, frozenset(), group.sample.better)
    figures = "1 earlier figure" if own.count == 1 else f"the median of {own.count} earlier figures"
    middle = f"{figures} of this node is {spell(own.median, group.sample.unit)}"
    bound, worse = _own_bound(own, policy), past.share(value)
    if bound is None or worse < bound:
        return Mark(Severity.PASS, OWN_HISTORY, f"{what}; {middle}")
    reason = f"{what}, {worse:.1%} worse than before: {middle}"
    return Mark(Severity.WARNING, OWN_HISTORY, reason + _ADVICE[Severity.WARNING])


def _own_bound(own: Learned, policy: Policy) -> Optional[float]:
    """Return the share of the median by which a figure must be worse; the figures' own spread, where there are enough of them."""
    count = policy["history.own_count"].warn
    if count is None or own.count < count:
        return policy["history.own"].warn
    mads, least = policy["history.own_mads"].warn, policy["history.own_least"].warn
    if mads is None or least is None:
        return None
    return max(mads * own.mad / own.median, least)


def _finding(group: Group, place: Place, value: float, jury: Jury, mark: Mark) -> Finding:
    sample, peers = group.sample, jury.peers
    return Finding(
        check=sample.check,
        severity=mark.severity,
        reason=mark.reason,
        device=place[1],
        rule=mark.rule,
        metric=sample.metric,
        value=value,
        unit=sample.unit,
        peer_median=None if peers is None else peers.median,
        mad=None if peers is None else peers.mad,
        floor=mark.floor if jury.floor is None else jury.floor.fail,
        seconds=group.seconds[place],
    )


def _what(group: Group, place: Place, value: float) -> str:
    where = f" of {place[1]}" if place[1] else ""
    mean = ", mean of two rounds" if group.repeated else ""
    return f"{group.sample.metric}{where} is {spell(value, group.sample.unit)}{mean}"


def _model(group: Group) -> str:
    return group.sample.model or "an unnamed model"
