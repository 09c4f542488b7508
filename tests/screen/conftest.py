"""Commands in this process."""

from cli_calls import mlhpc, refused  # noqa: F401 - fixtures
