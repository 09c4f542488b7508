"""PAYLOAD. NVIDIA GPUs: events instead of synchronising, copies on a stream of their own."""

from __future__ import annotations

import os
from typing import Any, Mapping, Optional, Tuple

import torch
from torch import Tensor

from pytest_mlhpc.worker import energy
from pytest_mlhpc.worker.accelerators.base import Copied, Mark
from pytest_mlhpc.worker.failure import WorkerFailure


class Cuda:
    """One GPU of one rank. Nothing here waits for the device but ``synchronize``, ``wait`` and the constructor."""

    type = "cuda"
    backend = "nccl"
    asynchronous = True

    def __init__(self, ordinal: int) -> None:
        self.device = torch.device("cuda", ordinal)
        torch.cuda.set_device(self.device)
        self._properties = torch.cuda.get_device_properties(self.device)
        self.model = str(self._properties.name)
        self.uuid = device_uuid(self._properties, ordinal)
        self._counter = energy.NvmlCounter(self.uuid, pci_address(self._properties))
        found = self._counter.index()
        self.index = ordinal if found is None else found
        self._cuda: Any = torch.cuda  # half of it is without types
        self._copies = self._cuda.Stream(self.device)

    def synchronize(self) -> None:
        """Wait until all queued work of all streams is done."""
        torch.cuda.synchronize(self.device)

    def mark(self) -> Mark:
        """Record a timing event on the compute stream."""
        event = self._cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self, mark: Mark) -> None:
        """Block until the device has passed *mark*."""
        mark.synchronize()

    def seconds(self, start: Mark, end: Mark) -> float:
        """Return the seconds between two events; both must have been passed."""
        return float(start.elapsed_time(end)) / 1e3

    def copy(self, tensors: Tuple[Tensor, ...]) -> Copied:
        """Copy pinned host tensors on the copy stream. Tensors already on the device are returned as they are."""
        if all(tensor.device == self.device for tensor in tensors):
            return Copied(tensors)
        start, end = self._cuda.Event(enable_timing=True), self._cuda.Event(enable_timing=True)
        with torch.cuda.stream(self._copies):
            start.record(self._copies)
            moved = tuple(tensor.to(self.device, non_blocking=True) for tensor in tensors)
            end.record(self._copies)
        return Copied(moved, start, end)

    def await_copy(self, copied: Copied) -> None:
        """Let the compute stream wait for the copy, and keep the memory until the compute stream is done with it."""
        if copied.end is None:
            return
        compute = torch.cuda.current_stream(self.device)
        compute.wait_event(copied.end)
        for tensor in copied.tensors:
            tensor.record_stream(compute)

    def reset_peak_memory(self) -> None:
        """Let the allocator forget its peak."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak_memory_bytes(self) -> Optional[int]:
        """Return the most bytes that tensors held at one time since the reset."""
        return int(torch.cuda.max_memory_allocated(self.device))

    def energy_j(self) -> Optional[float]:
        """Return the board's energy counter, see :mod:`pytest_mlhpc.worker.energy`."""
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


def ordinal_for(local_rank: int, visible: int) -> int:
    """Return which of *visible* devices rank *local_rank* of a node uses.

    A launcher either shows all devices of a node to each rank, or to each rank just its own one.

    Raises:
        WorkerFailure: ``too_few_devices``, two ranks would share a device.
    """
    if local_rank < visible:
        return local_rank
    if visible == 1:
        return 0
    text = f"rank {local_rank} of this node finds {visible} devices; each rank needs one of its own"
    raise WorkerFailure("too_few_devices", text)


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
