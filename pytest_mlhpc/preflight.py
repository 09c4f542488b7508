"""What is checked when all tests are known and before anything is submitted: refused here is what cannot end well."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from pytest_mlhpc.errors import SpecError, UsageError
from pytest_mlhpc.jobs.device_memory import too_large
from pytest_mlhpc.jobs.spec import JobSpec
from pytest_mlhpc.options import Settings
from pytest_mlhpc.spending import Spending


def check(specs: Sequence[JobSpec], settings: Settings) -> Spending:
    """Return what *specs* may cost.

    Raises:
        UsageError: they cannot be detached, do not fit into their devices' memory, or are beyond a budget.
        pytest.exit.Exception: a maintenance would only hold them up.
    """
    _refuse_too_large(specs)
    _refuse_detaching(specs, settings)
    _refuse_maintenance(specs, settings)
    return Spending(specs, settings)


def _refuse_too_large(specs: Sequence[JobSpec]) -> None:
    if problems := too_large(specs):
        raise SpecError(problems)


def _refuse_detaching(specs: Sequence[JobSpec], settings: Settings) -> None:
    asked = "--detach" if settings.detach else "--wait" if settings.wait_s is not None else ""
    local = next((one for one in specs if one.target.partition.scheduler == "local"), None)
    if asked and local is not None:
        raise UsageError(
            f"{asked}: nothing outlives pytest on {local.target.partition.id}, which is this machine"
        )


def _refuse_maintenance(specs: Sequence[JobSpec], settings: Settings) -> None:
    if settings.here or settings.resume is not None:
        return
    if not any(spec.target.partition.scheduler == "slurm" for spec in specs):
        return
    from pytest_mlhpc.provision.slurm.maintenance import delayed
    from pytest_mlhpc.sweep import client_of

    if words := delayed(specs, client_of, time.time_ns()):
        pytest.exit(f"infra: {words}; nothing was submitted", returncode=settings.infra_exit_code)
