"""The judge of a vetting: from all that is known to a verdict, with votes on what should be equal and clocks compared. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, replace
from typing import Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from pytest_mlhpc.node.protocol.plan import VetSettings
from pytest_mlhpc.node.vet.figures import RANKS, judge_readings
from pytest_mlhpc.node.vet.finding import (
    UNCOMPARED,
    Exit,
    Fact,
    Finding,
    Fitness,
    NodeReport,
    NodeVerdict,
    Report,
    Severity,
    VetVerdict,
)
from pytest_mlhpc.node.vet.pairs import judge_pairs
from pytest_mlhpc.node.vet.policy import Policy

#: Longest part of a value that is quoted, and how far before the first difference it may begin, in characters.
_QUOTED, _BEFORE = 60, 40

#: A device of the vote: host and device.
Voter = Tuple[str, str]
Ballot = Dict[Voter, List[Fact]]


def count_votes(report: Report) -> Iterator[Tuple[str, Finding]]:
    """Yield (host, finding) for every device that took part in a vote."""
    for ballot in _ballots(report).values():
        yield from _count(ballot)


def _ballots(report: Report) -> Mapping[Tuple[str, str, str], Ballot]:
    ballots: Dict[Tuple[str, str, str], Ballot] = {}
    for node in report.nodes:
        for fact in (fact for outcome in node.outcomes for fact in outcome.facts):
            ballot = ballots.setdefault((fact.check, fact.name, fact.scope), {})
            ballot.setdefault((node.host, fact.device), []).append(fact)
    return ballots


def _count(ballot: Ballot) -> Iterator[Tuple[str, Finding]]:
    voices = {voter: {fact.value for fact in facts} for voter, facts in ballot.items()}
    # A device that gave two answers itself has no voice, but is judged.
    counted = Counter(value for values in voices.values() if len(values) == 1 for value in values)
    majority = next((value for value, number in counted.items() if 2 * number > len(ballot)), None)
    critical = any(fact.severity is Severity.CRITICAL for facts in ballot.values() for fact in facts)
    agreed = 0 if majority is None else counted[majority]
    others, judged = tuple(counted), {}
    for voter, facts in ballot.items():
        same = tuple(
            map(id, facts)
        )  # nodes that said the same share their facts (leader.py), and their findings
        if same not in judged:
            judged[same] = _judge(facts, len(ballot), majority, agreed, others=others, critical=critical)
        yield voter[0], judged[same]


def _judge(
    facts: List[Fact],
    voters: int,
    majority: Optional[str],
    agreed: int,
    *,
    others: Sequence[str],
    critical: bool,
) -> Finding:
    fact = facts[0]
    what = f"{fact.name} of {_place(fact)}"
    if len({each.value for each in facts}) > 1:
        answers = " and ".join(_quotes(sorted({each.value for each in facts})))
        return _finding(
            fact, fact.severity, f"{what} was once {answers}: it does not agree with itself{_advice(fact)}"
        )
    if voters == 1:
        return _finding(fact, Severity.INFO, f"{what} has nothing{_scope(fact)} to be compared with")
    if majority is None:
        quoted = _quotes([fact.value, *others])[0]
        split = f"{what} is {quoted}, and no value{_scope(fact)} has the majority of {voters}"
        if critical:
            return _finding(
                fact, Severity.UNKNOWN, f"{split}: some are wrong, vet with more nodes to see which"
            )
        return _finding(fact, Severity.INFO, split)
    if fact.value == majority:
        return _finding(fact, Severity.PASS, f"{what} is that of {agreed} of {voters}")
    own, usual = _quotes([fact.value, majority])
    reason = f"{what} is {own}, while {agreed} of {voters}{_scope(fact)} have {usual}{_advice(fact)}"
    return _finding(fact, fact.severity, reason)


def _finding(fact: Fact, severity: Severity, reason: str) -> Finding:
    return Finding(
        check=fact.check,
        severity=severity,
        reason=reason,
        device=fact.device,
        rule="vote",
        origin=fact.origin,
        metric=fact.name,
    )


def _advice(fact: Fact) -> str:
    if fact.severity is Severity.CRITICAL:
        return "; leave the node out and have it checked"
    return "; make it equal, or leave the node out"


def _place(fact: Fact) -> str:
    return fact.device or "this node"


def _scope(fact: Fact) -> str:
    return f" among devices of model {fact.scope}" if fact.scope else ""


def _quotes(values: Sequence[str]) -> List[str]:
    """Return values that are not all equal as they are shown: long ones from the word in which they begin to differ."""
    begin = 0
    if max(map(len, values)) > _QUOTED:
        columns = enumerate(zip(*values))
        equal = next((place for place, letters in columns if len(set(letters)) > 1), min(map(len, values)))
        word = values[0].rfind(" ", 0, equal) + 1
        begin = max(word, equal - _BEFORE, 0)
    return [_cut(value, begin) for value in values]


def _cut(value: str, begin: int) -> str:
    before, after = "..." if begin else "", "..." if len(value) > begin + _QUOTED else ""
    return repr(f"{before}{value[begin : begin + _QUOTED]}{after}")


#: ``Finding.check`` of what is said of a node that did not say all.
PRESENCE = "presence"

#: What makes figures comparable that are not.
COMPARABLE = "to compare them, vet again here, or vet at least 4 nodes at once"


def judge(report: Report, settings: VetSettings, policy: Policy) -> VetVerdict:
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
    return VetVerdict(
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


def worst_first(findings: Sequence[Finding]) -> Tuple[Finding, ...]:
    """Return findings from CRITICAL over UNKNOWN to PASS; those that are equally bad stay in their order."""
    return tuple(sorted(findings, key=lambda finding: -RANKS[finding.severity]))


def _own_findings(node: NodeReport) -> Iterator[Finding]:
    if node.missing:
        while_doing = f" while it did {node.unfinished}" if node.unfinished else ""
        reason = f"the node's answers are incomplete: {node.missing}{while_doing}; leave it out and have it checked"
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


#: Name of the check, and its rule.
CLOCKS, APART = "clocks", "clocks.apart"

_MEND = "have its time service (chrony, ntpd) checked"


@dataclass(frozen=True)
class ClockOffset:
    """How far one node's clock was ahead of the first node's, in seconds, and how wrong that may be at most."""

    host: str
    ahead_s: float
    error_s: float = 0.0


def compare_clocks(clocks: Sequence[ClockOffset], policy: Policy) -> Iterator[Tuple[str, Finding]]:
    """Yield (host, finding) for each of at least two nodes.

    A node is unfit only where most clocks agree: of two that differ, nobody can tell which is wrong.
    """
    if len(clocks) < 2:
        return
    apart = [_apart(clock, clocks) for clock in clocks]
    bound = policy[APART]
    agree = sum(not bound.reached(abs(far) - error, _first(policy)) for far, error in apart)
    most = 2 * agree > len(clocks)
    for clock, (far, error) in zip(clocks, apart):
        other = next(one.host for one in clocks if one is not clock)
        of = f"{other}'s" if len(clocks) == 2 else f"the median of {len(clocks)} nodes"
        said = f"its clock is {_spell(abs(far))} {'ahead of' if far > 0 else 'behind'} {of}"
        sure = abs(far) - error
        severity, advice = Severity.PASS, ""
        if most and bound.reached(sure, bound.fail):
            severity, advice = Severity.CRITICAL, f": credentials for jobs are refused; {_MEND}"
        elif bound.reached(sure, _first(policy)):
            severity = Severity.WARNING
            advice = (
                f"; {_MEND}" if most else f", and which one is right is not known; {_MEND} on all of them"
            )
        elif bound.reached(abs(far) + error, _first(policy)):
            severity, advice = Severity.INFO, f", give or take {_spell(error)}: that is too coarse to judge"
        yield (
            clock.host,
            Finding(
                CLOCKS, severity, said + advice, rule=APART, metric="apart", value=round(far, 6), unit="s"
            ),
        )


def _first(policy: Policy) -> float:
    """Return the first stage at which anything is said."""
    bound = policy[APART]
    return min((stage for stage in (bound.warn, bound.fail) if stage is not None), default=float("inf"))


def _apart(clock: ClockOffset, clocks: Sequence[ClockOffset]) -> Tuple[float, float]:
    """Return how far a clock is ahead of the median (of two: of the other), and the error of that."""
    if len(clocks) == 2:
        (other,) = [one for one in clocks if one is not clock]
        return clock.ahead_s - other.ahead_s, clock.error_s + other.error_s
    middle = statistics.median(one.ahead_s for one in clocks)
    return clock.ahead_s - middle, clock.error_s + statistics.median(one.error_s for one in clocks)


def _spell(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1.0 else f"{seconds:.1f} s"
