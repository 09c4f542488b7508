"""Fixtures of suites that run against the real Grid Engine as a user runs them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from grid_suites import Suite
from gridengine_service import GridEngine


@pytest.fixture
def make_suite(tmp_path: Path, state_dir: Path) -> Iterator[Callable[[GridEngine], Suite]]:
    """Make a suite on a Grid Engine."""
    made: list[Suite] = []

    def make(cluster: GridEngine) -> Suite:
        suite = Suite(cluster, tmp_path / "suite", state_dir)
        suite.partition()
        made.append(suite)
        return suite

    yield make
    for suite in made:
        suite.close()


@pytest.fixture
def suite(gridengine: GridEngine, make_suite: Callable[[GridEngine], Suite]) -> Suite:
    """A suite on the shared Grid Engine."""
    return make_suite(gridengine)
