"""Stored runs, and commands in this process."""

import pytest
from cli_calls import mlhpc, refused  # noqa: F401 - fixtures
from nights_of import store as store_records


@pytest.fixture
def store(state_dir):
    """Return what stores records."""
    return lambda *records: store_records(state_dir, records)
