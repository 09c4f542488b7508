"""Children with torch that serve all tests of a session: starting one takes a second."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

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


@pytest.fixture
def processes(request: pytest.FixtureRequest) -> Callable[[], list[str]]:
    """Return what lists the live processes that the test has started."""
    ours = request.config.pluginmanager.get_plugin(str(Path(__file__).parents[1] / "conftest.py"))
    return lambda: ours.processes_of_test(os.environ["MLHPC_TEST"])
