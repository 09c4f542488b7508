"""What the training loop needs of a device, and how one is opened.

A device of type ``xyz`` is the module ``pytest_mlhpc.node.worker.accelerators.xyz`` with a function
``open_device(local_rank: int) -> Accelerator``. It raises :class:`WorkerFailure` ``wrong_device`` when the machine has
no such device: a run never falls back to another one.
"""

from __future__ import annotations

import importlib
import re
from typing import Any, Mapping, Optional, Protocol, Tuple

import torch
from torch import Tensor

from pytest_mlhpc.node.worker.environment import WorkerFailure

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


def open_device(device_type: str, local_rank: int) -> Accelerator:
    """Return this rank's device.

    Raises:
        WorkerFailure: ``wrong_device``, the type is unknown here or the machine has no such device.
    """
    name = f"{__package__}.{device_type}"
    if not re.match(r"[a-z][a-z0-9_]*\Z", device_type) or device_type == "base":
        raise WorkerFailure("wrong_device", f"{device_type!r} is no type of device")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        text = f"this version cannot drive devices of type {device_type!r}"
        raise WorkerFailure("wrong_device", text) from error
    accelerator: Accelerator = module.open_device(local_rank)
    if accelerator.type != device_type:
        text = f"asked for {device_type}, but {name} opened {accelerator.type} ({accelerator.model})"
        raise WorkerFailure("wrong_device", text)
    return accelerator
