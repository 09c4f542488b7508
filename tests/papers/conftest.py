"""Runs in the store, and commands in this process."""

from cli_calls import mlhpc, refused  # noqa: F401 - fixtures
from nights_of import recorded  # noqa: F401 - a fixture
