"""PAYLOAD. Energy from the board's own counter, addressed by UUID; None where it does not tell, never zero.

Source: NVML ``nvmlDeviceGetTotalEnergyConsumption``, millijoules since the driver was loaded, Volta and newer. It is
read at both ends of the window; power is never polled. The device index is no address: CUDA_VISIBLE_DEVICES renumbers.
"""

from __future__ import annotations

from typing import Any, Optional


class NvmlCounter:
    """The counter of one GPU. Every method returns None when NVML, its Python module or the board cannot answer."""

    def __init__(self, uuid: Optional[str], pci_address: Optional[str] = None) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        try:
            import pynvml
        except ImportError:
            return
        try:
            pynvml.nvmlInit()
            self._nvml = pynvml
            if uuid is not None:
                self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            elif pci_address is not None:
                self._handle = pynvml.nvmlDeviceGetHandleByPciBusId(pci_address)
        except pynvml.NVMLError:
            self._handle = None

    def joules(self) -> Optional[float]:
        """Return the counter in joules."""
        millijoules = self._ask("nvmlDeviceGetTotalEnergyConsumption")
        return None if millijoules is None else float(millijoules) / 1e3

    def index(self) -> Optional[int]:
        """Return the GPU's number on its node in NVML's order, which is that of the bus."""
        found = self._ask("nvmlDeviceGetIndex")
        return None if found is None else int(found)

    def driver(self) -> Optional[str]:
        """Return the driver's version."""
        if self._nvml is None:
            return None
        try:
            version = self._nvml.nvmlSystemGetDriverVersion()
        except self._nvml.NVMLError:
            return None
        return version.decode() if isinstance(version, bytes) else str(version)

    def _ask(self, function: str) -> Any:
        if self._handle is None:
            return None
        try:
            return getattr(self._nvml, function)(self._handle)
        except self._nvml.NVMLError:  # MIG slices and old boards have no counter
            return None


def difference(before: Optional[float], after: Optional[float]) -> Optional[float]:
    """Return the joules used between two readings, or None if one is missing or the counter did not move forward."""
    if before is None or after is None or after <= before:
        return None
    return after - before
