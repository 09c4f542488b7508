"""PAYLOAD. Energy of AMD boards from their own counter by ``amdsmi``, addressed by PCI; None where it does not tell, never zero.

Source: AMD SMI library, ``amdsmi_get_energy_count``: a count, and the microjoules of one step of it. The count stands under
``power`` in releases until 6.1 and under ``energy_accumulator`` in later ones. On boards of two dies one counts for both.
"""

from __future__ import annotations

import math
from typing import Any, Optional

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
            told = self._library.amdsmi_get_energy_count(self._handle)
            count = next(told[key] for key in KEYS if key in told)
            joules = float(count) * float(told["counter_resolution"]) / 1e6
        except Exception:  # noqa: BLE001 - as above; guests and old boards have no counter, others say 'N/A'
            return None
        return joules if math.isfinite(joules) and joules > 0 else None
