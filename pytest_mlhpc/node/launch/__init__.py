"""Launchers: a run plan and good nodes become an argument vector and an environment, nothing else."""

from __future__ import annotations

#: Our own launchers, each a module of this package. Another launcher is named by its own payload module.
OURS = frozenset({"plain", "torchrun", "srun", "mpirun", "poprun", "podrun", "spawn"})


def module_of(launcher: str) -> str:
    """Return the module that holds ``launch`` for the launcher that a run plan names."""
    return f"{__name__}.{launcher}" if launcher in OURS else launcher
