"""The one pluggy manager that the pytest plug-in and the command line share."""

from __future__ import annotations

import pluggy

from pytest_mlhpc import hookspecs


def make_manager(*, entry_points: bool = True) -> pluggy.PluginManager:
    """Return a manager with our own parts registered, and those of installed packages unless told otherwise."""
    from pytest_mlhpc import builtin

    manager = pluggy.PluginManager("pytest_mlhpc")
    manager.add_hookspecs(hookspecs)
    manager.register(builtin, "builtin")
    if entry_points:
        manager.load_setuptools_entrypoints("pytest_mlhpc")
    return manager
