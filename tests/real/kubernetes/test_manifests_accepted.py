"""What is made of plans is taken by a real server as it is, field for field, but for those that it is too old to know."""

from typing import Any

import pytest
from kubernetes_service import ApiError, Kubernetes
from manifests import partition, rendered

from pytest_mlhpc.provision.kubernetes.objects import Resource, dropped_fields

pytestmark = pytest.mark.servers

_PLURALS = {
    "Secret": ("", "secrets"),
    "Service": ("", "services"),
    "Pod": ("", "pods"),
    "Job": ("batch", "jobs"),
}
VOLUMES = [
    {"name": "claim", "mount": "/c", "claim": "c", "read_only": True, "sub_path": "a"},
    {"name": "host", "mount": "/h", "host_path": "/srv"},
    {"name": "empty", "mount": "/e", "empty_dir": {"size": "1GiB", "medium": "memory"}},
    {"name": "secret", "mount": "/s", "secret": "s"},
    {"name": "config", "mount": "/m", "config_map": "m"},
]


def stored(cluster: Kubernetes, manifest: dict[str, Any]) -> dict[str, Any]:
    """Return *manifest* as the server would store it; nothing is created."""
    group, plural = _PLURALS[manifest["kind"]]
    resource = Resource(group, "v1", manifest["kind"], plural)
    path = f"{resource.path(manifest['metadata']['namespace'])}?dryRun=All"
    return cluster.ask("POST", path, manifest)


def lost(
    cluster: Kubernetes, *, nodes: int = 1, plan: dict[str, Any] | None = None, **options: Any
) -> set[str]:
    """Return what the server drops of all objects of an allocation."""
    made = rendered(partition(namespace="default", **options), nodes, **(plan or {}))
    objects = [made.secret, *([made.service] if made.service else []), *made.workloads]
    return {path for one in objects for path in dropped_fields(one, stored(cluster, one))}


def minor(cluster: Kubernetes) -> int:
    return int(cluster.ask("GET", "/version")["minor"].rstrip("+"))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kind": "pods", "nodes": 2, "service": True},
        {"plan": {"nodelist": ("a", "b"), "excluded_nodes": ("c", "d")}},
        {"generate_name": True, "run_as_user": 1000, "run_as_group": 1000, "fs_group": 1000},
        {"tolerations": [{"key": "a", "operator": "Exists"}], "node_selector": {"a": "b"}},
        {"volumes": VOLUMES, "image_pull_secrets": ["p"], "labels": {"a": "b"}, "annotations": {"c": "d e"}},
        {"kind": "pods", "nodes": 2, "spread": "preferred", "plan": {"excluded_nodes": ("c",)}},
        {"resources": {"limits": {"cpu": "1500m", "memory": "1GiB"}, "requests": {"cpu": 0.5}}},
    ],
)
def test_nothing_is_lost_of_what_every_server_knows(kubernetes: Kubernetes, options: dict[str, Any]):
    assert lost(kubernetes, **options) == set()


@pytest.mark.parametrize(
    ("options", "since", "field"),
    [
        ({"nodes": 3, "service": True}, 21, "spec.completionMode"),
        ({"kind": "kueue", "labels": {"kueue.x-k8s.io/queue-name": "q"}}, 21, "spec.suspend"),
        ({"manifest": {"spec": {"backoffLimitPerIndex": 1}}}, 28, "spec.backoffLimitPerIndex"),
    ],
)  # fmt: skip
def test_what_a_server_is_too_old_for_is_reported_by_name(
    kubernetes: Kubernetes, options: dict[str, Any], since: int, field: str
):
    assert lost(kubernetes, **options) == ({field} if minor(kubernetes) < since else set())


def test_a_claim_for_each_pod_is_refused_by_a_server_that_does_not_know_it(kubernetes: Kubernetes):
    volumes = [{"name": "fast", "mount": "/fast", "template": "1GiB"}]
    if minor(kubernetes) >= 21:
        assert lost(kubernetes, volumes=volumes) == set()
        return
    with pytest.raises(ApiError, match="must specify a volume type"):
        lost(kubernetes, volumes=volumes)
