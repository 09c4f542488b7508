"""What the training loop needs to know of a workload and of a device, where channels lie, and how a device is opened."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Callable, Mapping, Optional, Protocol, Tuple

import torch
from torch import Tensor, nn

from pytest_mlhpc.node.worker.environment import WorkerFailure


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one sample (no batch dimension), as stored in files and moved to the device."""

    shape: Tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Task:
    """One workload with its parameters filled in.

    ``prepare`` runs on the device and turns stored samples (with batch dimension) into what model and loss take, so
    that samples travel in the small type they are stored in. ``model`` builds with the seed that the caller has set.
    ``low`` and ``high`` bound synthetic inputs, ``classes`` bounds integer targets.
    """

    name: str
    model: Callable[[], nn.Module]
    prepare: Callable[[Tensor, Tensor], Tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    input: TensorSpec
    target: TensorSpec
    low: float = 0.0
    high: float = 1.0
    classes: int = 0
    tokens_per_sample: int = 0  #: language model only


def _format(dimensions: int, channels_last: bool) -> torch.memory_format:
    if not channels_last:
        return torch.contiguous_format
    return torch.channels_last_3d if dimensions == 5 else torch.channels_last


def channels_first(batch: Tensor, *, channels_last: bool) -> Tensor:
    """Turn (N, *space, C) into (N, C, *space), laid out in memory as asked. Copies only where the layout differs."""
    moved = batch.movedim(-1, 1)
    return moved.contiguous(memory_format=_format(moved.ndim, channels_last))


def laid_out(model: nn.Module, *, channels_last: bool, dimensions: int) -> nn.Module:
    """Return *model* with the weights of its convolutions laid out as its inputs of so many dimensions will be."""
    # mypy: torch's overloads of `to` do not know memory_format alone in every release
    return model.to(memory_format=_format(dimensions, True)) if channels_last else model  # type: ignore[call-overload]


#: A point in time on a device: an event that is resolved after the window, or nanoseconds of the host's clock.
Mark = Any


class Copied:
    """Batch tensors on the device, with the marks around their copy; ``start`` is None where nothing was copied."""

    __slots__ = ("end", "start", "tensors")

    def __init__(
        self, tensors: Tuple[Tensor, ...], start: Optional[Mark] = None, end: Optional[Mark] = None
    ) -> None:
        self.tensors = tensors
        self.start = start
        self.end = end


class Accelerator(Protocol):
    """One device of one rank.

    ``asynchronous`` says whether work is queued: then the loop takes its times from marks on the device, resolved after
    the window, else from the host's clock. ``index`` is the device's number on its node, whatever this process sees.
    """

    type: str
    index: int
    device: torch.device
    model: str
    backend: str  #: torch.distributed's
    asynchronous: bool

    def synchronize(self) -> None:
        """Wait until all queued work is done."""

    def mark(self) -> Mark:
        """Put a mark behind the work queued so far, without waiting."""

    def wait(self, mark: Mark) -> None:
        """Block until the device has passed *mark*."""

    def seconds(self, start: Mark, end: Mark) -> float:
        """Return the seconds between two marks that the device has passed."""

    def copy(self, tensors: Tuple[Tensor, ...]) -> Copied:
        """Start copying host tensors to the device beside the computation."""

    def await_copy(self, copied: Copied) -> None:
        """Make computation queued from now on wait for *copied*; the host does not wait."""

    def reset_peak_memory(self) -> None:
        """Forget the peak so far."""

    def peak_memory_bytes(self) -> Optional[int]:
        """Return the peak since the reset in bytes, or None where the device cannot tell."""

    def energy_j(self) -> Optional[float]:
        """Return an energy counter in joules, or None where the device cannot tell. Only differences mean something."""

    def environment(self) -> Mapping[str, str]:
        """Return versions and settings of driver and libraries that belong in a record."""


#: Type of device -> module of ``node/worker/accelerators``, and the function there that returns a rank's device.
DEVICES: Mapping[str, Tuple[str, str]] = {
    "cpu": ("cpu", "open_device"),
    "cuda": ("gpu", "open_cuda"),
    "rocm": ("gpu", "open_rocm"),
    "xpu": ("gpu", "open_xpu"),
    "ipu": ("ipu", "open_device"),
    "wse": ("wse", "open_device"),
}


def open_device(device_type: str, local_rank: int) -> Accelerator:
    """Return this rank's device. A run never falls back to another type.

    Raises:
        WorkerFailure: ``wrong_device``, the type is unknown here or the machine has no such device.
    """
    if device_type not in DEVICES:
        raise WorkerFailure("wrong_device", f"this version cannot drive devices of type {device_type!r}")
    module, function = DEVICES[device_type]
    found: Any = importlib.import_module(f"pytest_mlhpc.node.worker.accelerators.{module}")
    accelerator: Accelerator = getattr(found, function)(local_rank)
    return accelerator
