"""Commands in this process."""

from cli_calls import mlhpc  # noqa: F401 - a fixture
