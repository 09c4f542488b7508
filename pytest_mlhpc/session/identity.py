"""The identity of a test: its node id without the target, its path relative to the root of its suite.

The same suite gives the same identities from a checkout and from a wheel, in whatever folder pytest is started.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

_PACKAGE: Final = Path(__file__).parents[1]
#: Any of these marks the root of a suite: where pytest finds its settings, our systems file, a repository.
_MARKS: Final = (
    "systems.yaml", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "pyproject.toml", "tox.ini", "setup.cfg", ".git",
)  # fmt: skip
#: Folders into which packages are installed.
_INSTALLED: Final = frozenset({"site-packages", "dist-packages"})
#: A folder of this name is part of the identity though nothing marks the folder above it.
_SUITES: Final = "suites"


def identity_of(item: pytest.Item, target: str) -> str:
    """Return ``suites/training/test_cosmoflow.py::test_cosmoflow[4]``; *target* is the id of the parameter that is left out."""
    names, parameters = item.nodeid.partition("::")[2], getattr(item, "callspec", None)
    if parameters is not None:
        names = names.removesuffix(f"[{parameters.id}]")
        if rest := _without(parameters.id, target):
            names += f"[{rest}]"
    path = item.path.relative_to(suite_root(item.path)).as_posix()
    return f"{path}::{names}"


def suite_root(path: Path) -> Path:
    """Return the folder to which the paths of a suite are relative; *path* is one of its files.

    It is the nearest folder that something marks as a root. Installed suites have their folder of packages, this project's
    own the package. Where nothing marks a root, it is the folder above ``suites``, else that of the file.
    """
    if path.is_relative_to(_PACKAGE):
        return _PACKAGE
    suites = path.parent
    for folder in path.parents:
        if folder.name in _INSTALLED or any((folder / mark).exists() for mark in _MARKS):
            return folder
        if folder.name == _SUITES:
            suites = folder.parent
    return suites


def _without(parameters: str, target: str) -> str:
    """Return a test's parameters without its target, which comes first unless another plugin has put one before it."""
    if parameters == target:
        return ""
    if parameters.startswith(f"{target}-"):
        return parameters.removeprefix(f"{target}-")
    return parameters.replace(f"-{target}", "", 1)
