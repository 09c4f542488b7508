"""Fixtures that tests of the command line share."""

from cli_calls import mlhpc, refused  # noqa: F401 - fixtures
