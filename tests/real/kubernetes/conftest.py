"""Fixtures of suites that run against the real Kubernetes as a user runs them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from api_parts import Parts
from kubernetes_service import Kubernetes, clear_away
from pod_suites import Suite


@pytest.fixture
def parts(kubernetes: Kubernetes, namespace: str, tmp_path: Path) -> Iterator[Parts]:
    """Connections to the shared cluster."""
    found = Parts(kubernetes, namespace, tmp_path)
    yield found
    found.close()


@pytest.fixture
def make_pod_suite(tmp_path: Path, state_dir: Path) -> Iterator[Callable[..., Suite]]:
    """Make suites in a namespace of a cluster; all share the test's state directory unless told otherwise."""
    made: list[Suite] = []

    def make(
        cluster: Kubernetes,
        namespace: str,
        folder: str = "suite",
        state: Path | None = None,
        **kubernetes: object,
    ) -> Suite:
        suite = Suite(cluster, namespace, tmp_path / folder, state or state_dir)
        suite.partition(**kubernetes)
        made.append(suite)
        return suite

    yield make
    for suite in made:
        suite.close()


@pytest.fixture
def pod_suite(kubernetes: Kubernetes, namespace: str, make_pod_suite: Callable[..., Suite]) -> Suite:
    """A suite in a namespace of its own on the shared cluster."""
    return make_pod_suite(kubernetes, namespace)


@pytest.fixture
def more_namespaces(kubernetes: Kubernetes) -> Iterator[Callable[[], str]]:
    """Make further namespaces on the shared cluster, for faults of a namespace; nothing of ours may be left in them."""
    made: list[str] = []

    def make() -> str:
        made.append(kubernetes.make_namespace())
        return made[-1]

    yield make
    left = clear_away(kubernetes, made)
    for name in made:
        kubernetes.delete_namespace(name)
    assert not left, "the test left on Kubernetes: " + "; ".join(left)
