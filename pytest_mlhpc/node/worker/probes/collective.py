"""PAYLOAD. Communication between ranks by message size.

Words and formulas are those of nccl-tests (NVIDIA/nccl-tests, doc/PERFORMANCE.md): *algorithm bandwidth* is size over time;
*bus bandwidth* is that times a factor that makes it comparable with what a link can do, whatever the number of ranks.
A size is that of each rank's message, and for all_gather and reduce_scatter that of the whole array. A ping-pong's time is
half of the way there and back.
"""

from __future__ import annotations

from typing import Dict, List, Mapping, Tuple

import torch
import torch.distributed as dist

from pytest_mlhpc.node.protocol.schema import Rate, Timed
from pytest_mlhpc.node.worker.failure import WorkerFailure
from pytest_mlhpc.node.worker.probes import exchange
from pytest_mlhpc.node.worker.probes.base import Place
from pytest_mlhpc.node.worker.probes.exchange import Exchange, PingPong
from pytest_mlhpc.node.worker.workloads.probing import size_name

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

    def __init__(self, place: Place) -> None:
        if place.group.world < 2:
            raise WorkerFailure("too_few_ranks", "communication needs at least two ranks, this run has one")
        self._place = place
        parameters = place.run.parameters
        self._operation = str(parameters["operation"])
        self._inner = int(parameters["inner"])
        self._way = exchange.way_of(self._operation, place.group, place.accelerator)
        sizes = [int(size) for size in parameters["sizes"]]
        self._exchanges: Dict[str, List[Tuple[str, Exchange]]] = {
            size_name(size): self._of_size(size) for size in sizes
        }
        smallest, largest = size_name(min(sizes)), size_name(max(sizes))
        self.operations = tuple(self._operations(smallest, largest))

    def _of_size(self, size: int) -> List[Tuple[str, Exchange]]:
        """Return what is exchanged for one size: once by all ranks, or by rank 0 with each peer."""
        group, accelerator = self._place.group, self._place.accelerator
        label = size_name(size)
        if self._operation != "point_to_point":
            made = exchange.COLLECTIVES[self._operation](size, group, accelerator, self._way)
            return [(label, made)]
        if self._place.run.parameters["peers"] == "last":
            return [(label, PingPong(size, group, accelerator, group.world - 1))]
        peers = range(1, group.world)
        return [(f"{label}_rank{peer}", PingPong(size, group, accelerator, peer)) for peer in peers]

    def _operations(self, smallest: str, largest: str) -> List[Timed]:
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
    ) -> Timed:
        bus = size * bus_factor(self._operation, self._place.group.world)
        rates = []
        for kind, amount in (("algorithm_bandwidth", float(size)), ("bus_bandwidth", bus)):
            names = [f"{kind}_{name}", *([kind] if largest else [])]
            rates += [Rate(one, "B/s", amount, together=True, tolerance=TOLERANCE) for one in names]
        times = (f"time_{name}", *(["latency"] if smallest else []))
        return Timed(name, (), tuple(rates), times, ranks, LATENCY_TOLERANCE)

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

    def _compare(self, name: str, one: Exchange) -> None:
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
        told = {one.name for one in self.operations}
        return {name: value for name, value in seconds.items() if name in told}

    def cache(self) -> str:
        """Return unknown: nothing is read."""
        return "unknown"

    def environment(self) -> Mapping[str, str]:
        """Return how torch does it."""
        return {"backend": str(dist.get_backend()), self._operation: self._way}

    def close(self) -> None:
        """Leave the buffers to the end of the process."""
        self._exchanges.clear()


def probe(place: Place) -> Collective:
    """Return this rank's part."""
    return Collective(place)
