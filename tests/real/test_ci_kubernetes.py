"""`ci/kubernetes`: starts a real Kubernetes, breaks it on demand, and leaves nothing."""

from __future__ import annotations

from kubernetes_service import Kubernetes


def test_the_shared_cluster_has_two_nodes_with_gpus(kubernetes: Kubernetes, namespace: str) -> None:
    nodes = {
        node["metadata"]["name"]: node["status"]["capacity"] for node in kubernetes.items("/api/v1/nodes")
    }

    assert list(nodes) == ["127.0.0.1", "127.0.0.2"]
    assert all(capacity["cpu"] == "16" for capacity in nodes.values())
    assert all(capacity["nvidia.com/gpu"] == "4" for capacity in nodes.values())
