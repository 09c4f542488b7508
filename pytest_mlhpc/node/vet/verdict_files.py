"""The files of a verdict in a folder: verdict.json in its documented form, lists of nodes; each is written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
import time
import uuid
import xml.etree.ElementTree as ET
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from pytest_mlhpc.node.files import read_json, replace_file, sync_folder
from pytest_mlhpc.node.protocol.schema import SchemaError, from_json, to_json
from pytest_mlhpc.node.vet.finding import (
    VERDICT_SCHEMA,
    Exit,
    Finding,
    Fitness,
    LinkVerdict,
    NodeVerdict,
    Report,
    Severity,
    VetVerdict,
)


@dataclass(frozen=True)
class WrittenVerdict:
    """A verdict that was written: ``id`` is its vetting's, ``created_ns`` when it was written, in ns UTC."""

    id: str
    created_ns: int
    verdict: VetVerdict


def verdict_to_json(written: WrittenVerdict) -> Dict[str, Any]:
    """Return the content of verdict.json: plain JSON types, no figure that is not finite."""
    verdict = written.verdict
    return {
        "schema": verdict.schema,
        "id": written.id,
        "created_ns": written.created_ns,
        "exit": int(verdict.exit),
        "level": verdict.level,
        "need": verdict.need,
        "seconds": _finite(verdict.seconds) or 0.0,
        "text": verdict.text,
        "good": list(verdict.good),
        "exclude": list(verdict.exclude),
        "nodes": [_node(node) for node in verdict.nodes],
        "links": [_link(link) for link in verdict.links],
    }


def verdict_from_json(data: Any) -> WrittenVerdict:
    """Return what :func:`verdict_to_json` wrote.

    Raises:
        SchemaError: it is something else, or of a newer version.
    """
    if not isinstance(data, dict):
        raise SchemaError(f"verdict: expected an object, got {type(data).__name__}")
    rest = dict(data)
    version = rest.get("schema")
    if not isinstance(version, int) or isinstance(version, bool):
        raise SchemaError(f"verdict: schema is {version!r:.80}, not an integer")
    if version > VERDICT_SCHEMA:
        raise SchemaError(f"verdict: schema {version} is newer than {VERDICT_SCHEMA}, the newest read here")
    identity, created = rest.pop("id", None), rest.pop("created_ns", None)
    if not isinstance(identity, str) or not isinstance(created, int) or isinstance(created, bool):
        raise SchemaError("verdict: its id or created_ns is missing or of another type")
    return WrittenVerdict(identity, created, from_json(VetVerdict, rest, "verdict"))


def _node(node: NodeVerdict) -> Dict[str, Any]:
    return {
        "host": node.host,
        "fitness": node.fitness.value,
        "reason": node.reason,
        "findings": [_finding(finding) for finding in node.findings],
    }


def _finding(finding: Finding) -> Dict[str, Any]:
    found: Dict[str, Any] = {field.name: getattr(finding, field.name) for field in fields(finding)}
    found["severity"], found["origin"] = finding.severity.value, finding.origin.value
    for name in ("value", "peer_median", "mad", "floor"):
        found[name] = _finite(found[name])
    found["seconds"] = _finite(finding.seconds) or 0.0
    return found


def _link(link: LinkVerdict) -> Dict[str, Any]:
    found: Dict[str, Any] = {field.name: getattr(link, field.name) for field in fields(link)}
    for name in ("value", "peer_median"):
        found[name] = _finite(found[name]) or 0.0
    return found


def _finite(value: Optional[float]) -> Optional[float]:
    """Return a figure, None for what JSON has no word for: NaN and infinities."""
    return value if value is not None and math.isfinite(value) else None


#: What is written, in this order.
FILES = (
    "exclude.txt", "nodelist.txt", "env.sh", "k8s-affinity.json", "verdict.json", "junit.xml", "report.json",
)  # fmt: skip

#: Says that a folder is ours, and whose vetting it holds: without it nothing that lies there is taken away.
MARK = ".mlhpc-vet"

