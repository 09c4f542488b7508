"""Fixtures of suites that run against the real cluster as a user runs them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fault_suites import Suite
from services import Slurm


@pytest.fixture
def make_suite(tmp_path: Path, state_dir: Path) -> Iterator[Callable[..., Suite]]:
    """Make suites on a cluster; all share the test's state directory unless told otherwise."""
    made: list[Suite] = []

    def make(slurm: Slurm, folder: str = "suite", state: Path | None = None) -> Suite:
        suite = Suite(slurm, tmp_path / folder, state or state_dir)
        suite.partition()
        made.append(suite)
        return suite

    yield make
    for suite in made:
        suite.close()


@pytest.fixture
def suite(slurm: Slurm, make_suite: Callable[..., Suite]) -> Suite:
    """A suite on the shared cluster."""
    return make_suite(slurm)
