"""Runs in the store, and commands in this process."""

import itertools
import time

import pytest
from cli_calls import mlhpc, refused  # noqa: F401 - fixtures
from nights_of import DAY, store
from worlds import SECOND, record


@pytest.fixture
def recorded(state_dir):
    """Return what stores a run on a machine, *days* ago; later calls store newer runs."""
    numbers = itertools.count(1)

    def put(machine="cirrus:standard", *, days=0.0, **fields):
        number = next(numbers)
        system, _, partition = machine.partition(":")
        created_ns = time.time_ns() - int(days * DAY) - (10_000 - number) * SECOND
        run = {"system": system, "partition": partition, "created_ns": created_ns, **fields}
        store(state_dir, [record(number, **run)])

    return put
