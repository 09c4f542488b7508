"""Fixtures of suites that run against the real cluster as a user runs them."""

import functools
from collections.abc import Callable

import pytest
from fault_suites import Suite
from services import Slurm


@pytest.fixture
def make_suite(make_suite_of: Callable[..., Suite]) -> Callable[..., Suite]:
    """Make suites on a cluster: `make_suite(slurm, folder="suite", state=None)`."""
    return functools.partial(make_suite_of, Suite)


@pytest.fixture
def suite(slurm: Slurm, make_suite: Callable[..., Suite]) -> Suite:
    """A suite on the shared cluster."""
    return make_suite(slurm)