#: A larger verdict.json is none: 4,096 nodes with a hundred findings each stay below it.
MOST_BYTES = 512 << 20

#: Names of nodes: what can stand in a list without meaning something else, and is no option.
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@+-]*\Z")

#: What an allocation of pods calls one of its places (``node/batch/pod_hub.py``).
_POD = re.compile(r"\S+ \(node (\S+)\)\Z")

#: A label's value (Kubernetes, "Labels and Selectors"): no node whose name is none has it as kubernetes.io/hostname.
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?\Z")


class FilesError(RuntimeError):
    """The folder cannot be used; the text says which file, why, and what to do."""


@dataclass(frozen=True)
class Folder:
    """A folder that :func:`prepare` has made ready. ``id`` is the vetting's."""

    path: Path
    id: str

    def write(
        self, verdict: VetVerdict, report: Optional[Report] = None, now_ns: Optional[int] = None
    ) -> None:
        """Write all files (``report.json``, all that was measured, only with *report*); every one is tried.

        Raises:
            FilesError: another vetting has begun in the folder, or some files could not be written: all are named.
        """
        self._ours()
        written = WrittenVerdict(self.id, time.time_ns() if now_ns is None else now_ns, verdict)
        tried = [self._trouble(name, content) for name, content in _contents(written, report).items()]
        _sync(self.path)
        if troubles := [trouble for trouble in tried if trouble]:
            raise FilesError(f"{self.path}: cannot be written: {'; '.join(troubles)}")
        self._ours()

    def _ours(self) -> None:
        mark = self.path / MARK
        try:
            holder = mark.read_text(encoding="ascii", errors="replace").strip()
        except OSError as error:
            raise FilesError(f"{mark}: cannot be read any more: {error.strerror}") from error
        if holder != self.id:
            raise FilesError(
                f"{self.path}: another vetting has begun there meanwhile, do not use this one's files: "
                "give each its own --output"
            )

    def _trouble(self, name: str, content: Callable[[], bytes]) -> str:
        """Write one file; return what went wrong, or nothing."""
        try:
            replace_file(self.path / name, content(), prefix=f"{MARK}-{self.id}-{name}.")
        except OSError as error:
            return f"{name}: {error.strerror}"
        except ValueError as error:
            return f"{name}: {error}"
        return ""


def prepare(out: Path) -> Folder:
    """Make the folder if need be, take away what an earlier vetting left there, and prove that it can be written.

    Raises:
        FilesError: it cannot be made, cleared or written, or holds files of these names that are not from a vetting.
    """
    identity = uuid.uuid4().hex
    try:
        out.mkdir(parents=True, exist_ok=True)
        there = [name for name in FILES if os.path.lexists(out / name)]
        if there and not (out / MARK).is_file():
            raise FilesError(
                f"{out}: holds {', '.join(there)}, which no vetting has written: "
                "choose another --output, or move them away"
            )
        for name in there:  # before the new mark: whatever lies beside that is of its own vetting
            (out / name).unlink()
        replace_file(out / MARK, f"{identity}\n".encode(), prefix=f"{MARK}-{identity}-")
        _clear_torn(out)
    except OSError as error:
        where = error.filename if isinstance(error.filename, str) else str(out)
        raise FilesError(
            f"--output {out}: cannot be used: {where}: {error.strerror}; choose a folder that can be written"
        ) from error
    _sync(out)
    return Folder(out, identity)


def read(out: Path) -> WrittenVerdict:
    """Return the verdict in a folder.

    Raises:
        FilesError: there is none, or it is damaged or of a newer version.
    """
    path = out / "verdict.json"
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise FilesError(f"{path}: cannot be read: {error.strerror}; did the vetting end?") from error
    if len(data) > MOST_BYTES:
        raise FilesError(f"{path}: has more than {MOST_BYTES} bytes, which no verdict has")
    try:
        return verdict_from_json(read_json(data))
    except (SchemaError, ValueError, RecursionError) as error:
        raise FilesError(f"{path}: is no verdict: {error}") from error


