"""Whether a pod went with its node: asked once, as old servers do not say of a deleted pod why it was."""

from __future__ import annotations

from pytest_mlhpc.provision.kubernetes.allocation import Allocation
from pytest_mlhpc.provision.kubernetes.api import KubernetesApi
from pytest_mlhpc.provision.kubernetes.causes import Cause, words
from pytest_mlhpc.provision.kubernetes.errors import KubernetesError, NotFound
from pytest_mlhpc.provision.kubernetes.resources import NODE, ObjectRef


def look_for_nodes(allocation: Allocation) -> None:
    """Note of pods that are gone whether their nodes are; where nodes may not be asked for, nothing is known of it."""
    for pod in allocation.pods.values():
        node, cause = pod.view.node, pod.view.cause
        vague = cause is None or cause.outcome == "channel_broken"
        if (pod.gone or pod.view.deleting) and node and vague and not pod.node_asked:
            pod.node_asked = True
            if text := _lost(allocation.api, node):
                pod.lost = Cause("node_failure", text, node=node)
                pod.see(pod.view)


def _lost(api: KubernetesApi, node: str) -> str:
    """Return what is wrong with *node*; empty: nothing that is known."""
    try:
        found = api.get(ObjectRef(NODE, "", node))
    except NotFound:
        return f"the node {node} is no longer in the cluster"
    except KubernetesError:
        return ""
    for condition in (found.get("status") or {}).get("conditions") or ():
        if condition.get("type") == "Ready" and condition.get("status") != "True":
            said = words(condition.get("reason"), condition.get("message"))
            return f"the node {node} is not ready: {said}"
    return ""
