"""Intel GPUs by ``torch.xpu``, with XCCL between ranks: torch's own XPU build, 2.5 and newer."""

from __future__ import annotations

import os
from typing import Any, Mapping, Optional

import torch

from pytest_mlhpc.node.worker.accelerators.streams import Queued, ordinal_for
from pytest_mlhpc.node.worker.environment import WorkerFailure


class Xpu(Queued):
    """One GPU (on Max 1550: one tile, unless the driver joins them) of one rank."""

    type = "xpu"
    backend = "xccl"

    def __init__(self, ordinal: int, api: Any) -> None:
        super().__init__(api, torch.device("xpu", ordinal))
        self._properties = api.get_device_properties(self.device)
        self.model = str(self._properties.name)
        self.index = ordinal

    def energy_j(self) -> Optional[float]:
        """Return None: Level Zero's counter needs its own tools (sysman), which torch does not pass on."""
        return None

    def environment(self) -> Mapping[str, str]:
        """Return driver version and what this GPU is."""
        names = ("driver_version", "platform_name", "max_compute_units", "gpu_eu_count")
        found = {f"xpu_{name}": str(getattr(self._properties, name, "")) for name in names}
        return {name: value for name, value in found.items() if value}


def open_device(local_rank: int) -> Xpu:
    """Return this rank's GPU.

    Raises:
        WorkerFailure: ``wrong_device``, torch cannot use an Intel GPU here; ``not_supported``, this torch does not count
            the time of events on it.
    """
    api: Any = getattr(torch, "xpu", None)
    if api is None or not getattr(torch.version, "xpu", None):
        text = (
            f"torch {torch.__version__} of this environment is built without XPU; it cannot use an Intel GPU"
        )
        raise WorkerFailure("wrong_device", text)
    if not api.is_available() or api.device_count() == 0:
        visible = os.environ.get("ONEAPI_DEVICE_SELECTOR")
        text = f"torch {torch.__version__} finds no Intel GPU (ONEAPI_DEVICE_SELECTOR={visible!r}); check driver and allocation"
        raise WorkerFailure("wrong_device", text)
    if not hasattr(api, "max_memory_allocated"):
        text = f"torch {torch.__version__} lacks memory statistics and timing of Intel GPUs; 2.6 and newer have them"
        raise WorkerFailure("not_supported", text)
    return Xpu(ordinal_for(local_rank, api.device_count()), api)
