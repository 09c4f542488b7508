"""Is this measurement what was asked for? Anything less is a failure with a name, never a pass."""

from __future__ import annotations

from pytest_mlhpc.batch.plan import RunPlan
from pytest_mlhpc.jobs.spec import JobSpec
from pytest_mlhpc.results.failures import Failure
from pytest_mlhpc.results.schema import Measurement


def check(measurement: Measurement, spec: JobSpec, run: RunPlan) -> list[Failure]:
    """Return all that is wrong with *measurement*, worst first; empty when it may be judged."""
    raise NotImplementedError
