"""Made-up allocations for the tests of the judge."""

from __future__ import annotations

import random
from dataclasses import replace

from pytest_mlhpc.node.protocol.plan import VetSettings
from pytest_mlhpc.node.vet.figures import keys_to_repeat
from pytest_mlhpc.node.vet.finding import (
    CheckOutcome,
    Fact,
    Finding,
    NodeReport,
    PairResult,
    Reading,
    Report,
    Severity,
)
from pytest_mlhpc.node.vet.judge import judge
from pytest_mlhpc.node.vet.pairs import confirm_schedule, pair_schedule
from pytest_mlhpc.node.vet.policy import built_in

POLICY = built_in()
UNNAMED = "a device without floor"
A100 = "NVIDIA A100-SXM4-80GB"
KEY = "gemm/bf16/8192/random"
GOOD = Finding("edac", Severity.PASS, "no memory faults")


def names(count):
    return [f"n{i}" for i in range(count)]


def gemm(value, *, device="", model=UNNAMED, round=0, floor="gemm/bf16", better="higher", unit="FLOP/s"):  # noqa: A002 - named as in readings
    return Reading(
        "gemm", "gemm_bf16", KEY, model, value, unit, better=better, device=device, floor=floor, round=round
    )


def node(host, *said, **more):
    """A node that has said these findings, readings and facts."""
    of = [tuple(one for one in said if isinstance(one, kind)) for kind in (Finding, Reading, Fact)]
    return NodeReport(host, outcomes=(CheckOutcome(*of),), **more)


def measured(values, again=(), **how):
    """A report of as many nodes as there are *values* in TFLOP/s, and of their second round, if any."""
    said = [[gemm(value * 1e12, **how)] for value in values]
    for readings, value in zip(said, again, strict=False):
        readings.append(gemm(value * 1e12, round=1, **how))
    return Report(tuple(node(f"n{i}", *readings) for i, readings in enumerate(said)))


def verdict_on(report, settings=None, policy=POLICY):
    return judge(report, settings or VetSettings(), policy)


def found(verdict, host, check="gemm"):
    """What is said of *host* by *check*: one finding."""
    (each,) = [each for each in verdict.nodes if each.host == host]
    (finding,) = [finding for finding in each.findings if finding.check == check]
    return finding


def severities(verdict, check="gemm"):
    """Severity by host, as words, of *check*'s findings."""
    return {
        each.host: finding.severity.value
        for each in verdict.nodes
        for finding in each.findings
        if finding.check == check
    }


def exchanged(hosts, speed, *, level="quick", draw=None, spread=0.0, trouble=None, links=None, confirm=True):
    """A report of exchanges by the real schedule: each as fast as the slower partner, or its link.

    *trouble* maps a pair to (words, who is blamed); *links* a pair to a share of the usual rate.
    """
    nodes = tuple(node(host, GOOD) for host in hosts)
    trouble, links = trouble or {}, links or {}

    def result(number, pair, stage):
        words = next((trouble[one] for one in (frozenset(pair), *pair) if one in trouble), None)
        if words:
            said = {"trouble": words[0], "blamed": words[1]}
        else:
            noise = 1 + spread * draw.gauss(0, 1) if draw else 1.0
            share = min(speed.get(host, 1.0) for host in pair) * links.get(frozenset(pair), 1.0)
            said = {"value": 1e10 * share * noise}
        return PairResult(number, *pair, stage=stage, key="gloo/32MiB", **said)

    def all_of(rounds, stage):
        return tuple(result(number, pair, stage) for number, pairs in enumerate(rounds) for pair in pairs)

    report = Report(nodes, all_of(pair_schedule(hosts, level), "rounds"), level)
    if not confirm:
        return report
    return replace(report, pairs=report.pairs + all_of(confirm_schedule(report, POLICY), "confirm"))


def drawn(seed):
    return random.Random(seed)  # noqa: S311 - draws figures, not keys


def vetted(draw, nodes, *, slow=0, by=0.0, spread=0.015, devices=1):
    """The verdict on made-up figures, with the repeat that the judge wants."""

    def one_round():
        return [
            [700 * (1 - by * (i < slow)) * (1 + spread * draw.gauss(0, 1)) for _ in range(devices)]
            for i in range(nodes)
        ]

    def report(rounds):
        return Report(
            tuple(
                node(
                    f"n{i}",
                    *(
                        gemm(value * 1e12, device=f"gpu{d}", round=number)
                        for number, values in enumerate(rounds)
                        for d, value in enumerate(values[i])
                    ),
                )
                for i in range(nodes)
            )
        )

    first = one_round()
    once = report([first])
    return verdict_on(report([first, one_round()]) if keys_to_repeat(once, VetSettings(), POLICY) else once)