def environment(verdict: VetVerdict) -> Dict[str, str]:
    """Return what ``env.sh`` sets. The rendezvous is the first good node's; without one it is empty."""
    good, exclude = _lists(verdict)
    return {
        "MLHPC_NODELIST": ",".join(good),
        "MLHPC_EXCLUDE": ",".join(exclude),
        "MLHPC_MASTER_ADDR": good[0] if good else "",
    }


def node_name(host: str) -> str:
    """Return the node's own name: that of ``pod-0 (node gpu7)`` is gpu7, any other is what it is."""
    match = _POD.match(host)
    return match.group(1) if match else host


def affinity(exclude: Sequence[str]) -> Dict[str, Any]:
    """Return the value of a pod's ``affinity`` that keeps it off nodes; empty without any (an empty NotIn is refused)."""
    names = [name for name in exclude if _LABEL.match(name)]
    if not names:
        return {}
    term = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": names}
    required = {"nodeSelectorTerms": [{"matchExpressions": [term]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}


def _contents(written: WrittenVerdict, report: Optional[Report]) -> Dict[str, Callable[[], bytes]]:
    """Return what makes each file, in the order of writing: one that cannot be made does not hinder the others."""
    verdict = written.verdict
    makers: Dict[str, Callable[[], bytes]] = {
        "exclude.txt": lambda: _lines(_lists(verdict)[1]),
        "nodelist.txt": lambda: _lines(_lists(verdict)[0]),
        "env.sh": lambda: _env_sh(verdict),
        "k8s-affinity.json": lambda: _json(affinity(_lists(verdict)[1])),
        "verdict.json": lambda: _json(verdict_to_json(written)),
        "junit.xml": lambda: junit(verdict),
        "report.json": lambda: _json(to_json(report)),
    }
    return {name: makers[name] for name in FILES if name != "report.json" or report is not None}


def _lists(verdict: VetVerdict) -> Tuple[List[str], List[str]]:
    """Return good and excluded nodes, each once; who is in both is excluded.

    Raises:
        ValueError: a name cannot stand in a list; to leave it out could mean to use a bad node.
    """
    exclude = list(dict.fromkeys(map(node_name, verdict.exclude)))
    good = [host for host in dict.fromkeys(map(node_name, verdict.good)) if host not in set(exclude)]
    for host in (*good, *exclude):
        if not _HOST.match(host):
            raise ValueError(f"{host!r:.100} cannot be the name of a node, so that no list can hold it")
    return good, exclude


def _env_sh(verdict: VetVerdict) -> bytes:
    values = environment(verdict).items()
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in values).encode()


def _lines(names: Sequence[str]) -> bytes:
    return "".join(f"{word}\n" for word in names).encode()


def _json(data: Mapping[str, Any]) -> bytes:
    """Return an object with a line for each field and for each node: ``indent`` would take ten times as long (json.encoder)."""
    fields = [f"{json.dumps(name)}: {_json_value(value)}" for name, value in data.items()]
    return ("{\n" + ",\n".join(fields) + "\n}\n").encode()


def _json_value(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(json.dumps(one, allow_nan=False) for one in value) + "\n]"
    return json.dumps(value, allow_nan=False)


def _clear_torn(out: Path) -> None:
    """Remove what writers that were killed have left unfinished."""
    for torn in out.glob(f"{MARK}-*"):
        with contextlib.suppress(OSError):
            torn.unlink()


def _sync(out: Path) -> None:
    """Make renames and removals last, where the file system can."""
    with contextlib.suppress(OSError):
        sync_folder(out)


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
        _tell(case, "failure", finding.labelled_reason)
    elif finding.severity is Severity.UNKNOWN:
        _tell(case, "error", finding.labelled_reason)
    elif finding.severity is Severity.WARNING:
        ET.SubElement(case, "system-out").text = xml_text(f"WARNING: {finding.labelled_reason}")
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
