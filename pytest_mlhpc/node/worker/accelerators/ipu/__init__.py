"""Graphcore's IPUs by poptorch: archived. It never ran on hardware; its tests have a stand-in with poptorch's signatures.

A rank is a process of the host that has its model compiled for the IPUs and calls it. It computes nothing itself, but all that
is done when a call returns, so times are those of the host's clock, as on CPUs; poptorch tells how long transfers took.
"""

from __future__ import annotations

import importlib
import os
from typing import Any, Mapping, Optional

import torch

from pytest_mlhpc.node.worker.accelerators.cpu import Cpu
from pytest_mlhpc.node.worker.environment import WorkerFailure


class Ipu(Cpu):
    """The IPUs of one rank, however many; tensors stay with the host until poptorch takes them."""

    type = "ipu"

    def __init__(self, local_rank: int, poptorch: Any) -> None:
        super().__init__(local_rank, f"Graphcore IPU Mk{poptorch.ipuHardwareVersion()}")
        self._version = str(getattr(poptorch, "__version__", ""))

    def peak_memory_bytes(self) -> Optional[int]:
        """Return None: what the host holds says nothing of the IPUs, whose memory is laid out when a model is compiled."""
        return None

    def environment(self) -> Mapping[str, str]:
        """Return poptorch's version, and which partition of IPUs the host was given."""
        found = {
            "poptorch": self._version,
            "ipu_partition": os.environ.get("IPUOF_VIPU_API_PARTITION_ID", ""),
            "poplar_engine_options": os.environ.get("POPLAR_ENGINE_OPTIONS", ""),
        }
        return {name: value for name, value in found.items() if value}


def load() -> Any:
    """Return the module ``poptorch``.

    Raises:
        WorkerFailure: ``wrong_device``, it is not here.
    """
    try:
        return importlib.import_module("poptorch")
    except (ImportError, AssertionError, OSError) as error:  # AssertionError: made for another torch
        text = (
            f"cannot import poptorch beside torch {torch.__version__}: {error}. It comes with the Poplar SDK, is in no "
            "package registry and wants the one torch that it was made for: use an image of Graphcore's, or source the "
            "SDK's enable scripts before python starts"
        )
        raise WorkerFailure("wrong_device", text) from error


def open_device(local_rank: int) -> Ipu:
    """Return this rank's IPUs.

    Raises:
        WorkerFailure: ``wrong_device``, there is no poptorch here, or it finds no IPU.
    """
    poptorch = load()
    if not poptorch.ipuHardwareIsAvailable():
        text = (
            "poptorch finds no IPU; check that the job asked for some, that IPUOF_VIPU_API_PARTITION_ID names the "
            "partition, and what gc-info -l says"
        )
        raise WorkerFailure("wrong_device", text)
    return Ipu(local_rank, poptorch)
