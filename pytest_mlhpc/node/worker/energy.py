"""Energy that a device used, from its board's own counter: NVML for NVIDIA, amdsmi for AMD."""

from __future__ import annotations

import math
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


#: Keys of the count, by release.
KEYS = ("energy_accumulator", "power")


class AmdCounter:
    """The counter of one GPU. Every method returns None when amdsmi, its driver or the board cannot answer."""

    def __init__(self, pci_address: Optional[str]) -> None:
        self._library: Any = None
        self._handle: Any = None
        self._index: Optional[int] = None
        if pci_address is None:
            return
        try:
            import amdsmi

            amdsmi.amdsmi_init()
            self._library = amdsmi
            self._find(pci_address)
        # The package raises its own classes, ctypes' and OSError, also while it is imported.
        except Exception:  # noqa: BLE001
            self._handle = None

    def _find(self, pci_address: str) -> None:
        for index, handle in enumerate(self._library.amdsmi_get_processor_handles()):
            if str(self._library.amdsmi_get_gpu_device_bdf(handle)).lower() == pci_address.lower():
                self._handle, self._index = handle, index
                return

    def index(self) -> Optional[int]:
        """Return the GPU's number on its node in amdsmi's order."""
        return self._index

    def joules(self) -> Optional[float]:
        """Return the counter in joules."""
        if self._handle is None:
            return None
        try:
            counts = self._library.amdsmi_get_energy_count(self._handle)
            count = next(counts[key] for key in KEYS if key in counts)
            joules = float(count) * float(counts["counter_resolution"]) / 1e6
        except Exception:  # noqa: BLE001 - as above; guests and old boards have no counter, others say 'N/A'
            return None
        return joules if math.isfinite(joules) and joules > 0 else None
