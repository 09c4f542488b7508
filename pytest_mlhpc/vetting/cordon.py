"""Taking unfit nodes out of service and giving them back, by Slurm's commands or Kubernetes' API."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.node.vet.finding import Finding, Fitness, NodeVerdict, Origin, Severity, VetVerdict
from pytest_mlhpc.node.vet.judge import PRESENCE
from pytest_mlhpc.node.vet.output import safe
from pytest_mlhpc.node.vet.verdict_files import FilesError, node_name, read
from pytest_mlhpc.provision.kubernetes.client import KubernetesClient
from pytest_mlhpc.provision.kubernetes.errors import Conflict, KubernetesError, NotFound
from pytest_mlhpc.provision.kubernetes.objects import NODE, Manifest, ObjectRef, metadata_of
from pytest_mlhpc.provision.scheduler.client import SchedulerError, SchedulerNode, SlurmClient


@dataclass(frozen=True)
class Action:
    """What became of one node. ``outcome`` is changed, left (somebody else's, or nothing to do) or failed."""

    outcome: str
    host: str
    text: str

    def __str__(self) -> str:
        """Return a line for people."""
        mark = {"changed": "", "left": "left as it is: ", "failed": "FAILED: "}[self.outcome]
        return safe(f"{self.host}: {mark}{self.text}")


PREFIX = f"[{Origin.NODE.value}] mlhpc: "

#: Longest reason, in characters: what sinfo -R and kubectl describe show without filling a screen.
MOST = 200

_SEALED = re.compile(r"(?P<text>\[node_problem\] mlhpc: .+) \(mlhpc (?P<seal>[0-9a-f]{8})\)\Z")
_PREFIXES = re.compile(r"\[(?:node|user)_problem\]\s*")


def sealed(host: str, text: str) -> str:
    """Return the reason for *host*: one line of printable ASCII without quotes, which every scheduler keeps as it is."""
    reason = " ".join(_PREFIXES.sub("", text, count=1).split()).replace('"', "'") or "unfit"
    reason = "".join(letter if letter.isascii() and letter.isprintable() else "?" for letter in reason)
    room = MOST - len(PREFIX) - len(" (mlhpc 01234567)")
    if len(reason) > room:
        reason = f"{reason[: room - 3].rstrip()}..."
    line = PREFIX + reason
    return f"{line} (mlhpc {_seal(host, line)})"


def is_ours(host: str, reason: str) -> bool:
    """Whether *reason* is one that :func:`sealed` made for *host*, and nobody has changed since."""
    match = _SEALED.match(reason.strip())
    return match is not None and match["seal"] == _seal(host, match["text"])


def node_problems(verdict: VetVerdict) -> dict[str, str]:
    """Return node -> what is wrong with it, for nodes that are to leave service: unfit by a problem of the node itself.

    What a user can mend (``[user_problem]``), what nobody could tell, and that a node has not said all, are no reason to take
    it from everybody.
    """
    excluded = set(verdict.exclude)
    found = {node_name(node.host): _problem(node) for node in verdict.nodes if node.host in excluded}
    return {host: text for host, text in found.items() if text}


def only_silent(verdict: VetVerdict) -> dict[str, str]:
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


#: Oldest verdict by which nodes are taken out, in seconds.
MAX_AGE_S = 86400.0

#: Why a node that did not say all is left in service.
SILENT = "no check has found anything wrong with it, and that may be its user's own doing"


def apply(verdict: VetVerdict, admin: NodeAdmin, most: int | None = None) -> list[Action]:
    """Take the nodes with a problem of their own out of service, each looked at right before. Never raises for a node.

    Args:
        verdict: what vetting found.
        admin: whose nodes they are.
        most: do nothing if there are more; None: a third of the nodes vetted, at least one.
    """
    problems = node_problems(verdict)
    silent = left_silent(verdict)
    limit = max(1, len(verdict.nodes) // 3) if most is None else most
    if len(problems) > limit:
        why = f"{len(problems)} of {len(verdict.nodes)} nodes have a problem, more than {limit}: nothing was changed; see --most"
        return [*(Action("left", host, why) for host in problems), *silent]
    return [*(admin.take_out(host, sealed(host, text)) for host, text in problems.items()), *silent]


def left_silent(verdict: VetVerdict) -> list[Action]:
    """Return that unfit nodes which only did not say all are left in service, and why."""
    return [Action("left", host, f"{SILENT}: {text}") for host, text in only_silent(verdict).items()]


def undo(hosts: Iterable[str], admin: NodeAdmin) -> list[Action]:
    """Give nodes back to service that we took out; without *hosts* all of them.

    Raises:
        MlhpcError: the scheduler does not answer when asked for all.
    """
    return [admin.give_back(host) for host in dict.fromkeys(hosts) or admin.ours()]


def node_admin_of(scheduler: str, environ: Mapping[str, str]) -> NodeAdmin:
    """Return who keeps this machine's nodes: *scheduler* is auto, slurm or kubernetes.

    Raises:
        UsageError: there is neither Slurm nor Kubernetes here, or it cannot be reached.
    """
    if scheduler == "auto":
        if shutil.which("scontrol", path=environ.get("PATH", os.defpath)):
            scheduler = "slurm"
        elif environ.get("KUBERNETES_SERVICE_HOST") or environ.get("KUBECONFIG"):
            scheduler = "kubernetes"
        else:
            raise UsageError(
                "neither Slurm (scontrol on PATH) nor Kubernetes (a pod, KUBECONFIG) is here: nodes cannot be taken out of service"
            )
    if scheduler == "slurm":
        from pytest_mlhpc.provision.slurm.commands import CliClient

        return SlurmNodes(CliClient(environ))
    from pytest_mlhpc.provision.kubernetes.connect import connect

    return KubernetesNodes(connect(environ=environ))


def print_actions(actions: Sequence[Action]) -> bool:
    """Print what became of each node, failures to standard error; return whether all went well."""
    for action in actions:
        stream = sys.stderr if action.outcome == "failed" else sys.stdout
        stream.write(f"{action}\n")
    return not any(action.outcome == "failed" for action in actions)


def fresh(out: Path) -> VetVerdict:
    """Return the verdict in a folder; one of yesterday says nothing of today's nodes.

    Raises:
        UsageError: there is none, or it is too old.
    """
    try:
        written = read(out)
    except FilesError as error:
        raise UsageError(str(error)) from error
    age_s = (time.time_ns() - written.created_ns) / 1e9
    if age_s > MAX_AGE_S:
        raise UsageError(
            f"{out}: this verdict is {age_s / 3600:.0f} hours old: vet again before nodes are taken out of service by it"
        )
    return written.verdict


#: RESUME would end these as well (scontrol(1), State=RESUME), and they are not ours.
_BUSY = frozenset({"powering_down", "powered_down", "reboot_requested", "reboot_issued"})


class SlurmNodes:
    """Nodes of one cluster. ``client`` has a time limit on every call."""

    name = "Slurm"

    def __init__(self, client: SlurmClient) -> None:
        self._client = client

    def take_out(self, host: str, reason: str) -> Action:
        """Drain a node that nobody has drained."""
        try:
            node = self._node(host)
            if node is None:
                return Action("failed", host, "Slurm knows no node of this name")
            if _out(node):
                return Action("left", host, f"already {_shown(node)}")
            self._client.drain([host], reason)
            node = self._node(host)
            if node is None or "drain" not in node.flags or node.reason != reason:
                return Action("failed", host, f"was drained, but now is {_shown(node) if node else 'gone'}")
        except SchedulerError as error:
            return Action("failed", host, str(error))
        return Action("changed", host, f"drained: {reason}")

    def give_back(self, host: str) -> Action:
        """Resume a node that we have drained, and that is nothing but drained."""
        try:
            node = self._node(host)
            if node is None:
                return Action("failed", host, "Slurm knows no node of this name")
            if why := _not_ours(node):
                return Action("left", host, f"{why}{_shown(node)}")
            self._client.resume([host])
            node = self._node(host)
            if node is not None and "drain" in node.flags:
                return Action("failed", host, f"was resumed, but still is {_shown(node)}")
        except SchedulerError as error:
            return Action("failed", host, str(error))
        return Action("changed", host, "resumed")

    def ours(self) -> list[str]:
        """Return the nodes that bear our reason.

        Raises:
            SchedulerError: Slurm does not answer.
        """
        return [node.name for node in self._client.nodes() if is_ours(node.name, node.reason)]

    def _node(self, host: str) -> SchedulerNode | None:
        return next((node for node in self._client.nodes([host]) if node.name == host), None)


def _out(node: SchedulerNode) -> bool:
    return bool(node.flags & {"drain", "fail"}) or node.state in {"down", "error"}


def _not_ours(node: SchedulerNode) -> str:
    """Return why a node is not to be resumed; empty if it is drained by us and nothing else."""
    if "drain" not in node.flags:
        return "not drained, but "
    if not is_ours(node.name, node.reason):
        return "drained by another user: "
    if node.state in {"down", "error", "unknown"} or node.flags & _BUSY:
        return "more than drained: "
    return ""


def _shown(node: SchedulerNode) -> str:
    state = "+".join([node.state, *sorted(node.flags)])
    return f"{state}: {node.reason}" if node.reason else state


ANNOTATION = "pytest-mlhpc/cordoned"

#: How often a node that others change at the same time is looked at anew; kubelets write every few seconds at most.
TRIES = 5

#: The name under which the server notes our changes: what stands before the slash of our user agent (connect.py).
MANAGER = "pytest-mlhpc"


class KubernetesNodes:
    """Nodes of one cluster. The account needs ``get``, ``list`` and ``patch`` on nodes."""

    name = "Kubernetes"

    def __init__(self, api: KubernetesClient) -> None:
        self._api = api

    def take_out(self, host: str, reason: str) -> Action:
        """Cordon a node that nobody has cordoned."""

        def decide(node: Manifest) -> tuple[dict[str, Any] | None, Action]:
            if _cordoned(node):
                return None, Action("left", host, f"already cordoned{_by(node)}")
            return _patch(node, cordon=True, reason=reason), Action("changed", host, f"cordoned: {reason}")

        return self._change(host, decide)

    def give_back(self, host: str) -> Action:
        """Uncordon a node that we have cordoned."""

        def decide(node: Manifest) -> tuple[dict[str, Any] | None, Action]:
            if not _cordoned(node):
                return None, Action("left", host, "not cordoned")
            if not is_ours(host, _reason(node)) or not _set_by_us(node):
                return None, Action("left", host, f"cordoned by another user{_by(node)}")
            return _patch(node, cordon=False, reason=None), Action("changed", host, "uncordoned")

        return self._change(host, decide)

    def ours(self) -> list[str]:
        """Return the cordoned nodes that bear our reason.

        Raises:
            KubernetesError: the server does not answer, or refuses.
        """
        nodes = self._api.list(NODE).items
        return [name for node in nodes if is_ours(name := _name(node), _reason(node)) and _cordoned(node)]

    def _change(
        self, host: str, decide: Callable[[Manifest], tuple[dict[str, Any] | None, Action]]
    ) -> Action:
        ref = ObjectRef(NODE, "", host)
        for _ in range(TRIES):
            try:
                patch, action = decide(self._api.get(ref))
                if patch is not None:
                    self._api.patch(ref, patch)
            except Conflict:
                continue
            except NotFound:
                return Action("failed", host, "the cluster has no node of this name")
            except KubernetesError as error:
                return Action("failed", host, str(error))
            return action
        return Action("failed", host, f"others changed it {TRIES} times while it was read; try again")


def _patch(node: Manifest, *, cordon: bool, reason: str | None) -> dict[str, Any]:
    """Return a merge patch (RFC 7386, null removes) that the server takes for this version of the node alone."""
    version = metadata_of(node).get("resourceVersion")
    return {
        "metadata": {"resourceVersion": version, "annotations": {ANNOTATION: reason}},
        "spec": {"unschedulable": True if cordon else None},
    }


def _name(node: Manifest) -> str:
    return str(metadata_of(node).get("name") or "")


def _reason(node: Manifest) -> str:
    annotations = metadata_of(node).get("annotations")
    return str(annotations.get(ANNOTATION) or "") if isinstance(annotations, dict) else ""


def _cordoned(node: Manifest) -> bool:
    spec = node.get("spec")
    return isinstance(spec, dict) and spec.get("unschedulable") is True


def _managers(node: Manifest) -> list[str]:
    """Return who is noted to have set ``spec.unschedulable``; nobody on servers that keep no such notes (before 1.18)."""
    entries = metadata_of(node).get("managedFields")
    found = []
    for entry in entries if isinstance(entries, list) else []:
        fields = entry.get("fieldsV1") if isinstance(entry, dict) else None
        spec = fields.get("f:spec") if isinstance(fields, dict) else None
        if isinstance(spec, dict) and "f:unschedulable" in spec:
            found.append(str(entry.get("manager") or ""))
    return found


def _set_by_us(node: Manifest) -> bool:
    return all(manager == MANAGER for manager in _managers(node))


def _by(node: Manifest) -> str:
    if reason := _reason(node):
        return f": {reason}"
    managers = ", ".join(_managers(node))
    return f" (by {managers})" if managers else ""


#: One scheduler's nodes. No method touches a node that somebody else has out of service.
NodeAdmin = SlurmNodes | KubernetesNodes
