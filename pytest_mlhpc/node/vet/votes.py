"""PAYLOAD. Votes: what should be equal is compared, and whoever differs from the majority is named.

A result computed from fixed data must be the same on all devices of one model: no baseline is needed to find the one that
computes wrong. Each device has one voice in a vote, and a majority is more than half of them; so two that differ accuse
each other, and neither can be believed.
"""

from __future__ import annotations

from collections import Counter
from typing import Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from pytest_mlhpc.node.vet.finding import Fact, Finding, Severity
from pytest_mlhpc.node.vet.report import Report

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
    for voter, facts in ballot.items():
        yield voter[0], _judge(facts, len(ballot), majority, agreed, others=tuple(counted), critical=critical)


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
        return "; leave the node out and have it looked at"
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
