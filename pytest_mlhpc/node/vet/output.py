"""What `mlhpc vet` prints: what is wrong, the checks and figures, then the last line; or all of it as one JSON object."""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from dataclasses import replace
from typing import Dict, Iterable, List, Sequence, TextIO, Tuple

from pytest_mlhpc.node.agents.nodes import number_ranges
from pytest_mlhpc.node.vet.figures import spell
from pytest_mlhpc.node.vet.finding import (
    OWN_HISTORY,
    UNCOMPARED,
    Exit,
    Finding,
    Fitness,
    NodeVerdict,
    Origin,
    Severity,
    VetVerdict,
)
from pytest_mlhpc.node.vet.verdict_files import WrittenVerdict, verdict_to_json

#: Most rows of the table: a screen. verdict.json has all.
MOST_ROWS = 40

#: Longest reason that is printed, and longest one in the last line, in characters.
MOST_REASON, MOST_WHY = 400, 160

#: Rules of figures that nothing decides on (figures.py).
UNJUDGED = frozenset({"unjudged", UNCOMPARED})

#: Rule of what was left out for want of time (passive.py, vetting_run.py).
BUDGET = "budget"

_NUMBERED = re.compile(r"(.*?)([0-9]+)\Z", re.DOTALL)

#: Which findings are shown, and in which order.
_SHOWN = (Severity.CRITICAL, Severity.UNKNOWN, Severity.WARNING)

Problem = Tuple[str, str, str, str, str]  #: severity, nodes, device, check, reason


def last_line(verdict: VetVerdict) -> str:
    """Return ``GO 64/66 nodes, 41 s, 0.8 node-hours``, ``GO, not compared: ...`` or ``NO-GO: ...``."""
    good, every = len(verdict.good), len(verdict.nodes)
    nodes = f"{good}/{every} {'node' if every == 1 else 'nodes'}"
    spent = f"{verdict.seconds:.0f} s, {_hours(every * verdict.seconds / 3600.0)} node-hours"
    if verdict.exit is Exit.READY:
        return f"GO {nodes}, {spent}"
    if verdict.exit is Exit.NOT_COMPARED:
        return f"GO, not compared: {nodes} healthy, {spent}"
    if verdict.exit is Exit.TOO_FEW:
        why = f"{nodes} fit, {verdict.need} needed"
    elif verdict.exit is Exit.UNKNOWN:
        unknown = sum(node.fitness is Fitness.UNKNOWN for node in verdict.nodes)
        why = f"cannot judge: {verdict.text or f'{unknown} of {every} nodes unknown, {verdict.need} needed'}"
    else:
        why = verdict.text or "vetting itself failed"
    return f"NO-GO: {cut(why, MOST_WHY)}, {spent}"


