"""PAYLOAD. Who exchanges with whom, round by round, by the circle method of tournaments: all pairs of a round at once."""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

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
