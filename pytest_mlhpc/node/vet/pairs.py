"""PAYLOAD. Exchanges between nodes: which node is slow or dumb, and in a deep vetting which connection.

A node's score is its best exchange over all rounds, so that a bad partner does it no harm; scores are compared with the
median of all nodes' scores. Whoever is beyond the warn bound, or had no exchange done, is confirmed with good partners.
A node is condemned only by partners that are good themselves: two of them, or the one that confirms. Of two nodes alone
nobody can tell which is slow, but that both are as fast as this site's history says.
"""

from __future__ import annotations

from typing import Dict, FrozenSet, Iterator, List, Optional, Set, Tuple

from pytest_mlhpc.node.protocol.vet_settings import Learned, Settings
from pytest_mlhpc.node.vet.exchanges import Exchanges, partner, sort_out
from pytest_mlhpc.node.vet.figures import spell
from pytest_mlhpc.node.vet.finding import UNCOMPARED, Finding, Severity
from pytest_mlhpc.node.vet.links import judge_links, slow_links
from pytest_mlhpc.node.vet.policy import Policy
from pytest_mlhpc.node.vet.report import Report
from pytest_mlhpc.node.vet.schedule import Pair, Round, pack
from pytest_mlhpc.node.vet.spread import Peers, stage
from pytest_mlhpc.node.vet.verdict import LinkVerdict

#: ``Finding.check`` of all that is said here.
CHECK = "pairs"

#: As many good partners condemn a node: with one, it may be the connection.
WITNESSES = 2

_OUT = "leave the node out and have its network looked at"


def confirm_schedule(report: Report, policy: Policy) -> Tuple[Round, ...]:
    """Return the rounds, of stage ``confirm``, that decide about nodes under suspicion; in a deep vetting slow links as well.

    Each such node gets two good partners, if possible ones that it has not met: of one that met only bad nodes before, a
    single exchange would be compared with the best of three. Empty where nobody is under suspicion or nobody
    is known to be good.
    """
    pairs: Dict[FrozenSet[str], Pair] = {}
    for seen in sort_out(report):
        if not seen.judgeable:
            continue
        found = _confirmations(seen, policy)
        if report.level == "deep":
            found.extend(slow_links(seen, _good(seen, policy), policy))
        pairs.update({frozenset(pair): pair for pair in found})
    return pack(list(pairs.values()))


def judge_pairs(
    report: Report, settings: Settings, policy: Policy
) -> Tuple[List[Tuple[str, Finding]], Tuple[LinkVerdict, ...]]:
    """Return (host, finding) for all that is said of nodes, and what is said of connections between good ones."""
    findings: List[Tuple[str, Finding]] = []
    links: List[LinkVerdict] = []
    everything = sort_out(report)
    for seen in everything:
        learned = _find_learned(seen.key, settings, policy)
        judged = dict(_judge_live(seen, learned, policy))
        judged.update((host, _judge_silent(seen, host)) for host in seen.hosts if host not in seen.live)
        findings.extend(judged.items())
        good = {host for host in seen.live if judged[host].severity in {Severity.PASS, Severity.WARNING}}
        links.extend(judge_links(seen, good, policy, deep=report.level == "deep"))
    findings.extend(_left_out(report, {host for seen in everything for host in seen.hosts}))
    return findings, tuple(links)


def _confirmations(seen: Exchanges, policy: Policy) -> List[Pair]:
    good = sorted(_good(seen, policy), key=lambda host: -seen.best[host])
    used = dict.fromkeys(good, 0)
    met = {
        host: {partner(result, host) for result in (*seen.done[host], *seen.failed[host])}
        for host in seen.hosts
    }
    pairs = []
    for _ in range(min(WITNESSES, len(good))):
        for host in seen.hosts:
            if host in used:
                continue
            chosen = min(good, key=lambda each: ((each, host) in pairs, each in met[host], used[each]))
            used[chosen] += 1
            pairs.append((chosen, host))
    return pairs


def _good(seen: Exchanges, policy: Policy) -> Set[str]:
    stages = seen.stages(policy)
    return {
        host for host, severity in stages.items() if severity is Severity.PASS and not _is_accused(seen, host)
    }


def _is_accused(seen: Exchanges, host: str) -> bool:
    return len(seen.accusers(host)) >= WITNESSES


def _judge_live(seen: Exchanges, learned: Optional[Learned], policy: Policy) -> Iterator[Tuple[str, Finding]]:
    """Judge the hosts that have a score."""
    if not seen.judgeable:
        yield from _judge_two(seen, learned, policy)
        return
    peers, stages, good = seen.peers(policy), seen.stages(policy), _good(seen, policy)
    for host, value in seen.best.items():
        if _is_accused(seen, host):
            yield host, _accused(seen, host)
            continue
        severity, reason = stages[host], _score(value, peers)
        if severity is Severity.CRITICAL and not _is_proven(seen, host, good):
            reason += "; it has met too few good nodes to know whether it is to blame, vet again"
            severity = Severity.UNKNOWN
        elif severity is Severity.CRITICAL:
            reason += f"; {_OUT}"
        elif severity is Severity.WARNING:
            reason += "; watch it"
        elif learned is not None and _by_history(learned, value, policy) is not Severity.PASS:
            reason += (
                f", and this site's history says {spell(learned.median, 'B/s')}; have the network looked at"
            )
            yield (
                host,
                _finding(severity=Severity.WARNING, reason=reason, value=value, peers=peers, rule="history"),
            )
            continue
        yield host, _finding(severity, reason, value, peers)