def table(verdict: VetVerdict, most: int = MOST_ROWS) -> str:
    """Return a line for each thing that is wrong, the worst first; empty where nothing is.

    What several nodes have in common is one line; more than *most* lines are cut, and their number given.
    """
    rows = _problems(verdict)
    more = f"... and {len(rows) - most} more: verdict.json has all of them\n" if len(rows) > most else ""
    return aligned(rows[:most]) + more


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as lines with columns below each other; the last column may be long and is cut."""
    shown = [[*(safe(cell) for cell in row[:-1]), cut(row[-1])] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown)]
    lines = ["  ".join([*map(str.ljust, row[:-1], widths), row[-1]]).rstrip() for row in shown]
    return "".join(f"{line}\n" for line in lines)


def left_out(verdict: VetVerdict) -> str:
    """Return a line that names what the time did not suffice for, empty if there is nothing: a GO says nothing of that."""
    said = [finding for node in verdict.nodes for finding in node.findings if finding.rule == BUDGET]
    names = ", ".join(sorted({safe(finding.check) for finding in said}))
    return f"not checked for lack of time: {names}; give a longer --budget\n" if names else ""


def not_compared(verdict: VetVerdict) -> str:
    """Return a sentence on the figures that nothing could be compared with, and what would help; empty if all were."""
    return f"{cut(verdict.text)}\n" if verdict.exit is Exit.NOT_COMPARED else ""


def safe(text: str) -> str:
    """Return *text* on one line, with a ``?`` for each character that a terminal might obey instead of showing it."""
    line = " ".join(text.split())
    return "".join(letter if letter.isprintable() else "?" for letter in line)


def fold(names: Iterable[str]) -> str:
    """Return nodes as people write them: ``node[1-3,7],login``. For reading only."""
    plain: List[str] = []
    split: List[Tuple[str, str]] = []
    for name in dict.fromkeys(names):
        match = _NUMBERED.match(name)
        if match is None or len(match.group(2)) > 9:
            plain.append(name)
        else:
            split.append((match.group(1), match.group(2)))
    padded = {(prefix, len(digits)) for prefix, digits in split if digits.startswith("0")}
    found: Dict[Tuple[str, int], List[int]] = {}
    for prefix, digits in split:
        width = len(digits) if (prefix, len(digits)) in padded else 0
        found.setdefault((prefix, width), []).append(int(digits))
    folded = [_numbers(prefix, width, numbers) for (prefix, width), numbers in found.items()]
    return ",".join([*folded, *plain])


def _numbers(prefix: str, width: int, numbers: Sequence[int]) -> str:
    ranges = ",".join(number_ranges(numbers, width))
    return prefix + ranges if len(numbers) == 1 else f"{prefix}[{ranges}]"


def _problems(verdict: VetVerdict) -> List[Problem]:
    """Return all rows: of nodes not to be used, then links, then what is odd about others."""
    excluded = set(verdict.exclude)
    out = [node for node in verdict.nodes if node.host in excluded]
    rest = [node for node in verdict.nodes if node.host not in excluded]
    rows = _of_nodes(out, _SHOWN[:2])
    rows += [
        ("LINK", f"{link.first} - {link.second}", "", "pairs", f"[{Origin.NODE.value}] {link.reason}")
        for link in verdict.links
    ]
    rows += _of_nodes(rest, _SHOWN[:2])
    return rows + _of_nodes([*out, *rest], _SHOWN[2:])


def _of_nodes(nodes: Sequence[NodeVerdict], wanted: Sequence[Severity]) -> List[Problem]:
    """Return rows for findings of these severities; those that differ in their node alone are one."""
    rows: Dict[Tuple[str, str, str, str], List[str]] = {}
    for severity in wanted:
        for node in nodes:
            for finding in _together(node.findings):
                if finding.severity is severity:
                    key = (severity.value, finding.device, finding.check, finding.labelled_reason)
                    rows.setdefault(key, []).append(node.host)
    if Severity.CRITICAL in wanted:
        for node in nodes:  # one that never came has no findings: its verdict's reason is all there is
            if node.fitness is not Fitness.FIT and not any(one.severity in wanted for one in node.findings):
                word = Severity.CRITICAL if node.fitness is Fitness.UNFIT else Severity.UNKNOWN
                rows.setdefault((word.value, "", "", node.reason), []).append(node.host)
    return [(word, fold(hosts), device, check, why) for (word, device, check, why), hosts in rows.items()]


def _together(findings: Sequence[Finding]) -> List[Finding]:
    """Return findings, with one in the place of all figures that were not compared for the same reason."""
    alike: Dict[str, List[Finding]] = {}
    for one in findings:
        if one.rule in UNJUDGED and one.metric:
            alike.setdefault(one.reason.partition(": ")[2], []).append(one)
    found = []
    for one in findings:
        group = alike.get(one.reason.partition(": ")[2], []) if one.rule in UNJUDGED else []
        if len(group) < 2:
            found.append(one)
        elif one is group[0]:
            found.append(_one_for(group))
    return found


def _one_for(group: Sequence[Finding]) -> Finding:
    metrics = ", ".join(dict.fromkeys(one.metric for one in group))
    devices, checks = ({one.device for one in group}, dict.fromkeys(one.check for one in group))
    reason = f"{metrics} not compared: {group[0].reason.partition(': ')[2]}"
    device = group[0].device if len(devices) == 1 else ""
    return replace(group[0], check=",".join(checks), device=device, reason=reason)


def cut(text: str, most: int = MOST_REASON) -> str:
    """Return *text* as :func:`safe` does, with an end that says so where it was longer."""
    line = safe(text)
    return line if len(line) <= most else f"{line[: most - 3].rstrip()}..."


def _hours(hours: float) -> str:
    if hours < 0.0005:
        return "under 0.001"
    return f"{hours:.1f}" if hours >= 0.05 else f"{hours:.1g}"


#: Rules that judge a figure; the reasons of all others say what was read.
_OF_FIGURES = frozenset({"peers", "floor", "history", "pairs", OWN_HISTORY, *UNJUDGED})

#: Longest text of a check in the table, in characters.
MOST_SEEN = 100

Row = Tuple[str, str, str, str]  #: check, metric, value, verdict


def show(verdict: VetVerdict, stream: TextIO) -> None:
    """Print all for people, in characters that *stream* can carry (a C locale may have ASCII alone)."""
    parts = (table, checked, left_out, not_compared, last_line)
    _write("".join(part(verdict) for part in parts) + "\n", stream)


def show_json(written: WrittenVerdict, stream: TextIO) -> None:
    """Print verdict.json as one object with the command's own schema."""
    data = {**verdict_to_json(written), "schema": f"mlhpc/vet-{written.verdict.level}/1"}
    _write(f"{json.dumps(data, indent=1, allow_nan=False)}\n", stream)


