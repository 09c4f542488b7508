"""PAYLOAD. The judge: from all that is known to a verdict. Pure: no input, no output, no clock.

What a check said of its node stands as it is; figures are compared (``rules.py``), votes counted (``votes.py``), exchanges
between nodes read (``pairs.py``). Then each node is fit, unfit or unknown, and the whole has an exit code.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Dict, Iterator, List, Optional, Sequence, Tuple

from pytest_mlhpc.node.protocol.vet_settings import Settings
from pytest_mlhpc.node.vet.finding import UNCOMPARED, Finding, Severity
from pytest_mlhpc.node.vet.pairs import judge_pairs
from pytest_mlhpc.node.vet.policy import Policy
from pytest_mlhpc.node.vet.report import NodeReport, Report
from pytest_mlhpc.node.vet.rules import RANKS, judge_readings, keys_to_repeat
from pytest_mlhpc.node.vet.verdict import Exit, Fitness, NodeVerdict, Verdict
from pytest_mlhpc.node.vet.votes import count_votes

#: ``Finding.check`` of what is said of a node that did not say all.
PRESENCE = "presence"

#: What makes figures comparable that are not.
COMPARABLE = "to compare them, vet again here, or vet at least 4 nodes at once"


def judge(report: Report, settings: Settings, policy: Policy) -> Verdict:
    """Return the verdict on all nodes of *report*, in its order.

    A node is unfit with a CRITICAL finding, unknown with an UNKNOWN one or with none at all, else fit. Unknown nodes are
    used only where ``settings.unknown`` is warn; their findings stay what they are. A figure without anything to compare it
    with is INFO unless ``settings.require_comparison``.
    """
    found: Dict[str, List[Finding]] = {node.host: list(_own_findings(node)) for node in report.nodes}
    by_pairs, links = judge_pairs(report, settings, policy)
    for host, finding in [*judge_readings(report, settings, policy), *count_votes(report), *by_pairs]:
        lenient = finding.rule == UNCOMPARED and not settings.require_comparison
        found[host].append(replace(finding, severity=Severity.INFO) if lenient else finding)
    nodes = tuple(_judge_node(host, findings) for host, findings in found.items())
    usable = {Fitness.FIT, Fitness.UNKNOWN} if settings.unknown == "warn" else {Fitness.FIT}
    good = tuple(node.host for node in nodes if node.fitness in usable)
    need = settings.need or len(nodes)
    code, text = _decide(nodes, len(good), need)
    uncompared = _not_compared(nodes, good) if code is Exit.READY and settings.unknown != "warn" else ""
    if uncompared:
        code, text = Exit.NOT_COMPARED, uncompared
    return Verdict(
        exit=code,
        need=need,
        nodes=nodes,
        good=good,
        exclude=tuple(node.host for node in nodes if node.fitness not in usable),
        links=links,
        level=report.level,
        seconds=report.seconds,
        text=text,
    )


def needs_repeat(report: Report, policy: Policy, settings: Optional[Settings] = None) -> Tuple[str, ...]:
    """Return ``Reading.key`` of all that every node has to measure once more, as round 1; empty: nothing."""
    return keys_to_repeat(report, settings or Settings(), policy)


def worst_first(findings: Sequence[Finding]) -> Tuple[Finding, ...]:
    """Return findings from CRITICAL over UNKNOWN to PASS; those that are equally bad stay in their order."""
    return tuple(sorted(findings, key=lambda finding: -RANKS[finding.severity]))


def _own_findings(node: NodeReport) -> Iterator[Finding]:
    if node.missing:
        while_doing = f" while it did {node.unfinished}" if node.unfinished else ""
        reason = f"the node did not say all: {node.missing}{while_doing}; leave it out and have it looked at"
        yield Finding(PRESENCE, Severity.CRITICAL, reason, rule=PRESENCE)
    said = [finding for outcome in node.outcomes for finding in outcome.findings]
    yield from said
    if not node.missing and not any(_says_anything(outcome) for outcome in node.outcomes):
        reason = "the node was not examined: no check has said anything of it; vet again"
        yield Finding(PRESENCE, Severity.UNKNOWN, reason, rule=PRESENCE)


def _says_anything(outcome: object) -> bool:
    return any(getattr(outcome, name) for name in ("findings", "readings", "facts"))


def _judge_node(host: str, findings: Sequence[Finding]) -> NodeVerdict:
    ordered = worst_first(findings)
    worst = ordered[0]
    if worst.severity is Severity.CRITICAL:
        fitness = Fitness.UNFIT
    elif worst.severity is Severity.UNKNOWN:
        fitness = Fitness.UNKNOWN
    else:
        fitness = Fitness.FIT
    trouble = RANKS[worst.severity] >= RANKS[Severity.WARNING]
    blame = "" if fitness is Fitness.UNKNOWN else f"[{worst.origin.value}] "
    reason = f"{blame}{worst.reason}" if trouble else ""
    return NodeVerdict(host, fitness, reason, ordered)


def _not_compared(nodes: Sequence[NodeVerdict], good: Sequence[str]) -> str:
    """Return which metrics of good nodes have nothing to be compared with, and what would help; empty: none."""
    used = [node for node in nodes if node.host in set(good)]
    metrics = dict.fromkeys(one.metric for node in used for one in node.findings if one.rule == UNCOMPARED)
    if not metrics:
        return ""
    return f"{', '.join(metrics)}: no peers, no floor and no history; {COMPARABLE}"


def _decide(nodes: Sequence[NodeVerdict], good: int, need: int) -> Tuple[Exit, str]:
    """Return the exit code; with 3, why: too few are fit, and those that nobody can judge would have been enough."""
    if not nodes:
        return Exit.UNKNOWN, "no node has reported"
    if good >= need:
        return Exit.READY, ""
    unknown = [node for node in nodes if node.fitness is Fitness.UNKNOWN]
    fit = sum(node.fitness is Fitness.FIT for node in nodes)
    if fit + len(unknown) < need:
        return Exit.TOO_FEW, ""
    first = f"{unknown[0].host}: {unknown[0].reason}"
    return (
        Exit.UNKNOWN,
        f"{fit} of {need} needed nodes are fit, and {len(unknown)} could not be judged; {first}",
    )
