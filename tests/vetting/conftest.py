"""Commands in this process, and resolved jobs."""

from cli_calls import mlhpc  # noqa: F401 - a fixture
from job_specs import command, declare, target  # noqa: F401 - fixtures
