"""NVIDIA GPUs: events and copies as in :mod:`streams`, graphs, energy and driver by NVML."""

from __future__ import annotations

import os
from typing import Any, Mapping, Optional, Tuple

import torch

from pytest_mlhpc.node.worker import energy
from pytest_mlhpc.node.worker.accelerators.streams import Capturing, ordinal_for
from pytest_mlhpc.node.worker.environment import WorkerFailure


class Cuda(Capturing):
    """One GPU of one rank; a step of it can be captured."""

    type = "cuda"
    backend = "nccl"

    def __init__(self, ordinal: int) -> None:
        super().__init__(torch.cuda, torch.device("cuda", ordinal))
        self._properties = torch.cuda.get_device_properties(self.device)
        self.model = str(self._properties.name)
        self.uuid = device_uuid(self._properties, ordinal)
        self._counter = energy.NvmlCounter(self.uuid, pci_address(self._properties))
        found = self._counter.index()
        self.index = ordinal if found is None else found

    def energy_j(self) -> Optional[float]:
        """Return the board's energy counter, see :mod:`pytest_mlhpc.node.worker.energy`."""
        return self._counter.joules()

    def environment(self) -> Mapping[str, str]:
        """Return driver, CUDA, cuDNN and NCCL versions, and which GPU this is."""
        cudnn: Any = torch.backends.cudnn  # without types
        found = {
            "cuda": str(torch.version.cuda),
            "cudnn": str(cudnn.version() or ""),
            "compute_capability": f"{self._properties.major}.{self._properties.minor}",
            "device_uuid": self.uuid or "",
            "driver": self._counter.driver() or "",
        }
        if torch.distributed.is_available() and hasattr(torch.cuda, "nccl"):
            found["nccl"] = ".".join(map(str, nccl_version()))
        return {name: value for name, value in found.items() if value}


def nccl_version() -> Tuple[int, ...]:
    """Return NCCL's version, or an empty tuple where torch was built without it."""
    nccl: Any = torch.cuda.nccl  # without types
    try:
        version = nccl.version()
    except (RuntimeError, AttributeError):
        return ()
    return tuple(version) if isinstance(version, tuple) else (int(version),)


def device_uuid(properties: Any, ordinal: int, visible: Optional[str] = None) -> Optional[str]:
    """Return ``GPU-...`` of the device, or None where neither torch (before 2.4) nor CUDA_VISIBLE_DEVICES tells.

    An index in CUDA_VISIBLE_DEVICES is no help: CUDA may order devices by speed, NVML orders them by bus.
    """
    uuid = getattr(properties, "uuid", None)
    if uuid is not None:
        return f"GPU-{uuid}"
    text = os.environ.get("CUDA_VISIBLE_DEVICES", "") if visible is None else visible
    entries = [entry.strip() for entry in text.split(",") if entry.strip()]
    if ordinal < len(entries) and entries[ordinal].startswith(("GPU-", "MIG-")):
        return entries[ordinal]
    return None


def pci_address(properties: Any) -> Optional[str]:
    """Return ``domain:bus:device.0`` in NVML's spelling, or None where torch does not tell (before 2.5)."""
    bus = getattr(properties, "pci_bus_id", None)
    if not isinstance(bus, int):
        return None
    return f"{getattr(properties, 'pci_domain_id', 0):08X}:{bus:02X}:{getattr(properties, 'pci_device_id', 0):02X}.0"


def open_device(local_rank: int) -> Cuda:
    """Return this rank's GPU.

    Raises:
        WorkerFailure: ``wrong_device``, torch cannot use an NVIDIA GPU here.
    """
    if torch.version.cuda is None:
        text = f"torch {torch.__version__} of this environment is built without CUDA; it cannot use an NVIDIA GPU"
        raise WorkerFailure("wrong_device", text)
    if not torch.cuda.is_available() or torch.cuda.device_count() == 0:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        text = f"torch {torch.__version__} finds no NVIDIA GPU (CUDA_VISIBLE_DEVICES={visible!r}); check driver and allocation"
        raise WorkerFailure("wrong_device", text)
    return Cuda(ordinal_for(local_rank, torch.cuda.device_count()))
