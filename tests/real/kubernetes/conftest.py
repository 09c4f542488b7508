"""Fixtures of suites that run against the real Kubernetes as a user runs them."""

import functools
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
def make_pod_suite(make_suite_of: Callable[..., Suite]) -> Callable[..., Suite]:
    """Make suites: `make_pod_suite(cluster, namespace, folder="suite", state=None, **kubernetes)`."""
    return functools.partial(make_suite_of, Suite)


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
