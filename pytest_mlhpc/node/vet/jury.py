"""PAYLOAD. Who can judge figures: peers, if there are enough who agree; a floor; what this site has learned."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import FrozenSet, Mapping, Optional

from pytest_mlhpc.node.protocol.vet_settings import Learned, Settings
from pytest_mlhpc.node.vet import floors
from pytest_mlhpc.node.vet.figures import Group, Place
from pytest_mlhpc.node.vet.finding import Reading
from pytest_mlhpc.node.vet.policy import Policy
from pytest_mlhpc.node.vet.spread import Peers, bound_of, find_peers


@dataclass(frozen=True)
class Jury:
    """Who can judge a group's figures.

    ``peers`` are there if one that is worse than the others can be named; they ``decide`` if the others are good for that.
    ``why`` says why they do not decide. ``confused``: there are enough, but they contradict each other, and ``low`` are those far below the better half.
    ``own`` is by host what a node has reached before, for where nobody else can judge.
    """

    floor: Optional[floors.Floor]
    learned: Optional[Learned]
    peers: Optional[Peers[Place]] = None
    decide: bool = False
    why: str = ""
    confused: bool = False
    low: FrozenSet[Place] = frozenset()
    own: Mapping[str, Learned] = field(default_factory=dict)


def call_jury(group: Group, values: Mapping[Place, float], settings: Settings, policy: Policy) -> Jury:
    """Return who can judge these figures of a group."""
    floor = floors.find(group.sample.floor, group.sample.model)
    if floor is not None and floor.unit != group.sample.unit:
        floor = None  # a check that says another unit than the floor must not condemn
    learned = _find_learned(group.sample, settings, policy)
    hosts, least = {host for host, _ in values}, _least(policy)
    few = "" if len(hosts) >= least else f"it takes {least:g} nodes to be peers, and {len(hosts)} measured it"
    if len(values) < least:
        return Jury(floor, learned, why=few, own=_find_own(group.sample, settings))
    peers = find_peers(values, group.sample.better, policy, group.sample.check)
    confused = _confusion(group.sample.check, peers, values, policy, by_host=not few)
    if confused:
        return Jury(floor, learned, why=few or confused, confused=True, low=peers.low)
    own = _find_own(group.sample, settings)
    return Jury(floor, learned, peers=peers, decide=not few, why=few, own=own)


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
        return f"{len(low)} of {len(everyone)} {who} are far below the others, so that peers do not tell who is right"
    if not peers.median:
        return "" if peers.better == "lower" else f"most {who} measured nothing"
    if blind is not None and mads is not None and mads * peers.mad / peers.median > blind:
        return f"{who} differ too much to be compared: 1.4826 x MAD is {peers.mad / peers.median:.0%} of the median"
    return ""


def _find_learned(sample: Reading, settings: Settings, policy: Policy) -> Optional[Learned]:
    least = policy["history.count"].fail
    for learned in settings.learned:
        same = (learned.key, learned.model) == (sample.key, sample.model) and sample.model
        if (
            same
            and not learned.host
            and least is not None
            and learned.count >= least
            and learned.median > 0
            and learned.mad >= 0
        ):
            return learned
    return None


def _find_own(sample: Reading, settings: Settings) -> Mapping[str, Learned]:
    """Return by host what nodes themselves have reached before."""
    return {
        one.host: one
        for one in settings.learned
        if one.host and sample.model and (one.key, one.model) == (sample.key, sample.model) and one.median > 0
    }


def _least(policy: Policy) -> float:
    least = policy["peers.nodes"].fail
    return float("inf") if least is None else least
