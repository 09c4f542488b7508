"""Fixtures of suites that run against the real Grid Engine as a user runs them."""

import functools
from collections.abc import Callable

import pytest
from grid_suites import Suite
from gridengine_service import GridEngine


@pytest.fixture
def make_suite(make_suite_of: Callable[..., Suite]) -> Callable[..., Suite]:
    """Make suites on a Grid Engine: `make_suite(gridengine)`."""
    return functools.partial(make_suite_of, Suite)


@pytest.fixture
def suite(gridengine: GridEngine, make_suite: Callable[..., Suite]) -> Suite:
    """A suite on the shared Grid Engine."""
    return make_suite(gridengine)
