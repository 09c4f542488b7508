"""Exchanges between nodes: who exchanges with whom, and which node or connection is slow."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import AbstractSet, Dict, FrozenSet, Iterator, List, Mapping, Optional, Sequence, Set, Tuple

from pytest_mlhpc.node.protocol.plan import Learned, VetSettings
from pytest_mlhpc.node.vet.figures import Peers, find_learned, find_peers, mad, spell, stage
from pytest_mlhpc.node.vet.finding import UNCOMPARED, Finding, LinkVerdict, PairResult, Report, Severity
from pytest_mlhpc.node.vet.policy import Policy


@dataclass(frozen=True)
class Exchanges:
    """Exchanges of one *key* among ``hosts``: nodes that said all they had to, in order.

    Exchanges with any other node are left out: a missing partner says nothing about the one who waited for him.
    ``done`` and ``failed`` are by host; ``best`` is a host's fastest in B/s, its score, for hosts with any done.
    """

    key: str
    hosts: Tuple[str, ...]
    done: Mapping[str, Tuple[PairResult, ...]]
    failed: Mapping[str, Tuple[PairResult, ...]]
    best: Mapping[str, float]

    @property
    def live(self) -> FrozenSet[str]:
        """Hosts with any exchange done."""
        return frozenset(self.best)

    @property
    def judgeable(self) -> bool:
        """Whether scores can tell who is slow: of two hosts, either may be."""
        return len(self.best) > 2

    def peers(self, policy: Policy) -> Peers[str]:
        """Return the median of the scores, of which there must be some, and the MAD of exchanges, without hosts that are low.

        Low are those below the median by ``pairs.low_share``: a better half is no measure here, as two hosts share a score
        where each is the other's best. For the same reason the scores' own MAD may be nothing, or the width of all.
        """
        middle = statistics.median_high(self.best.values())
        share = policy["pairs.low_share"].fail
        low = frozenset(
            host for host, value in self.best.items() if share is not None and value < middle * (1 - share)
        )
        median = statistics.median(value for host, value in self.best.items() if host not in low)
        among = (result for host in self.best for result in self.done[host] if host == result.first)
        rates = [result.value for result in among if not {result.first, result.second} & low]
        return Peers(median, mad(rates, statistics.median(rates)) if rates else 0.0, low)

    def stages(self, policy: Policy) -> Dict[str, Severity]:
        """Return by which bound of ``pairs`` each live host is slow, if any; ``judgeable`` must hold."""
        peers = self.peers(policy)
        return {host: stage(peers, value, policy, "pairs") for host, value in self.best.items()}

    def accusers(self, host: str) -> FrozenSet[str]:
        """Return live partners whose exchange with *host* failed and who had none fail with anybody else."""
        partners = {partner(result, host) for result in self.failed[host]} & self.live
        return frozenset(
            each
            for each in partners
            if all(host in (result.first, result.second) for result in self.failed[each])
        )


def sort_out(report: Report) -> List[Exchanges]:
    """Return the exchanges of each key, in the order of their keys.

    One that failed before its back-end was known has no key; it counts with all of them.
    """
    present = [node.host for node in report.nodes if not node.missing]
    keys = {result.key for result in report.pairs}
    if len(keys) > 1 and not any(is_done(result) for result in report.pairs if not result.key):
        keys.discard("")
    return [_of_key(report, key, present) for key in sorted(keys)]


def partner(result: PairResult, host: str) -> str:
    """Return with whom *host* had this exchange."""
    return result.second if result.first == host else result.first


def is_done(result: PairResult) -> bool:
    """Return whether an exchange has a rate."""
    return not result.trouble and math.isfinite(result.value) and result.value > 0


def _of_key(report: Report, key: str, present: List[str]) -> Exchanges:
    of_key = (result for result in report.pairs if result.key == key or not (result.key or is_done(result)))
    mine = [result for result in of_key if result.first != result.second]
    met = {host for result in mine for host in (result.first, result.second)}
    hosts = tuple(host for host in present if host in met)
    among = [result for result in mine if result.first in hosts and result.second in hosts]
    done = {host: _of_host(among, host, done=True) for host in hosts}
    failed = {host: _of_host(among, host, done=False) for host in hosts}
    best = {host: max(result.value for result in results) for host, results in done.items() if results}
    return Exchanges(key, hosts, done, failed, best)


def _of_host(results: List[PairResult], host: str, *, done: bool) -> Tuple[PairResult, ...]:
    mine = (result for result in results if host in (result.first, result.second))
    return tuple(result for result in mine if is_done(result) is done)


Pair = Tuple[str, str]
Round = Tuple[Pair, ...]

#: Rounds of a quick vetting. A node's best exchange counts, and with two bad nodes each good one meets a good one in three
#: rounds; two rounds are not enough (``benchmarks/vet_simulation.py``).
QUICK_ROUNDS = 3

#: Most nodes of which each meets each other in a deep vetting; more are taken in groups of neighbours.
MOST_TOGETHER = 32


def pair_schedule(hosts: Sequence[str], level: str = "quick") -> Tuple[Round, ...]:
    """Return the rounds for *hosts*, in their order: three for quick, for deep so many that each meets each other.

    With an odd number one node rests in each round. Of more than 32 nodes, a deep schedule has groups of neighbours in
    the order of the allocation, equal in size but for one; links between groups are not examined. Two nodes have three rounds
    with each other; one node or none has no round.
    """
    if len(hosts) < 2:
        return ()
    if level != "deep":
        rounds = _circle(hosts)
        return tuple(rounds[i % len(rounds)] for i in range(QUICK_ROUNDS))
    if len(hosts) == 2:
        return tuple(_circle(hosts) * QUICK_ROUNDS)
    by_group = [_circle(group) for group in _groups(hosts)]
    most = max(len(rounds) for rounds in by_group)
    return tuple(
        tuple(pair for rounds in by_group for one in rounds[i : i + 1] for pair in one) for i in range(most)
    )


def pack(pairs: Sequence[Pair]) -> Tuple[Round, ...]:
    """Return rounds in which each of *pairs* is once, and no node twice in one; a pair goes into the first that is free."""
    rounds: List[List[Pair]] = []
    for pair in pairs:
        free = next((each for each in rounds if not any(set(pair) & set(other) for other in each)), None)
        if free is None:
            rounds.append([pair])
        else:
            free.append(pair)
    return tuple(tuple(each) for each in rounds)


def _circle(hosts: Sequence[str]) -> List[Round]:
    """Return a round for each other node: the first stays, the others move on by one place."""
    places: List[Optional[str]] = list(hosts)
    if len(places) % 2:
        places.append(None)
    fixed, ring = places[0], places[1:]
    rounds = []
    for _ in range(len(ring)):
        row = [fixed, *ring]
        met = zip(row[: len(row) // 2], reversed(row))
        rounds.append(tuple((a, b) for a, b in met if a is not None and b is not None))
        ring = [ring[-1], *ring[:-1]]
    return rounds


def _groups(hosts: Sequence[str]) -> List[Sequence[str]]:
    number = -(-len(hosts) // MOST_TOGETHER)
    edges = [len(hosts) * i // number for i in range(number + 1)]
    return [hosts[start:end] for start, end in zip(edges, edges[1:])]


#: Fewest connections that can be compared: those of four nodes.
FEWEST = 6


def slow_links(exchanges: Exchanges, good: AbstractSet[str], policy: Policy) -> List[Pair]:
    """Return connections between *good* hosts beyond the warn bound, for a second look."""
    rates = _rates(exchanges, good)
    if len(rates) < FEWEST:
        return []
    peers = find_peers(rates, "higher", policy)
    return [pair for pair, rate in rates.items() if stage(peers, rate, policy, "pairs") is not Severity.PASS]


def judge_links(
    exchanges: Exchanges, good: AbstractSet[str], policy: Policy, *, deep: bool
) -> Iterator[LinkVerdict]:
    """Yield connections between *good* hosts that failed, and in a *deep* vetting those whose mean rate is beyond the fail bound.

    None is called slow where more than a third is: then it is how the network is built, not a defect.
    """
    for pair, results in _by_pair(exchanges, good).items():
        failed = [result for result in results if result.trouble]
        if failed:
            times = f"{len(failed)} of {len(results)} exchanges failed, though both nodes had others done"
            yield LinkVerdict(*pair, reason=f"{times}: {failed[0].trouble}; have the connection checked")
    rates = _rates(exchanges, good)
    if not deep or len(rates) < FEWEST:
        return
    peers = find_peers(rates, "higher", policy)
    part = policy["peers.low_part"].fail
    if part is not None and len(peers.low) > part * len(rates):
        return
    for pair, rate in rates.items():
        if stage(peers, rate, policy, "pairs") is Severity.CRITICAL:
            yield _slow(pair, rate, peers)


def _slow(pair: Pair, rate: float, peers: Peers[Pair]) -> LinkVerdict:
    worse = f"{peers.share(rate):.1%} below the median of all connections between good nodes"
    reason = f"{spell(rate, 'B/s')}, {worse}, {spell(peers.median, 'B/s')}; have the connection checked"
    return LinkVerdict(*pair, reason=reason, value=rate, peer_median=peers.median)


def _rates(exchanges: Exchanges, good: AbstractSet[str]) -> Dict[Pair, float]:
    """Return the mean rate of each connection between *good* hosts that had an exchange done, in B/s."""
    found: Dict[Pair, float] = {}
    for pair, results in _by_pair(exchanges, good).items():
        values = [result.value for result in results if is_done(result)]
        if values:
            found[pair] = sum(values) / len(values)
    return found


def _by_pair(exchanges: Exchanges, good: AbstractSet[str]) -> Dict[Pair, List[PairResult]]:
    """Return all exchanges of each connection, the hosts of which are in the order of the allocation."""
    place = {host: i for i, host in enumerate(exchanges.hosts)}
    found: Dict[Pair, List[PairResult]] = {}
    for host in exchanges.hosts:
        for result in (*exchanges.done[host], *exchanges.failed[host]):
            first, second = sorted((result.first, result.second), key=place.__getitem__)
            if host == first and {first, second} <= good:
                found.setdefault((first, second), []).append(result)
    return found


#: ``Finding.check`` of all that is said here.
CHECK = "pairs"

#: As many good partners condemn a node: with one, it may be the connection.
WITNESSES = 2

_OUT = "leave the node out and have its network checked"


def confirm_schedule(report: Report, policy: Policy) -> Tuple[Round, ...]:
    """Return the rounds, of stage ``confirm``, that decide about nodes under suspicion; in a deep vetting slow links as well.

    Each such node gets two good partners, if possible ones that it has not met: of one that met only bad nodes before, a
    single exchange would be compared with the best of three. Empty where nobody is under suspicion or nobody
    is known to be good.
    """
    pairs: Dict[FrozenSet[str], Pair] = {}
    for exchanges in sort_out(report):
        if not exchanges.judgeable:
            continue
        found = _confirmations(exchanges, policy)
        if report.level == "deep":
            found.extend(slow_links(exchanges, _good(exchanges, policy), policy))
        pairs.update({frozenset(pair): pair for pair in found})
    return pack(list(pairs.values()))


def judge_pairs(
    report: Report, settings: VetSettings, policy: Policy
) -> Tuple[List[Tuple[str, Finding]], Tuple[LinkVerdict, ...]]:
    """Return (host, finding) for all that is said of nodes, and what is said of connections between good ones."""
    findings: List[Tuple[str, Finding]] = []
    links: List[LinkVerdict] = []
    everything = sort_out(report)
    for exchanges in everything:
        learned = find_learned(exchanges.key, "", settings, policy)
        judged = dict(_judge_live(exchanges, learned, policy))
        judged.update(
            (host, _judge_silent(exchanges, host)) for host in exchanges.hosts if host not in exchanges.live
        )
        findings.extend(judged.items())
        good = {host for host in exchanges.live if judged[host].severity in {Severity.PASS, Severity.WARNING}}
        links.extend(judge_links(exchanges, good, policy, deep=report.level == "deep"))
    findings.extend(_left_out(report, {host for exchanges in everything for host in exchanges.hosts}))
    return findings, tuple(links)


def _confirmations(exchanges: Exchanges, policy: Policy) -> List[Pair]:
    good = sorted(_good(exchanges, policy), key=lambda host: -exchanges.best[host])
    used = dict.fromkeys(good, 0)
    met = {
        host: {partner(result, host) for result in (*exchanges.done[host], *exchanges.failed[host])}
        for host in exchanges.hosts
    }
    pairs = []
    for _ in range(min(WITNESSES, len(good))):
        for host in exchanges.hosts:
            if host in used:
                continue
            chosen = min(good, key=lambda each: ((each, host) in pairs, each in met[host], used[each]))
            used[chosen] += 1
            pairs.append((chosen, host))
    return pairs


def _good(exchanges: Exchanges, policy: Policy) -> Set[str]:
    stages = exchanges.stages(policy)
    return {
        host
        for host, severity in stages.items()
        if severity is Severity.PASS and not _is_accused(exchanges, host)
    }


def _is_accused(exchanges: Exchanges, host: str) -> bool:
    return len(exchanges.accusers(host)) >= WITNESSES


def _judge_live(
    exchanges: Exchanges, learned: Optional[Learned], policy: Policy
) -> Iterator[Tuple[str, Finding]]:
    """Judge the hosts that have a score."""
    if not exchanges.judgeable:
        yield from _judge_two(exchanges, learned, policy)
        return
    peers, stages, good = exchanges.peers(policy), exchanges.stages(policy), _good(exchanges, policy)
    for host, value in exchanges.best.items():
        if _is_accused(exchanges, host):
            yield host, _accused(exchanges, host)
            continue
        severity, reason = stages[host], _score(value, peers)
        if severity is Severity.CRITICAL and not _is_proven(exchanges, host, good):
            reason += "; it has met too few good nodes to know whether it is to blame, vet again"
            severity = Severity.UNKNOWN
        elif severity is Severity.CRITICAL:
            reason += f"; {_OUT}"
        elif severity is Severity.WARNING:
            reason += "; watch it"
        elif learned is not None and _by_history(learned, value, policy) is not Severity.PASS:
            reason += (
                f", and this site's history says {spell(learned.median, 'B/s')}; have the network checked"
            )
            yield (
                host,
                _finding(severity=Severity.WARNING, reason=reason, value=value, peers=peers, rule="history"),
            )
            continue
        yield host, _finding(severity, reason, value, peers)


def _is_proven(exchanges: Exchanges, host: str, good: Set[str]) -> bool:
    """Return whether enough good partners have found that *host* is slow: its best exchange is, so all are."""
    results = [*exchanges.done[host], *exchanges.failed[host]]
    witnesses = {partner(result, host) for result in results} & good
    confirmed = any(result.stage == "confirm" and partner(result, host) in good for result in results)
    return confirmed or len(witnesses) >= WITNESSES


def _accused(exchanges: Exchanges, host: str) -> Finding:
    accusers = sorted(exchanges.accusers(host))
    text = next(result.trouble for result in exchanges.failed[host] if partner(result, host) in accusers)
    reason = f"exchanges with {' and '.join(accusers)} failed ({text or 'no rate'}), which had none fail with others"
    return _finding(Severity.CRITICAL, f"{reason}; {_OUT}", exchanges.best.get(host))


def _judge_silent(exchanges: Exchanges, host: str) -> Finding:
    """Judge a host with no exchange done."""
    failed = exchanges.failed[host]
    others = len(exchanges.hosts) - 1
    if not failed:
        if not others:
            return _finding(Severity.INFO, "no other node was there to exchange data with")
        return _finding(Severity.UNKNOWN, "none of its partners was there to exchange data with; vet again")
    met = {partner(result, host) for result in failed}
    text = failed[-1].trouble or "no rate"
    reason = f"none of {len(failed)} exchanges was done, with {', '.join(sorted(met))}: {text}"
    blamed = {result.blamed for result in failed}
    confirmed = any(
        result.stage == "confirm" and partner(result, host) in exchanges.live for result in failed
    )
    if confirmed or len(met & exchanges.live) >= WITNESSES or blamed == {host}:
        return _finding(Severity.CRITICAL, f"{reason}; {_OUT}")
    if blamed == met:  # it waited for those who did not answer, and met nobody else
        return _finding(Severity.INFO, f"{reason}; that does not count against this node")
    return _finding(Severity.UNKNOWN, f"{reason}; it is not known who is to blame, vet again with more nodes")


def _judge_two(
    exchanges: Exchanges, learned: Optional[Learned], policy: Policy
) -> Iterator[Tuple[str, Finding]]:
    for host, value in exchanges.best.items():
        rate = f"the best exchange between these two nodes had {spell(value, 'B/s')}"
        if learned is None:
            reason = (
                f"{rate}; two nodes without a history cannot say whether that is good: vet a third with them"
            )
            yield host, _finding(Severity.UNKNOWN, reason, value, rule=UNCOMPARED)
            continue
        past = f"this site's history says {spell(learned.median, 'B/s')} (median of {learned.count})"
        if _by_history(learned, value, policy) is Severity.PASS:
            yield host, _finding(Severity.PASS, f"{rate}; {past}", value, rule="history")
        else:
            reason = f"{rate}; {past}; one of them or their connection is slow: vet each with a third node"
            yield host, _finding(Severity.UNKNOWN, reason, value, rule="history")


def _left_out(report: Report, exchanges: Set[str]) -> Iterator[Tuple[str, Finding]]:
    """Name nodes that were there and had no exchange at all while others had."""
    present = [node.host for node in report.nodes if not node.missing]
    if report.pairs and len(present) > 1:
        for host in present:
            if host not in exchanges:
                yield (
                    host,
                    _finding(Severity.UNKNOWN, "it took no part in the exchanges between nodes; vet again"),
                )


def _by_history(learned: Learned, value: float, policy: Policy) -> Severity:
    return stage(Peers(learned.median, learned.mad, frozenset()), value, policy, "pairs")


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
