"""Bounds for comparing nodes with their peers, with floors, with this site's history, and pair by pair.

All were chosen or checked by simulation at a healthy spread of 1.5 % (``benchmarks/vet_simulation.py`` prints the
table). MAD always means 1.4826 x the median absolute deviation, which is a normal distribution's standard deviation.

A check may have its own: ``peers.share.storage`` counts in the place of ``peers.share`` for figures of the check ``storage``.
"""

from __future__ import annotations

from typing import Tuple

from pytest_mlhpc.node.vet.policy import Bound

_SIMULATED = "own simulation, benchmarks/vet_simulation.py"

BOUNDS: Tuple[Bound, ...] = (
    Bound(
        key="peers.mads",
        meaning="a figure this many MADs worse than the median of its peers; counts together with peers.share",
        source=f"{_SIMULATED}: 3 MADs lose a node of 11 to 33 % of all healthy allocations, 5 of 0.2 % at most",
        warn=3.5,
        fail=5.0,
    ),
    Bound(
        key="peers.share",
        meaning="a figure worse than the median of its peers by this share of it; counts together with peers.mads",
        source=f"{_SIMULATED}: below 5 % the spread of few nodes, which MAD estimates badly, loses healthy ones",
        warn=0.03,
        fail=0.05,
    ),
    Bound(
        key="peers.nodes",
        meaning="fewest nodes that can be one another's peers; with fewer, floor or history decide",
        source=f"{_SIMULATED}: of three nodes a slow one is a third of all",
        fail=4,
        better="higher",
    ),
    Bound(
        key="peers.low_share",
        meaning="low: worse than the median of the better half by this share of it; counts together with peers.low_mads",
        source=f"{_SIMULATED}: at 5 % nodes are called low by chance, at 10 % half a cluster 15 % slow is seen as spread",
        fail=0.07,
    ),
    Bound(
        key="peers.low_mads",
        meaning="low: this many spreads of the better half worse than its median; counts together with peers.low_share",
        source=f"{_SIMULATED}: as peers.low_share",
        fail=4.0,
    ),
    Bound(
        key="peers.low_part",
        meaning="where more than this part of the nodes is low, peers do not decide",
        source=f"{_SIMULATED}: MAD and median withstand a third once those that are low are left out",
        fail=1 / 3,
    ),
    Bound(
        key="peers.blind",
        meaning="peers that differ so much that only a node worse by more than this share would fail do not decide",
        source=f"{_SIMULATED}: half of the nodes 15 % slow gives 55 %; a healthy spread of 5 % gives 25 %",
        fail=0.40,
    ),
    Bound(
        key="history.count",
        meaning="fewest figures of good nodes and nights that make a history",
        source=f"{_SIMULATED}: the MAD of 20 figures is off by a quarter, of 8 by two fifths",
        fail=20,
        better="higher",
    ),
    Bound(
        key="history.own",
        meaning="a figure worse by this share than the median of the same node's earlier ones, where nothing else judges it",
        source="guess; a figure or two tell no spread, so that it warns only",
        warn=0.15,
    ),
    Bound(
        key="history.own_count",
        meaning="earlier figures of the same node from which their spread is the bound, in the place of history.own",
        source="as of baselines: from 8 on their spread counts",
        warn=8,
        better="higher",
    ),
    Bound(
        key="history.own_mads",
        meaning="such a figure this many MADs worse than the median of the same node's earlier ones",
        source="as of baselines: three robust standard deviations; own, benchmarks/vet_own_history.py: beside much other work 20 quick "
        "vettings of one machine differed by 14 to 24 %, and 4 of 60 figures were warned of",
        warn=3.0,
    ),
    Bound(
        key="history.own_least",
        meaning="such a figure worse by this share at least; with history.own_mads",
        source="as peers.share, fail: what a node differs by from its like without being faulty",
        warn=0.05,
    ),
    Bound(
        key="pairs.mads",
        meaning="a node's best exchange this many MADs slower than the median of all nodes' best",
        source=f"{_SIMULATED}: as peers.mads; a node beyond warn is confirmed with a good partner",
        warn=3.5,
        fail=5.0,
    ),
    Bound(
        key="pairs.share",
        meaning="a node's best exchange slower by this share than the median of all nodes' best; with pairs.mads",
        source=f"{_SIMULATED}: as peers.share",
        warn=0.03,
        fail=0.05,
    ),
    Bound(
        key="pairs.low_share",
        meaning="low: a node whose best exchange is slower by this share than the median of all nodes' best",
        source=f"{_SIMULATED}: as peers.low_share",
        fail=0.07,
    ),
    Bound(
        key="pairs.most",
        meaning="a node's best exchange slower by this share than the median of all nodes' best, however much they differ",
        source=f"{_SIMULATED}: the MAD of few exchanges may be thrice the truth, and 2 of 6 nodes 20 % slow then pass in 0.4 %",
        fail=0.15,
    ),
    Bound(
        key="clocks.apart",
        meaning="a node's clock this far from the median of all nodes' (of two: from the other's), beyond the error of looking",
        source="munge(7), munged(8): a credential off by more than its TTL, 300 s by default, is refused; 1 s is a guess",
        warn=1.0,
        fail=300.0,
        unit="s",
    ),
)


def _of_storage(check: str) -> Tuple[Bound, ...]:
    """Return what a check of storage has in the place of the general bounds.

    A file's way is shared with other nodes and users and with the page cache, and is looked at once: healthy nodes that wrote
    to one disk at the same time were seen to differ by 59 %. So only a node that is ten times as slow is out of the question.
    """
    guess = "guess; no source compares the storage of nodes"
    return (
        Bound(f"peers.share.{check}", "as peers.share", guess, warn=0.5, fail=0.9),
        Bound(f"peers.low_share.{check}", "as peers.low_share", guess, fail=0.5),
        Bound(
            f"peers.blind.{check}",
            "as peers.blind; none: however much it differs, a tenth is slow",
            guess,
        ),
    )


BOUNDS += (*_of_storage("storage"), *_of_storage("checkpoint"))
