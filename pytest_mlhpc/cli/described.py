"""The systems that a command is about: those of the file that it names, or of this folder's."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_mlhpc.config.systems import Systems


def load(file: str | None, hook: Any = None) -> Systems:
    """Return all systems of *file*.

    Raises:
        ConfigError: the file is wrong; names every problem.
    """
    from pytest_mlhpc.builtin import make_manager
    from pytest_mlhpc.config.files import find_systems_file
    from pytest_mlhpc.config.systems import load_systems

    hook = hook or make_manager().hook
    return load_systems(
        find_systems_file(Path.cwd(), file),
        schedulers=_merged(hook.mlhpc_schedulers()),
        launchers=_merged(hook.mlhpc_launchers()),
        environ=os.environ,
    )


def _merged(answers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for answer in answers for name, value in answer.items()}
