"""PAYLOAD. Connections between two nodes that are bad although both nodes are good. Nobody is unfit for one."""

from __future__ import annotations

from typing import AbstractSet, Dict, Iterator, List

from pytest_mlhpc.node.vet.exchanges import Exchanges, is_done
from pytest_mlhpc.node.vet.figures import spell
from pytest_mlhpc.node.vet.finding import Severity
from pytest_mlhpc.node.vet.policy import Policy
from pytest_mlhpc.node.vet.report import PairResult
from pytest_mlhpc.node.vet.schedule import Pair
from pytest_mlhpc.node.vet.spread import Peers, find_peers, stage
from pytest_mlhpc.node.vet.verdict import LinkVerdict

#: Fewest connections that can be compared: those of four nodes.
FEWEST = 6


def slow_links(seen: Exchanges, good: AbstractSet[str], policy: Policy) -> List[Pair]:
    """Return connections between *good* hosts beyond the warn bound, for a second look."""
    rates = _rates(seen, good)
    if len(rates) < FEWEST:
        return []
    peers = find_peers(rates, "higher", policy)
    return [pair for pair, rate in rates.items() if stage(peers, rate, policy, "pairs") is not Severity.PASS]


def judge_links(
    seen: Exchanges, good: AbstractSet[str], policy: Policy, *, deep: bool
) -> Iterator[LinkVerdict]:
    """Yield connections between *good* hosts that failed, and in a *deep* vetting those whose mean rate is beyond the fail bound.

    None is called slow where more than a third is: then it is how the network is built, not a defect.
    """
    for pair, results in _by_pair(seen, good).items():
        failed = [result for result in results if result.trouble]
        if failed:
            times = f"{len(failed)} of {len(results)} exchanges failed, though both nodes had others done"
            yield LinkVerdict(*pair, reason=f"{times}: {failed[0].trouble}; have the connection looked at")
    rates = _rates(seen, good)
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
    reason = f"{spell(rate, 'B/s')}, {worse}, {spell(peers.median, 'B/s')}; have the connection looked at"
    return LinkVerdict(*pair, reason=reason, value=rate, peer_median=peers.median)


def _rates(seen: Exchanges, good: AbstractSet[str]) -> Dict[Pair, float]:
    """Return the mean rate of each connection between *good* hosts that had an exchange done, in B/s."""
    found: Dict[Pair, float] = {}
    for pair, results in _by_pair(seen, good).items():
        values = [result.value for result in results if is_done(result)]
        if values:
            found[pair] = sum(values) / len(values)
    return found


def _by_pair(seen: Exchanges, good: AbstractSet[str]) -> Dict[Pair, List[PairResult]]:
    """Return all exchanges of each connection, the hosts of which are in the order of the allocation."""
    place = {host: i for i, host in enumerate(seen.hosts)}
    found: Dict[Pair, List[PairResult]] = {}
    for host in seen.hosts:
        for result in (*seen.done[host], *seen.failed[host]):
            first, second = sorted((result.first, result.second), key=place.__getitem__)
            if host == first and {first, second} <= good:
                found.setdefault((first, second), []).append(result)
    return found
