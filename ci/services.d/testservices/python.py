"""The Python that has the packages of this project's tests: `ci/services` itself runs with any."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from testcluster.errors import UnfitMachineError

_VENV = Path(__file__).resolve().parents[3] / ".venv"


def interpreter(package: str) -> str:
    """Return a Python that can import a package: this one, or that of the checkout's .venv.

    Raises:
        UnfitMachineError: Neither can.
    """
    if importlib.util.find_spec(package) is not None:
        return sys.executable
    if any(_VENV.glob(f"lib/python*/site-packages/{package}")):
        return str(_VENV / "bin/python")
    raise UnfitMachineError(f"no Python with {package}; `make test` makes {_VENV}, which has it")
