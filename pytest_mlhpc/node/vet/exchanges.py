"""PAYLOAD. All exchanges between nodes with one back-end and size, sorted by who took part and what came of it."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Dict, FrozenSet, List, Mapping, Tuple

from pytest_mlhpc.node.vet.finding import Severity
from pytest_mlhpc.node.vet.policy import Policy
from pytest_mlhpc.node.vet.report import PairResult, Report
from pytest_mlhpc.node.vet.spread import Peers, mad, stage


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
