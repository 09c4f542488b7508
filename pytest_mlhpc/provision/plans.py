"""The files of a plan, which every provisioner writes: folders and files that only this user may read and change."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from pytest_mlhpc.config.model import Environment, Partition
from pytest_mlhpc.errors import ProvisionError
from pytest_mlhpc.node.files import NO_ROOM, UnsafeDirectoryError, make_private, open_private, unwritten
from pytest_mlhpc.node.protocol.plan import Plan
from pytest_mlhpc.store.files import make_directories


def environment_of(plan: Plan, partition: Partition) -> Environment:
    """Return the environment that *plan* names, with the software that its tests ask for.

    Raises:
        ProvisionError: ``rejected``, the partition has none of this name (an adopted plan after an edit).
    """
    for environment in partition.environments:
        if environment.name == plan.environment:
            return environment.with_software(plan.modules, plan.image)
    raise ProvisionError("rejected", f"{partition.id} has no environment {plan.environment!r} any more")


def make_session_directory(directory: Path) -> None:
    """Make a session's folder below ``runs``, for this user alone. ``runs`` may be a group's, like the state directory.

    Raises:
        OSError: it cannot be made, or is another user's (UnsafeDirectoryError).
    """
    runs, root = directory.parent, directory.parent.parent
    make_directories(runs, root)
    found, sticky = runs.stat(), stat.S_ISVTX & root.stat().st_mode
    if sticky and not found.st_mode & sticky and found.st_uid == os.geteuid():
        # No user may rename another's folder here, as in the state directory.
        runs.chmod(stat.S_IMODE(found.st_mode) | sticky)
    make_private(directory)


def make_directory(directory: Path, *inside: str) -> None:
    """Make an allocation's folder below its session's, and those *inside*, all for this user alone.

    Raises:
        OSError: one cannot be made, or is another user's (UnsafeDirectoryError).
    """
    make_session_directory(directory.parent)
    for folder in (directory, *(directory / name for name in inside)):
        make_private(folder)


def write_private(path: Path, text: str, *, new: bool = False) -> None:
    """Write a file that only this user may read and change: nodes execute it, and variables may hold secrets.

    Raises:
        OSError: it cannot be written, is another user's (UnsafeDirectoryError), or exists although *new* is set.
    """
    flags = os.O_EXCL if new else os.O_TRUNC
    with os.fdopen(open_private(path, os.O_WRONLY | os.O_CREAT | flags), "w", encoding="utf-8") as file:
        file.write(text)


def cannot_write(error: OSError, path: Path) -> ProvisionError:
    """Return the error of an allocation whose files below *path* cannot be written, or are not this user's alone."""
    return ProvisionError(unwritten(error), no_room(error, path))


def no_room(error: OSError, path: Path) -> str:
    """Return which file could not be written, why, and what to do about it."""
    if isinstance(error, UnsafeDirectoryError):
        return f"{error.filename}: {error.strerror}"
    hint = "; free space, or choose another state directory" if error.errno in NO_ROOM else ""
    return f"cannot write {error.filename or path}: {error.strerror}{hint}"
