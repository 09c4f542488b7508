"""What is checked when all tests are known and before anything is submitted: refused here is what cannot end well."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import pytest

from pytest_mlhpc.errors import UsageError
from pytest_mlhpc.jobs.spec import JobSpec
from pytest_mlhpc.options import Settings
from pytest_mlhpc.session.spending import Spending
from pytest_mlhpc.store.files import unusable


def check(specs: Sequence[JobSpec], settings: Settings) -> Spending:
    """Return what *specs* may cost.

    Raises:
        UsageError: they cannot be detached, or are beyond a budget; or Slurm cannot be asked from here.
        pytest.exit.Exception: a maintenance would only hold them up.
    """
    _refuse_state_dir(settings)
    _refuse_detaching(specs, settings)
    unused = _refuse_unusable_slurm(specs, settings)
    spending = Spending(specs, settings)
    spending.announcement += unused
    return spending


def _refuse_state_dir(settings: Settings) -> None:
    if why := unusable(settings.state_dir):
        raise UsageError(
            f"the state directory {settings.state_dir} cannot be used: {why}; choose another one by --mlhpc-state or MLHPC_STATE"
        )


def _refuse_detaching(specs: Sequence[JobSpec], settings: Settings) -> None:
    asked = settings.wait_s is not None
    local = next((one for one in specs if one.target.partition.scheduler == "local"), None)
    if asked and local is not None:
        raise UsageError(
            f"--mlhpc-wait: nothing outlives pytest on {local.target.partition.id}, which is this machine"
        )


def _refuse_unusable_slurm(specs: Sequence[JobSpec], settings: Settings) -> list[str]:
    """Ask Slurm whether jobs would end well; return what to say of the user's environment."""
    slurm = [spec for spec in specs if spec.target.partition.scheduler == "slurm"]
    if not slurm:
        return []
    from pytest_mlhpc.provision.slurm.client import SlurmUnusable
    from pytest_mlhpc.provision.slurm.preflight import maintenance_delay, refuse_unusable, unused_variables
    from pytest_mlhpc.session.sweep import client_of

    words = ""
    try:
        refuse_unusable(os.environ)
        if not settings.here and settings.resume is None:
            words = maintenance_delay(slurm, client_of, time.time_ns())
    except SlurmUnusable as error:
        raise UsageError(f"{slurm[0].target.partition.id}: {error}; nothing was submitted") from error
    if words:
        pytest.exit(f"infra: {words}; nothing was submitted", returncode=settings.infra_exit_code)
    return [] if settings.here else unused_variables(os.environ)
