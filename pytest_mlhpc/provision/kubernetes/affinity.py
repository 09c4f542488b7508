"""On which nodes pods may and may not run, and whether on one and the same. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, Final

from pytest_mlhpc.provision.kubernetes.labels import ALLOCATION

#: The label that kubelets give their node (kubernetes.io/docs/reference/labels-annotations-taints).
HOSTNAME: Final = "kubernetes.io/hostname"
_REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED: Final = "preferredDuringSchedulingIgnoredDuringExecution"


def with_affinity(
    affinity: Mapping[str, Any] | None,
    *,
    nodelist: Sequence[str],
    excluded: Sequence[str],
    allocation: str,
    spread: str,
) -> dict[str, Any]:
    """Return a copy of *affinity* that also keeps pods on *nodelist* (if any), off *excluded*, and apart as *spread* says."""
    found = deepcopy(dict(affinity or {}))
    if nodelist or excluded:
        required = _below(_below(found, "nodeAffinity"), _REQUIRED)
        required["nodeSelectorTerms"] = _terms(required.get("nodeSelectorTerms") or [{}], nodelist, excluded)
    if spread != "none":
        apart = _below(found, "podAntiAffinity")
        term = {"labelSelector": {"matchLabels": {ALLOCATION: allocation}}, "topologyKey": HOSTNAME}
        if spread == "required":
            apart[_REQUIRED] = [*(apart.get(_REQUIRED) or []), term]
        else:
            weighted = {"weight": 100, "podAffinityTerm": term}
            apart[_PREFERRED] = [*(apart.get(_PREFERRED) or []), weighted]
    return found


def _below(found: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the mapping at *key*, made if there is none."""
    inner: dict[str, Any] | None = found.get(key)
    if inner is None:
        inner = found[key] = {}
    return inner


def _terms(
    theirs: Sequence[Mapping[str, Any]], nodelist: Sequence[str], excluded: Sequence[str]
) -> list[dict[str, Any]]:
    """Return selector terms, of which one has to hold. ``metadata.name`` takes one value at a time (validation of core/v1)."""
    off = [_is("NotIn", name) for name in dict.fromkeys(excluded)]
    on: list[list[dict[str, Any]]] = [[_is("In", name)] for name in dict.fromkeys(nodelist)] or [[]]
    return [
        {**term, "matchFields": [*(term.get("matchFields") or []), *one, *off]}
        for term in theirs
        for one in on
    ]


def _is(operator: str, name: str) -> dict[str, Any]:
    return {"key": "metadata.name", "operator": operator, "values": [name]}