def checked(verdict: VetVerdict, most: int = MOST_ROWS) -> str:
    """Return a table of what was measured, over all nodes; of one node alone also what other checks saw and did not object to."""
    findings = [finding for node in verdict.nodes for finding in node.findings]
    rows = _figures(findings) + (_property_rows(findings) if len(verdict.nodes) == 1 else [])
    if not rows:
        return ""
    more = f"... and {len(rows) - most} more: --json has all of them\n" if len(rows) > most else ""
    return aligned([("check", "metric", "value", "verdict"), *rows[:most]]) + more


def _figures(findings: Sequence[Finding]) -> List[Row]:
    """Return a row for each metric, with the range over all devices and how many of them have which verdict."""
    groups: Dict[Tuple[str, str, str], List[Finding]] = {}
    for one in findings:
        if one.rule in _OF_FIGURES and one.value is not None:
            groups.setdefault((one.check, one.metric, one.unit), []).append(one)
    return [
        (check, metric, _range([one.value or 0.0 for one in group], unit), _verdicts(group))
        for (check, metric, unit), group in groups.items()
    ]


def _range(values: Sequence[float], unit: str) -> str:
    if len(values) == 1:
        return spell(values[0], unit)
    low, middle, high = (spell(one, unit) for one in (min(values), statistics.median(values), max(values)))
    return f"{low} to {high}, median {middle}"


def _verdicts(group: Sequence[Finding]) -> str:
    if len(group) == 1:
        (one,) = group
        compared = one.reason.partition("; ")[2] if one.severity is Severity.PASS else ""
        return f"pass: {compared}" if compared else _word(one)
    return ", ".join(f"{count} {word}" for word, count in Counter(map(_word, group)).items())


def _word(one: Finding) -> str:
    if one.rule == UNCOMPARED:
        return "not compared"
    return f"{one.severity.value.lower()} by {one.rule.replace('_', ' ')}"


def _property_rows(findings: Sequence[Finding]) -> List[Row]:
    """Return a row for what a check found in order; of a lone node, that a property has no peers is not said."""
    fine = (Severity.PASS, Severity.INFO)
    written = [
        (one.check, one.device, cut(one.reason, MOST_SEEN), one.severity.value.lower())
        for one in findings
        if one.severity in fine and one.rule not in {*_OF_FIGURES, BUDGET}
        if (one.rule, one.severity) != ("vote", Severity.INFO)
    ]
    return list(dict.fromkeys(written))


def _write(text: str, stream: TextIO) -> None:
    encoding = stream.encoding or "ascii"
    stream.write(text.encode(encoding, "replace").decode(encoding))
    stream.flush()
