"""PAYLOAD. The form of verdict.json: every field of the contract on every finding, null where it does not apply.

``verdict.schema.json`` beside this module says the same as a JSON Schema (draft 2020-12); it stays with the controller.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Dict, Optional

from pytest_mlhpc.node.protocol.schema import SchemaError, from_json
from pytest_mlhpc.node.vet.finding import Finding
from pytest_mlhpc.node.vet.verdict import VERDICT_SCHEMA, LinkVerdict, NodeVerdict, Verdict


@dataclass(frozen=True)
class Kept:
    """A verdict that was written: ``id`` is its vetting's, ``created_ns`` when it was written, in ns UTC."""

    id: str
    created_ns: int
    verdict: Verdict


def verdict_to_json(kept: Kept) -> Dict[str, Any]:
    """Return the content of verdict.json: plain JSON types, no figure that is not finite."""
    verdict = kept.verdict
    return {
        "schema": verdict.schema,
        "id": kept.id,
        "created_ns": kept.created_ns,
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


def verdict_from_json(data: Any) -> Kept:
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
    return Kept(identity, created, from_json(Verdict, rest, "verdict"))


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
