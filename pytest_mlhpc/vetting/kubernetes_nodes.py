"""Cordoning nodes of Kubernetes through its API, and uncordoning those that we have cordoned.

A change carries the version of the node that was looked at: if anybody changed it in between, the server refuses (409)
and the node is looked at anew. The reason is an annotation; who set ``spec.unschedulable`` last the server itself notes
(``managedFields``), so an administrator's own cordon on top of a forgotten annotation is not taken for ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pytest_mlhpc.provision.kubernetes.client import KubernetesClient
from pytest_mlhpc.provision.kubernetes.errors import Conflict, KubernetesError, NotFound
from pytest_mlhpc.provision.kubernetes.objects import NODE, Manifest, ObjectRef
from pytest_mlhpc.vetting.keeper import Action, changed, failed, left
from pytest_mlhpc.vetting.reasons import is_ours

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
                return None, left(host, f"already cordoned{_by(node)}")
            return _patch(node, cordon=True, reason=reason), changed(host, f"cordoned: {reason}")

        return self._change(host, decide)

    def give_back(self, host: str) -> Action:
        """Uncordon a node that we have cordoned."""

        def decide(node: Manifest) -> tuple[dict[str, Any] | None, Action]:
            if not _cordoned(node):
                return None, left(host, "not cordoned")
            if not is_ours(host, _reason(node)) or not _set_by_us(node):
                return None, left(host, f"cordoned by somebody else{_by(node)}")
            return _patch(node, cordon=False, reason=None), changed(host, "uncordoned")

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
                return failed(host, "the cluster has no node of this name")
            except KubernetesError as error:
                return failed(host, str(error))
            return action
        return failed(host, f"others changed it {TRIES} times while it was looked at; try again")


def _patch(node: Manifest, *, cordon: bool, reason: str | None) -> dict[str, Any]:
    """Return a merge patch (RFC 7386, null removes) that the server takes for this version of the node alone."""
    version = _metadata(node).get("resourceVersion")
    return {
        "metadata": {"resourceVersion": version, "annotations": {ANNOTATION: reason}},
        "spec": {"unschedulable": True if cordon else None},
    }


def _metadata(node: Manifest) -> dict[str, Any]:
    found = node.get("metadata")
    return found if isinstance(found, dict) else {}


def _name(node: Manifest) -> str:
    return str(_metadata(node).get("name") or "")


def _reason(node: Manifest) -> str:
    annotations = _metadata(node).get("annotations")
    return str(annotations.get(ANNOTATION) or "") if isinstance(annotations, dict) else ""


def _cordoned(node: Manifest) -> bool:
    spec = node.get("spec")
    return isinstance(spec, dict) and spec.get("unschedulable") is True


def _managers(node: Manifest) -> list[str]:
    """Return who is noted to have set ``spec.unschedulable``; nobody on servers that keep no such notes (before 1.18)."""
    entries = _metadata(node).get("managedFields")
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
