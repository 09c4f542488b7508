"""A verdict as text (the problems first, the last line says GO or NO-GO) and as a JUnit file."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from typing import Dict, Iterable, Iterator, List, Sequence, Tuple

from pytest_mlhpc.node.agents.nodes import number_ranges
from pytest_mlhpc.node.vet.finding import (
    UNCOMPARED,
    Exit,
    Finding,
    Fitness,
    NodeVerdict,
    Origin,
    Severity,
    VetVerdict,
)

#: Most rows of the table: a screen. verdict.json has all.
MOST_ROWS = 40

#: Longest reason that is printed, and longest one in the last line, in characters.
MOST_REASON, MOST_WHY = 400, 160

#: Rules of figures that nothing decides on (rules.py).
UNJUDGED = frozenset({"unjudged", UNCOMPARED})

#: Rule of what was left out for want of time (passive.py, vetting_run.py).
BUDGET = "budget"

_NUMBERED = re.compile(r"(.*?)([0-9]+)\Z", re.DOTALL)

#: Which findings are shown, and in which order.
_SHOWN = (Severity.CRITICAL, Severity.UNKNOWN, Severity.WARNING)

Row = Tuple[str, str, str, str, str]  #: severity, nodes, device, check, reason


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
    rows = _rows(verdict)
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


def reason(finding: Finding) -> str:
    """Return a finding's reason with ``[node_problem]`` or ``[user_problem]`` before it; of what nobody knows, nobody is blamed."""
    if finding.severity is Severity.UNKNOWN or any(
        finding.reason.startswith(f"[{origin.value}]") for origin in Origin
    ):
        return finding.reason
    return f"[{finding.origin.value}] {finding.reason}"


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


def _rows(verdict: VetVerdict) -> List[Row]:
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


def _of_nodes(nodes: Sequence[NodeVerdict], wanted: Sequence[Severity]) -> List[Row]:
    """Return rows for findings of these severities; those that differ in their node alone are one."""
    rows: Dict[Tuple[str, str, str, str], List[str]] = {}
    for severity in wanted:
        for node in nodes:
            for finding in _together(node.findings):
                if finding.severity is severity:
                    key = (severity.value, finding.device, finding.check, reason(finding))
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


#: What no XML 1.0 document may hold, however it is escaped (W3C, XML 1.0, production 2, Char).
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(verdict: VetVerdict) -> bytes:
    """Return the file: CRITICAL is a failure, UNKNOWN an error, WARNING output; the last case is the verdict as a whole."""
    suite = ET.Element("testsuite", name="mlhpc vet", time=f"{verdict.seconds:.3f}")
    suite.extend(case for node in verdict.nodes for case in _cases(node))
    suite.extend(_links(verdict))
    whole = ET.SubElement(
        suite, "testcase", classname="mlhpc vet", name="verdict", time=f"{verdict.seconds:.3f}"
    )
    said = verdict.text or f"{len(verdict.good)} of {len(verdict.nodes)} nodes fit, {verdict.need} needed"
    if verdict.exit not in {Exit.READY, Exit.NOT_COMPARED}:
        _tell(whole, "failure" if verdict.exit is Exit.TOO_FEW else "error", said)
    cases = suite.findall("testcase")
    suite.set("tests", str(len(cases)))
    for kind in ("failure", "error"):
        suite.set(f"{kind}s", str(sum(case.find(kind) is not None for case in cases)))
    suite.set("skipped", "0")
    top = ET.Element("testsuites")
    top.append(suite)
    written = ET.tostring(top, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{written}\n'.encode()


def xml_text(text: str) -> str:
    """Return *text* with U+FFFD for each character that XML cannot hold: control characters, lone surrogates."""
    return _NO_XML.sub("\N{REPLACEMENT CHARACTER}", text)


def _cases(node: NodeVerdict) -> Iterator[ET.Element]:
    for finding in node.findings:
        yield _case(node.host, finding)
    if node.fitness is not Fitness.FIT and not any(
        finding.severity in {Severity.CRITICAL, Severity.UNKNOWN} for finding in node.findings
    ):
        silent = ET.Element("testcase", classname=xml_text(node.host), name="answers", time="0")
        _tell(silent, "failure" if node.fitness is Fitness.UNFIT else "error", node.reason)
        yield silent
    elif not node.findings:
        yield ET.Element("testcase", classname=xml_text(node.host), name="answers", time="0")


def _case(host: str, finding: Finding) -> ET.Element:
    name = ".".join(filter(None, (finding.check, finding.metric)))
    if finding.device:
        name += f"[{finding.device}]"
    case = ET.Element(
        "testcase", classname=xml_text(host), name=xml_text(name), time=f"{finding.seconds:.3f}"
    )
    if finding.severity is Severity.CRITICAL:
        _tell(case, "failure", reason(finding))
    elif finding.severity is Severity.UNKNOWN:
        _tell(case, "error", reason(finding))
    elif finding.severity is Severity.WARNING:
        ET.SubElement(case, "system-out").text = xml_text(f"WARNING: {reason(finding)}")
    return case


def _links(verdict: VetVerdict) -> Iterator[ET.Element]:
    for link in verdict.links:
        case = ET.Element(
            "testcase", classname="links", name=xml_text(f"{link.first} - {link.second}"), time="0"
        )
        _tell(case, "failure", link.reason)
        yield case


def _tell(case: ET.Element, kind: str, text: str) -> None:
    """Add a failure or an error: CI servers show the attribute in lists, the content in full."""
    clean = xml_text(text)
    ET.SubElement(case, kind, message=clean, type=kind).text = clean
