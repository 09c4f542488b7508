"""How often vetting is wrong, by simulation with the judge itself: figures are made up, everything else is the real code.

Each node has its own true rate, and each round adds noise. How a healthy spread of 1.5 % divides into the two is not known
and differs by machine, so both ends are shown: *noise*, all of it new in each round, as in the error rates of the
rule's design; and *lasting*, all of it a property of the node, where a second round tells nothing. What must be reached is
judged for noise; a node that is always 1.5 % worse than its peers makes 5 MADs 7.5 %, and no rule with that bound
finds many more than 63 % of those 8 % slow.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.report import Row, table
from pytest_mlhpc.node.protocol.plan import VetSettings
from pytest_mlhpc.node.vet.figures import keys_to_repeat
from pytest_mlhpc.node.vet.finding import (
    CheckOutcome,
    Fitness,
    NodeReport,
    PairResult,
    Reading,
    Report,
    Severity,
    VetVerdict,
)
from pytest_mlhpc.node.vet.judge import judge
from pytest_mlhpc.node.vet.pairs import Round, confirm_schedule, pair_schedule
from pytest_mlhpc.node.vet.policy import built_in

SPREAD = 0.015
KEY, MODEL, RATE = "gemm/bf16/8192/random", "a device", 7e14
BANDWIDTH = 1e10
POLICY, SETTINGS = built_in(), VetSettings()

#: How many node verdicts a figure rests on, and at least and at most how many allocations.
VERDICTS, FEWEST, MOST = 400_000, 3_000, 20_000

#: Share of that in an ordinary run, which takes two minutes of one core.
SCALE = 0.3


@dataclass(frozen=True)
class World:
    """*nodes* nodes with *devices* devices each, the first *slow* of them slower by *by*; *lasting*: spread is the node's own."""

    nodes: int
    slow: int = 0
    by: float = 0.0
    devices: int = 1
    lasting: bool = False
    spread: float = SPREAD

    @property
    def hosts(self) -> list[str]:
        """Names of the nodes."""
        return [f"node{i}" for i in range(self.nodes)]

    @property
    def bad(self) -> set[str]:
        """Names of the slow ones."""
        return set(self.hosts[: self.slow])

    def trials(self, scale: float) -> int:
        """Return how many allocations to simulate."""
        return int(scale * min(MOST, max(FEWEST, VERDICTS // (self.nodes * self.devices))))


@dataclass(frozen=True)
class Shares:
    """Shares of allocations in which all slow nodes were found, a good one was lost, and nobody could tell."""

    found: float
    lost: float
    unknown: float


def vet_figures(world: World, draw: np.random.Generator) -> VetVerdict:
    """Return the verdict on an allocation whose devices are compared by one quantity, with a repeat if the judge wants one."""
    shape = (world.nodes, world.devices)
    true = np.full(shape, RATE)
    true[: world.slow] *= 1 - world.by
    own = 1 + world.spread * draw.standard_normal(shape)
    rounds = [
        true * (own if world.lasting else 1 + world.spread * draw.standard_normal(shape)) for _ in range(2)
    ]
    report = _report(world, rounds[:1])
    if keys_to_repeat(report, SETTINGS, POLICY):
        report = _report(world, rounds)
    return judge(report, SETTINGS, POLICY)


def vet_pairs(
    world: World, draw: np.random.Generator, *, confirm: bool = True, level: str = "quick", link: float = 1.0
) -> VetVerdict:
    """Return the verdict on an allocation of which only exchanges are known, each as fast as the slower partner.

    The connection of the last two nodes has the share *link* of the usual rate.
    """
    last = set(world.hosts[-2:])
    speed = {host: BANDWIDTH * (1 - world.by * (host in world.bad)) for host in world.hosts}
    nodes = tuple(NodeReport(host) for host in world.hosts)

    def exchange(rounds: Sequence[Round], stage: str) -> Iterator[PairResult]:
        for number, pairs in enumerate(rounds):
            for first, second in pairs:
                rate = min(speed[first], speed[second]) * (1 + world.spread * draw.standard_normal())
                rate *= link if {first, second} == last else 1.0
                yield PairResult(number, first, second, float(rate), stage=stage, key="gloo/32MiB")

    results = tuple(exchange(pair_schedule(world.hosts, level), "rounds"))
    if confirm:
        results += tuple(exchange(confirm_schedule(Report(nodes, results, level), POLICY), "confirm"))
    return judge(Report(nodes, results, level), SETTINGS, POLICY)


def simulate(
    world: World, vet: Callable[[World, np.random.Generator], VetVerdict], trials: int, seed: int = 1
) -> Shares:
    """Vet *trials* allocations of a world."""
    draw = np.random.default_rng(seed)
    found = lost = unknown = 0
    for _ in range(trials):
        fitness = _by_comparison(vet(world, draw))
        unfit = {host for host, each in fitness.items() if each is Fitness.UNFIT}
        found += world.bad <= unfit
        lost += bool(unfit - world.bad)
        unknown += any(each is Fitness.UNKNOWN for each in fitness.values())
    return Shares(found / trials, lost / trials, unknown / trials)


def _by_comparison(verdict: VetVerdict) -> Mapping[str, Fitness]:
    """Return what is said of each node, but for what is said of all because the report has nothing else."""
    words = {Severity.CRITICAL: Fitness.UNFIT, Severity.UNKNOWN: Fitness.UNKNOWN}
    found = {}
    for node in verdict.nodes:
        severities = {finding.severity for finding in node.findings if finding.check != "presence"}
        worst = next((severity for severity in words if severity in severities), None)
        found[node.host] = Fitness.FIT if worst is None else words[worst]
    return found


def _report(world: World, rounds: Sequence[np.ndarray]) -> Report:
    def readings(node: int) -> Iterator[Reading]:
        for number, values in enumerate(rounds):
            for device, value in enumerate(values[node]):
                yield Reading(
                    "gemm", "gemm", KEY, MODEL, float(value), "FLOP/s", device=f"gpu{device}", round=number
                )

    return Report(
        tuple(
            NodeReport(host, outcomes=(CheckOutcome(readings=tuple(readings(i))),))
            for i, host in enumerate(world.hosts)
        )
    )


def _healthy(scale: float) -> Iterator[Row]:
    for nodes in (4, 8, 16, 64, 256):
        for lasting in (False, True):
            world = World(nodes, lasting=lasting)
            shares = simulate(world, vet_figures, world.trials(scale))
            bad = shares.lost + shares.unknown
            yield _row(f"{nodes} good nodes: one is lost", "<= 0.2 %", bad, bad <= 0.002, world)
    world = World(32, devices=8)
    shares = simulate(world, vet_figures, world.trials(scale))
    yield _row("32 good nodes of 8 devices: one is lost", "", shares.lost + shares.unknown, None, world)


def _slow(scale: float) -> Iterator[Row]:
    reach = {0.15: (8, 0.98), 0.08: (16, 0.60)}
    for by, (least, share) in reach.items():
        for nodes in (4, 8, 16, 64):
            for lasting in (False, True):
                world = World(nodes, slow=1, by=by, lasting=lasting)
                shares = simulate(world, vet_figures, world.trials(scale))
                bound = nodes >= least
                ok = shares.found >= share if bound and not lasting else None
                wanted = f">= {share:.0%}" if bound else ""
                yield _row(
                    f"one of {nodes} nodes {by * 100:.0f} % slow: found", wanted, shares.found, ok, world
                )


def _many(scale: float) -> Iterator[Row]:
    for nodes, slow in ((6, 2), (12, 4), (64, 21)):
        world = World(nodes, slow=slow, by=0.15, lasting=True)
        shares = simulate(world, vet_figures, world.trials(scale))
        yield _row(f"{slow} of {nodes} nodes 15 % slow: all found", "", shares.found, None, world)
    for nodes, slow in ((4, 2), (8, 3), (8, 4), (16, 8), (64, 32)):
        world = World(nodes, slow=slow, by=0.15, lasting=True)
        shares = simulate(world, vet_figures, world.trials(scale))
        what = f"{slow} of {nodes} nodes 15 % slow, no floor"
        yield _row(f"{what}: unknown", "", shares.unknown, None, world)
        yield _row(f"{what}: a good one lost", "", shares.lost, None, world)


def _exchanges(scale: float) -> Iterator[Row]:
    for nodes, slow in ((3, 1), (4, 1), (5, 1), (6, 2), (8, 2), (8, 3), (16, 5), (64, 10), (8, 4)):
        world = World(nodes, slow=slow, by=0.20)
        trials = int(scale * 1_000)
        shares = simulate(world, vet_pairs, trials)
        exact = min(shares.found, 1 - shares.lost)
        yield _row(
            f"pairs: {slow} of {nodes} nodes 20 % slow, named alone", "100 %", exact, exact == 1, world
        )
    world = World(8, slow=3, by=0.20)
    shares = simulate(world, lambda a, b: vet_pairs(a, b, confirm=False), int(scale * 1_000))
    yield _row(
        "pairs: 3 of 8 nodes, nobody confirms: a good one lost", "0 %", shares.lost, shares.lost == 0, world
    )
    for nodes in (4, 16, 64):
        world = World(nodes)
        shares = simulate(world, vet_pairs, int(scale * 1_000))
        bad = shares.lost + shares.unknown
        yield _row(f"pairs: {nodes} good nodes: one is lost", "<= 0.2 %", bad, bad <= 0.002, world)


def _links(scale: float) -> Iterator[Row]:
    """Rows on connections of a deep vetting: the bad one is named, and no other."""
    for nodes, link in ((4, 0.8), (8, 0.8), (16, 0.8), (32, 0.8), (32, 1.0)):
        world, draw, trials = World(nodes), np.random.default_rng(1), int(scale * 200)
        verdicts = [vet_pairs(world, draw, level="deep", link=link) for _ in range(trials)]
        wanted = [] if link == 1.0 else [tuple(world.hosts[-2:])]
        exact = sum([(each.first, each.second) for each in verdict.links] == wanted for verdict in verdicts)
        unblamed = all(Fitness.UNFIT not in _by_comparison(verdict).values() for verdict in verdicts)
        what = (
            "no connection of {} is bad: none is named"
            if link == 1.0
            else "one connection of {} is 20 % slow: named alone"
        )
        share = exact / trials if unblamed else 0.0
        yield _row(f"deep: {what.format(f'{nodes} nodes')}", "100 %", share, share == 1.0, world)


def _row(what: str, reach: str, share: float, ok: bool | None, world: World) -> Row:
    kind = "lasting" if world.lasting else "noise"
    return Row(f"{what} ({kind})", reach or "-", f"{share:.2%}", None if world.lasting and not ok else ok)


def run(scale: float = SCALE) -> list[Row]:
    """Simulate all; *scale* is the share of the full number of allocations."""
    return [*_healthy(scale), *_slow(scale), *_many(scale), *_exchanges(scale), *_links(scale)]


if __name__ == "__main__":
    print(table(run(float(sys.argv[1]) if len(sys.argv) > 1 else SCALE)))
