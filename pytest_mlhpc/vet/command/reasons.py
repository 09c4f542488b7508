"""The reason under which a node is taken out of service, and how it is known again as ours and untouched.

It ends with a seal: eight digits of a hash over node and text. Whoever adds a word to it, or writes their own, has made
the node theirs, and nothing here gives it back to service.
"""

from __future__ import annotations

import hashlib
import re

from pytest_mlhpc.vet.files import node_name
from pytest_mlhpc.vet.finding import Origin, Severity
from pytest_mlhpc.vet.verdict import Fitness, NodeVerdict, Verdict

PREFIX = f"[{Origin.NODE.value}] mlhpc: "

#: Longest reason, in characters: what sinfo -R and kubectl describe show without filling a screen.
MOST = 200

_SEALED = re.compile(r"(?P<text>\[node_problem\] mlhpc: .+) \(mlhpc (?P<seal>[0-9a-f]{8})\)\Z")
_PREFIXES = re.compile(r"\[(?:node|user)_problem\]\s*")


def sealed(host: str, text: str) -> str:
    """Return the reason for *host*: one line of printable ASCII without quotes, which every scheduler keeps as it is."""
    words = " ".join(_PREFIXES.sub("", text, count=1).split()).replace('"', "'") or "unfit"
    words = "".join(letter if letter.isascii() and letter.isprintable() else "?" for letter in words)
    room = MOST - len(PREFIX) - len(" (mlhpc 01234567)")
    if len(words) > room:
        words = f"{words[: room - 3].rstrip()}..."
    line = PREFIX + words
    return f"{line} (mlhpc {_seal(host, line)})"


def is_ours(host: str, reason: str) -> bool:
    """Whether *reason* is one that :func:`sealed` made for *host*, and nobody has changed since."""
    match = _SEALED.match(reason.strip())
    return match is not None and match["seal"] == _seal(host, match["text"])


def node_problems(verdict: Verdict) -> dict[str, str]:
    """Return node -> what is wrong with it, for nodes that are to leave service: unfit by a problem of the node itself.

    What a user can mend (``[user_problem]``), and what nobody could tell, is no reason to take a node from everybody.
    """
    excluded = set(verdict.exclude)
    found = {node_name(node.host): _problem(node) for node in verdict.nodes if node.host in excluded}
    return {host: text for host, text in found.items() if text}


def _problem(node: NodeVerdict) -> str:
    if node.fitness is not Fitness.UNFIT:
        return ""
    critical = [finding for finding in node.findings if finding.severity is Severity.CRITICAL]
    for finding in critical:
        if finding.origin is Origin.NODE:
            where = f"{finding.check} {finding.device}".strip()
            return f"{where}: {_PREFIXES.sub('', finding.reason, count=1)}"
    if critical or not node.reason.startswith(f"[{Origin.NODE.value}]"):
        return ""
    return node.reason


def _seal(host: str, line: str) -> str:
    return hashlib.sha256(f"{host}\n{line}".encode("utf-8", "backslashreplace")).hexdigest()[:8]
