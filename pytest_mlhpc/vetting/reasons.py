"""The reason under which a node is taken out of service, and how it is known again as ours and untouched.

It ends with a seal: eight digits of a hash over node and text. Whoever adds a word to it, or writes their own, has made
the node theirs, and nothing here gives it back to service.
"""

from __future__ import annotations

import hashlib
import re

from pytest_mlhpc.node.vet.files import node_name
from pytest_mlhpc.node.vet.finding import Finding, Fitness, NodeVerdict, Origin, Severity, Verdict
from pytest_mlhpc.node.vet.judge import PRESENCE

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

    What a user can mend (``[user_problem]``), what nobody could tell, and that a node has not said all, are no reason to take
    it from everybody.
    """
    excluded = set(verdict.exclude)
    found = {node_name(node.host): _problem(node) for node in verdict.nodes if node.host in excluded}
    return {host: text for host, text in found.items() if text}


def only_silent(verdict: Verdict) -> dict[str, str]:
    """Return node -> why it did not say all, for unfit nodes that stay in service because no check has found anything.

    A node that never came, or whose agent was lost, may be its user's doing: a full cgroup, a process ended by hand.
    """
    excluded, problems = set(verdict.exclude), node_problems(verdict)
    return {
        node_name(node.host): _critical(node)[0].reason
        for node in verdict.nodes
        if node.host in excluded
        and node.fitness is Fitness.UNFIT
        and node_name(node.host) not in problems
        and {one.check for one in _critical(node)} == {PRESENCE}
    }


def _critical(node: NodeVerdict) -> list[Finding]:
    return [finding for finding in node.findings if finding.severity is Severity.CRITICAL]


def _problem(node: NodeVerdict) -> str:
    """Return what a check has found wrong with the node itself; that it did not say all (PRESENCE) is nobody's finding."""
    if node.fitness is not Fitness.UNFIT:
        return ""
    for finding in _critical(node):
        if finding.origin is Origin.NODE and finding.check != PRESENCE:
            where = f"{finding.check} {finding.device}".strip()
            return f"{where}: {_PREFIXES.sub('', finding.reason, count=1)}"
    return ""


def _seal(host: str, line: str) -> str:
    return hashlib.sha256(f"{host}\n{line}".encode("utf-8", "backslashreplace")).hexdigest()[:8]
