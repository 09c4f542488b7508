"""NumPy is optional: what computes in arrays is imported when it is needed, and its absence is told in a sentence."""

from __future__ import annotations

import importlib
from types import ModuleType

from pytest_mlhpc.errors import UsageError


def numeric(name: str) -> ModuleType:
    """Return the module *name* of this package, which imports NumPy.

    Raises:
        UsageError: NumPy is not installed.
    """
    try:
        return importlib.import_module(f"{__package__}.{name}")
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "numpy":
            raise
        raise UsageError(
            "change points are computed with NumPy, which is not installed: pip install 'pytest-mlhpc[history]'"
        ) from None
