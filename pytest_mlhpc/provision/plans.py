"""What provisioners that write their plan into a directory have in common."""

from __future__ import annotations

import os
from pathlib import Path

from pytest_mlhpc.batch.plan import Plan
from pytest_mlhpc.errors import ProvisionError
from pytest_mlhpc.system.model import Environment, Partition


def environment_of(plan: Plan, partition: Partition) -> Environment:
    """Return the environment that *plan* names.

    Raises:
        ProvisionError: ``rejected``, the partition has none of this name (an adopted plan after an edit).
    """
    for environment in partition.environments:
        if environment.name == plan.environment:
            return environment
    raise ProvisionError("rejected", f"{partition.id} has no environment {plan.environment!r} any more")


def write_private(path: Path, text: str, *, new: bool = False) -> None:
    """Write a file that only this user may read: variables may hold secrets.

    Raises:
        OSError: it cannot be written, or *new* is set and something lies there already.
    """
    flags = os.O_EXCL | os.O_NOFOLLOW if new else os.O_TRUNC
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flags, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(text)
