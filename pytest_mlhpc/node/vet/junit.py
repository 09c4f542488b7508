"""PAYLOAD. The verdict as a JUnit file: a test case for each node, check and device, as CI servers show them."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import Iterator

from pytest_mlhpc.node.vet.finding import Finding, Severity
from pytest_mlhpc.node.vet.text import reason
from pytest_mlhpc.node.vet.verdict import Exit, Fitness, NodeVerdict, Verdict

#: What no XML 1.0 document may hold, however it is escaped (W3C, XML 1.0, production 2, Char).
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(verdict: Verdict) -> bytes:
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


def _links(verdict: Verdict) -> Iterator[ET.Element]:
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
