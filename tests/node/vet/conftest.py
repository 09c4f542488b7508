"""Children with torch that serve all tests of a session: starting one takes a second."""

import os
from collections.abc import Iterator

import pytest
from child_driver import Child
from cli_calls import mlhpc  # noqa: F401 - a fixture


@pytest.fixture(scope="session")
def child() -> Iterator[Child]:
    """A child on all cores."""
    with Child(environ={"GLOO_SOCKET_IFNAME": "lo"}) as started:
        started.ready()
        yield started


@pytest.fixture(scope="session")
def other(child: Child) -> Iterator[Child]:
    """A second one, on one core."""
    with Child(environ={"GLOO_SOCKET_IFNAME": "lo"}, cores={min(os.sched_getaffinity(0))}) as started:
        assert started.ready()["threads"] == 1
        yield started


@pytest.fixture(scope="session")
def pair(child: Child, other: Child) -> tuple[Child, Child]:
    return child, other
