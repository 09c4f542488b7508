"""Communication between ranks by message size: the exchange, its buffers, and its figures."""

from __future__ import annotations

from typing import Callable, Dict, List, Mapping, Protocol, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

from pytest_mlhpc.node.protocol.schema import Rate, TimedOperation
from pytest_mlhpc.node.worker.base import Accelerator
from pytest_mlhpc.node.worker.distributed import Group
from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.node.worker.probes.measure import ProbePlace
from pytest_mlhpc.node.worker.workloads.probing import ELEMENT, size_name

_PERIOD = 7

#: What torch.distributed raises for an operation that a backend or release does not have.
_LACKING = (RuntimeError, NotImplementedError, AttributeError, ValueError)


class MessageExchange(Protocol):
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


COLLECTIVES: Dict[str, Callable[[int, Group, Accelerator, str], MessageExchange]] = {
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


#: How far equal runs differ on machines whose cores and wires are shared: bandwidths, and times of a few bytes, which
#: are mostly the scheduler's (docs/storage-and-communication.md).
TOLERANCE, LATENCY_TOLERANCE = 0.20, 0.30


def bus_factor(operation: str, world: int) -> float:
    """Return bus bandwidth over algorithm bandwidth (nccl-tests, doc/PERFORMANCE.md, "Summary")."""
    if operation == "point_to_point":
        return 1.0
    return (2.0 if operation == "all_reduce" else 1.0) * (world - 1) / world


class Collective:
    """All sizes of one operation, in the order in which they were asked for."""

    kernel_works = True  # sockets

    def __init__(self, place: ProbePlace) -> None:
        if place.group.world < 2:
            raise WorkerFailure("too_few_ranks", "communication needs at least two ranks, this run has one")
        self._place = place
        parameters = place.run.parameters
        self._operation = str(parameters["operation"])
        self._inner = int(parameters["inner"])
        self._way = way_of(self._operation, place.group, place.accelerator)
        sizes = [int(size) for size in parameters["sizes"]]
        self._exchanges: Dict[str, List[Tuple[str, MessageExchange]]] = {
            size_name(size): self._of_size(size) for size in sizes
        }
        smallest, largest = size_name(min(sizes)), size_name(max(sizes))
        self.operations = tuple(self._operations(smallest, largest))

    def _of_size(self, size: int) -> List[Tuple[str, MessageExchange]]:
        """Return what is exchanged for one size: once by all ranks, or by rank 0 with each peer."""
        group, accelerator = self._place.group, self._place.accelerator
        label = size_name(size)
        if self._operation != "point_to_point":
            made = COLLECTIVES[self._operation](size, group, accelerator, self._way)
            return [(label, made)]
        if self._place.run.parameters["peers"] == "last":
            return [(label, PingPong(size, group, accelerator, group.world - 1))]
        peers = range(1, group.world)
        return [(f"{label}_rank{peer}", PingPong(size, group, accelerator, peer)) for peer in peers]

    def _operations(self, smallest: str, largest: str) -> List[TimedOperation]:
        """Return what this rank times. For each peer of several there is an operation, and one for the slowest of them."""
        pairs = self._operation == "point_to_point"
        if pairs and self._place.group.rank:
            return []
        ranks = (0,) if pairs else ()
        found = []
        for label, made in self._exchanges.items():
            size = made[0][1].bytes
            summary = (label == smallest, label == largest)
            found.append(self._timed(label, size, ranks, *summary))
            found += [self._timed(name, size, ranks) for name, _ in made if name != label]
        return found

    def _timed(
        self, name: str, size: int, ranks: Tuple[int, ...], smallest: bool = False, largest: bool = False
    ) -> TimedOperation:
        bus = size * bus_factor(self._operation, self._place.group.world)
        rates = []
        for kind, amount in (("algorithm_bandwidth", float(size)), ("bus_bandwidth", bus)):
            names = [f"{kind}_{name}", *([kind] if largest else [])]
            rates += [Rate(one, "B/s", amount, together=True, tolerance=TOLERANCE) for one in names]
        times = (f"time_{name}", *(["latency"] if smallest else []))
        return TimedOperation(name, (), tuple(rates), times, ranks, LATENCY_TOLERANCE)

    def verify(self) -> None:
        """Exchange each size once and compare each element.

        Raises:
            WorkerFailure: ``wrong_result``, names operation, size, rank and the first wrong element.
        """
        for made in self._exchanges.values():
            for name, one in made:
                one.fill()
                self._place.barrier()
                one.run()
                self._place.accelerator.synchronize()
                self._compare(name, one)

    def _compare(self, name: str, one: MessageExchange) -> None:
        found, wanted = one.result()
        if torch.equal(found, wanted):
            return
        (wrong,) = torch.nonzero(found != wanted, as_tuple=True)
        place = int(wrong[0])
        text = (
            f"{self._operation} of {name} between {self._place.group.world} ranks: {len(wrong)} of {len(found)} elements "
            f"are wrong on rank {self._place.group.rank}, the first is number {place}: {float(found[place])} instead of "
            f"{float(wanted[place])}"
        )
        raise WorkerFailure("wrong_result", text)

    def repeat(self) -> Mapping[str, float]:
        """Time each size."""
        seconds: Dict[str, float] = {}
        for label, made in self._exchanges.items():
            slowest = 0.0
            for name, one in made:
                one.fill()
                took = self._place.timed(self._inner, one.run)
                if self._operation == "point_to_point":
                    took /= 2.0
                seconds[name] = took
                slowest = max(slowest, took)
            seconds[label] = slowest
        names = {one.name for one in self.operations}
        return {name: value for name, value in seconds.items() if name in names}

    def cache(self) -> str:
        """Return unknown: nothing is read."""
        return "unknown"

    def environment(self) -> Mapping[str, str]:
        """Return how torch does it."""
        return {"backend": str(dist.get_backend()), self._operation: self._way}

    def close(self) -> None:
        """Leave the buffers to the end of the process."""
        self._exchanges.clear()


#: A rank's part, by its ProbePlace.
probe = Collective
