"""PAYLOAD. One exchange of messages between ranks: its buffers, how it is done by this torch, what must come out of it.

Element *i* of rank *r*'s message is ``r + 1 + i % 7``: small whole numbers, so that sums are exact in float32 for up to
about 5,000 ranks, and no two ranks send the same.
"""

from __future__ import annotations

from typing import Callable, Dict, List, Protocol, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

from pytest_mlhpc.node.worker.accelerators.base import Accelerator
from pytest_mlhpc.node.worker.distributed import Group
from pytest_mlhpc.node.worker.failure import WorkerFailure
from pytest_mlhpc.node.worker.workloads.probing import ELEMENT

_PERIOD = 7

#: What torch.distributed raises for an operation that a backend or release does not have.
_LACKING = (RuntimeError, NotImplementedError, AttributeError, ValueError)


class Exchange(Protocol):
    """``bytes`` is the size after rounding to whole elements on all ranks."""

    bytes: int

    def fill(self) -> None:
        """Write this rank's message into its buffer."""

    def run(self) -> None:
        """Exchange once."""

    def result(self) -> Tuple[Tensor, Tensor]:
        """Return what came out of one exchange after ``fill``, and what should have."""


def ramp(elements: int, start: int, device: torch.device) -> Tensor:
    """Return ``(start + i) % 7`` for *elements* values of *i*, as float32."""
    period = (torch.arange(_PERIOD, device=device) + start).remainder(_PERIOD).float()
    return period.repeat(-(-elements // _PERIOD))[:elements]


def _sum_of_ranks(world: int) -> int:
    return world * (world + 1) // 2


class AllReduce:
    """Each rank ends with the sum of all messages, in place."""

    def __init__(self, size: int, group: Group, accelerator: Accelerator, _way: str) -> None:
        self._group, self._device = group, accelerator.device
        self._data = torch.empty(max(1, size // ELEMENT), device=self._device)
        self.bytes = len(self._data) * ELEMENT

    def fill(self) -> None:
        """Write this rank's message."""
        self._data.copy_(ramp(len(self._data), 0, self._device)).add_(self._group.rank + 1)

    def run(self) -> None:
        """Sum."""
        dist.all_reduce(self._data)

    def result(self) -> Tuple[Tensor, Tensor]:
        """Return the sums: of the ranks' numbers, and as often the ramp as there are ranks."""
        world = self._group.world
        return self._data, ramp(len(self._data), 0, self._device).mul_(world).add_(_sum_of_ranks(world))


class _Shared:
    """An array that all ranks have a part of, and the part. Its size is rounded up to one element for each rank."""

    def __init__(self, size: int, group: Group, accelerator: Accelerator, way: str) -> None:
        self._group, self._device, self._way = group, accelerator.device, way
        self._each = max(1, size // (ELEMENT * group.world))
        self._part = torch.empty(self._each, device=self._device)
        self._whole = torch.empty(self._each * group.world, device=self._device)
        self._parts: List[Tensor] = list(self._whole.chunk(group.world))
        self.bytes = len(self._whole) * ELEMENT


class AllGather(_Shared):
    """Each rank ends with the messages of all ranks behind each other."""

    def fill(self) -> None:
        """Write this rank's message, and something else into what is to be received."""
        self._part.copy_(ramp(self._each, 0, self._device)).add_(self._group.rank + 1)
        self._whole.fill_(-1.0)

    def run(self) -> None:
        """Gather."""
        if self._way == "all_gather_into_tensor":
            dist.all_gather_into_tensor(self._whole, self._part)
        else:
            dist.all_gather(self._parts, self._part)

    def result(self) -> Tuple[Tensor, Tensor]:
        """Return all messages."""
        numbers = torch.arange(1, self._group.world + 1, device=self._device).repeat_interleave(self._each)
        return self._whole, ramp(self._each, 0, self._device).repeat(self._group.world) + numbers


class ReduceScatter(_Shared):
    """Each rank ends with its part of the sum of all messages."""

    def fill(self) -> None:
        """Write this rank's message, and something else into what is to be received."""
        self._whole.copy_(ramp(len(self._whole), 0, self._device)).add_(self._group.rank + 1)
        self._part.fill_(-1.0)

    def run(self) -> None:
        """Sum and scatter."""
        if self._way == "reduce_scatter_tensor":
            dist.reduce_scatter_tensor(self._part, self._whole)
        else:
            dist.reduce_scatter(self._part, self._parts)

    def result(self) -> Tuple[Tensor, Tensor]:
        """Return this rank's part of the sums."""
        world, start = self._group.world, self._group.rank * self._each
        wanted = ramp(self._each, start, self._device).mul_(world).add_(_sum_of_ranks(world))
        return self._part, wanted


class PingPong:
    """Rank 0 sends its message to *peer*, which sends it back; the other ranks do nothing."""

    def __init__(self, size: int, group: Group, accelerator: Accelerator, peer: int) -> None:
        self._group, self._device, self._peer = group, accelerator.device, peer
        self.takes_part = group.rank in (0, peer)
        elements = max(1, size // ELEMENT)
        self._data = torch.empty(elements if self.takes_part else 0, device=self._device)
        self.bytes = elements * ELEMENT

    def fill(self) -> None:
        """Write the message at rank 0, something else at the peer."""
        if self._group.rank == 0:
            self._data.copy_(ramp(len(self._data), 0, self._device)).add_(1.0)
        else:
            self._data.fill_(-1.0)

    def run(self) -> None:
        """Send there and back."""
        if self._group.rank == 0:
            dist.send(self._data, self._peer)
            dist.recv(self._data, self._peer)
        elif self.takes_part:
            dist.recv(self._data, 0)
            dist.send(self._data, 0)

    def result(self) -> Tuple[Tensor, Tensor]:
        """Return the message of rank 0, as it came, and came back."""
        return self._data, ramp(len(self._data), 0, self._device).add_(1.0)


COLLECTIVES: Dict[str, Callable[[int, Group, Accelerator, str], Exchange]] = {
    "all_reduce": AllReduce,
    "all_gather": AllGather,
    "reduce_scatter": ReduceScatter,
}

#: Functions of torch.distributed for an operation, the best first: the others copy more.
_WAYS = {
    "all_reduce": ("all_reduce",),
    "all_gather": ("all_gather_into_tensor", "all_gather"),
    "reduce_scatter": ("reduce_scatter_tensor", "reduce_scatter"),
    "point_to_point": ("send",),
}


def way_of(operation: str, group: Group, accelerator: Accelerator) -> str:
    """Return the function that torch has for *operation* with this backend, after trying it on a few bytes.

    A backend refuses before it sends anything, so that all ranks find the same.

    Raises:
        WorkerFailure: ``not_supported``, there is none, as for ``reduce_scatter`` with gloo in torch 1.13.
    """
    ways = _WAYS[operation]
    if operation == "point_to_point":
        return ways[0]
    problem: BaseException = RuntimeError()
    for way in ways:
        exchange = COLLECTIVES[operation](ELEMENT, group, accelerator, way)
        exchange.fill()
        try:
            exchange.run()
            accelerator.synchronize()
        except _LACKING as error:
            problem = error
        else:
            return way
    text = (
        f"{operation} is not in torch {torch.__version__} with {accelerator.backend}: {problem}; use a newer torch, "
        "or another operation"
    )
    raise WorkerFailure("not_supported", text) from problem