def _is_proven(seen: Exchanges, host: str, good: Set[str]) -> bool:
    """Return whether enough good partners have seen that *host* is slow: its best exchange is, so all are."""
    results = [*seen.done[host], *seen.failed[host]]
    witnesses = {partner(result, host) for result in results} & good
    confirmed = any(result.stage == "confirm" and partner(result, host) in good for result in results)
    return confirmed or len(witnesses) >= WITNESSES


def _accused(seen: Exchanges, host: str) -> Finding:
    accusers = sorted(seen.accusers(host))
    text = next(result.trouble for result in seen.failed[host] if partner(result, host) in accusers)
    reason = f"exchanges with {' and '.join(accusers)} failed ({text or 'no rate'}), which had none fail with others"
    return _finding(Severity.CRITICAL, f"{reason}; {_OUT}", seen.best.get(host))


def _judge_silent(seen: Exchanges, host: str) -> Finding:
    """Judge a host with no exchange done."""
    failed = seen.failed[host]
    others = len(seen.hosts) - 1
    if not failed:
        if not others:
            return _finding(Severity.INFO, "no other node was there to exchange data with")
        return _finding(Severity.UNKNOWN, "none of its partners was there to exchange data with; vet again")
    met = {partner(result, host) for result in failed}
    text = failed[-1].trouble or "no rate"
    reason = f"none of {len(failed)} exchanges was done, with {', '.join(sorted(met))}: {text}"
    blamed = {result.blamed for result in failed}
    confirmed = any(result.stage == "confirm" and partner(result, host) in seen.live for result in failed)
    if confirmed or len(met & seen.live) >= WITNESSES or blamed == {host}:
        return _finding(Severity.CRITICAL, f"{reason}; {_OUT}")
    if blamed == met:  # it waited for those who did not answer, and met nobody else
        return _finding(Severity.INFO, f"{reason}; that is not held against this node")
    return _finding(Severity.UNKNOWN, f"{reason}; it is not known who is to blame, vet again with more nodes")


def _judge_two(seen: Exchanges, learned: Optional[Learned], policy: Policy) -> Iterator[Tuple[str, Finding]]:
    for host, value in seen.best.items():
        rate = f"the best exchange between these two nodes had {spell(value, 'B/s')}"
        if learned is None:
            reason = (
                f"{rate}; whether that is good, two nodes cannot tell without a history: vet with a third"
            )
            yield host, _finding(Severity.UNKNOWN, reason, value, rule=UNCOMPARED)
            continue
        past = f"this site's history says {spell(learned.median, 'B/s')} (median of {learned.count})"
        if _by_history(learned, value, policy) is Severity.PASS:
            yield host, _finding(Severity.PASS, f"{rate}; {past}", value, rule="history")
        else:
            reason = f"{rate}; {past}; one of them or their connection is slow: vet each with a third node"
            yield host, _finding(Severity.UNKNOWN, reason, value, rule="history")


def _left_out(report: Report, seen: Set[str]) -> Iterator[Tuple[str, Finding]]:
    """Name nodes that were there and had no exchange at all while others had."""
    present = [node.host for node in report.nodes if not node.missing]
    if report.pairs and len(present) > 1:
        for host in present:
            if host not in seen:
                yield (
                    host,
                    _finding(Severity.UNKNOWN, "it took no part in the exchanges between nodes; vet again"),
                )


def _by_history(learned: Learned, value: float, policy: Policy) -> Severity:
    return stage(Peers(learned.median, learned.mad, frozenset()), value, policy, "pairs")


def _find_learned(key: str, settings: Settings, policy: Policy) -> Optional[Learned]:
    """Return what history says of nodes' scores in exchanges of *key*; it stands there under no model."""
    least = policy["history.count"].fail
    for learned in settings.learned:
        if (
            learned.key == key
            and not learned.model
            and not learned.host
            and least is not None
            and learned.count >= least
        ):
            return learned if learned.median > 0 and learned.mad >= 0 else None
    return None


def _score(value: float, peers: Peers[str]) -> str:
    middle = spell(peers.median, "B/s")
    worse = peers.share(value)
    than = f"{worse:.1%} below" if worse > 0 else "not below"
    return f"its best exchange with another node had {spell(value, 'B/s')}, {than} the median of all nodes, {middle}"


def _finding(
    severity: Severity,
    reason: str,
    value: Optional[float] = None,
    peers: Optional[Peers[str]] = None,
    rule: str = "pairs",
) -> Finding:
    return Finding(
        check=CHECK,
        severity=severity,
        reason=reason,
        rule=rule,
        metric="exchange",
        value=value,
        unit="B/s",
        peer_median=None if peers is None else peers.median,
        mad=None if peers is None else peers.mad,
    )
