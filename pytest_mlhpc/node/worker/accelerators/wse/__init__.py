"""Cerebras' wafer-scale engine by ``cerebras.pytorch``: written for 2.10, which wants an environment of its own.

One rank drives all systems of a run. The model is traced and compiled as a whole; the cluster's own workers read the data. It
never ran on a cluster: tests train on the package's CPU back-end and lower for the wafer (``docs/accelerators.md``).
"""

from __future__ import annotations

import importlib
from typing import Any, Mapping, Optional

from pytest_mlhpc.node.worker.accelerators.cpu import Cpu
from pytest_mlhpc.node.worker.environment import WorkerFailure

#: What a record calls the device, by the value of the field ``cerebras``.
MODELS: Mapping[Optional[str], str] = {None: "Cerebras CSX", "cpu": "CPU back-end of cerebras.pytorch"}


class Wse(Cpu):
    """The systems of one rank. What this process sees of them is the loss of each step, by the host's clock."""

    type = "wse"

    def __init__(self, local_rank: int, version: str) -> None:
        super().__init__(local_rank, MODELS[None])
        self._version = version

    def peak_memory_bytes(self) -> Optional[int]:
        """Return None: what this host holds says nothing of a wafer."""
        return None

    def environment(self) -> Mapping[str, str]:
        """Return the version of Cerebras' package."""
        return {"cerebras_pytorch": self._version}


def load() -> Any:
    """Return the module ``cerebras.pytorch``.

    Raises:
        WorkerFailure: ``wrong_device``, it is not in this environment.
    """
    try:
        return importlib.import_module("cerebras.pytorch")
    except (ImportError, OSError) as error:
        text = (
            f"cannot import cerebras.pytorch: {error}. Give the system an environment of its own for it: a venv of Python 3.11 "
            "with cerebras-pytorch==2.10.0, whose python is named in systems.yaml"
        )
        raise WorkerFailure("wrong_device", text) from error


def open_device(local_rank: int) -> Wse:
    """Return this rank's systems. Whether a cluster answers shows when the model is compiled for it.

    Raises:
        WorkerFailure: ``wrong_device``, see :func:`load`.
    """
    return Wse(local_rank, str(getattr(load(), "__version__", "")))
