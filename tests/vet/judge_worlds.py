"""Made-up allocations for the tests of the judge."""

from __future__ import annotations

import random

from pytest_mlhpc.vet.finding import Fact, Finding, Outcome, Reading, Severity
from pytest_mlhpc.vet.judge import judge, needs_repeat
from pytest_mlhpc.vet.pairs import confirm_schedule
from pytest_mlhpc.vet.policies.comparison import BOUNDS
from pytest_mlhpc.vet.policy import Policy
from pytest_mlhpc.vet.report import NodeReport, PairResult, Report
from pytest_mlhpc.vet.schedule import pair_schedule
from pytest_mlhpc.vet.settings import Settings

POLICY = Policy(BOUNDS)
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
    outcome = Outcome(
        findings=tuple(one for one in said if isinstance(one, Finding)),
        readings=tuple(one for one in said if isinstance(one, Reading)),
        facts=tuple(one for one in said if isinstance(one, Fact)),
    )
    return NodeReport(host, outcomes=(outcome,), **more)


def measured(values, again=(), **how):
    """A report of as many nodes as there are *values* in TFLOP/s, and of their second round, if any."""
    said = [[gemm(value * 1e12, **how)] for value in values]
    for readings, value in zip(said, again, strict=False):
        readings.append(gemm(value * 1e12, round=1, **how))
    return Report(tuple(node(f"n{i}", *readings) for i, readings in enumerate(said)))


def verdict_on(report, settings=None, policy=POLICY):
    return judge(report, settings or Settings(), policy)


def found(verdict, host, check="gemm"):
    """What is said of *host* by *check*: one finding."""
    (finding,) = [
        finding
        for each in verdict.nodes
        if each.host == host
        for finding in each.findings
        if finding.check == check
    ]
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

    def all_of(rounds, stage):
        for number, pairs in enumerate(rounds):
            for pair in pairs:
                words = (trouble or {}).get(frozenset(pair)) or next(
                    ((trouble or {})[host] for host in pair if host in (trouble or {})), None
                )
                if words:
                    yield PairResult(
                        number, *pair, trouble=words[0], blamed=words[1], stage=stage, key="gloo/32MiB"
                    )
                    continue
                rate = (
                    1e10
                    * min(speed.get(host, 1.0) for host in pair)
                    * (links or {}).get(frozenset(pair), 1.0)
                )
                noise = 1 + spread * draw.gauss(0, 1) if draw else 1.0
                yield PairResult(number, *pair, value=rate * noise, stage=stage, key="gloo/32MiB")

    results = tuple(all_of(pair_schedule(hosts, level), "rounds"))
    if confirm:
        more = confirm_schedule(Report(nodes, results, level), POLICY)
        results += tuple(all_of(more, "confirm"))
    return Report(nodes, results, level)


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
    return verdict_on(report([first, one_round()]) if needs_repeat(once, POLICY) else once)
