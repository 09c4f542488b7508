"""All-reduce of a training's gradients behind its own backward passes, waiting for late ranks excluded.

Each repetition computes gradients (each rank its own), packs them, waits for all ranks, and only then exchanges them: so the
time of the exchange is that of the network and of summing alone, and what the earliest rank waited is a figure of its
own. Messages are as torch's DistributedDataParallel makes them: float32, of at most ``bucket`` bytes, all under way
at once.
"""

from __future__ import annotations

import time
from typing import List, Mapping, Tuple

import torch
import torch.distributed as dist
from torch import Tensor

from pytest_mlhpc.node.protocol.schema import Figure, Rate, TimedOperation
from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.node.worker.probes import measure
from pytest_mlhpc.node.worker.probes.collective import TOLERANCE, bus_factor
from pytest_mlhpc.node.worker.probes.measure import ProbePlace

_ELEMENT = 4

#: Whole numbers that are summed exactly in float32, and repeat with a period that no bucket shares.
_PERIOD = 7


class Gradients:
    """One training on this rank, and one buffer for all of its gradients."""

    kernel_works = True  # sockets

    def __init__(self, place: ProbePlace) -> None:
        if place.group.world < 2:
            raise WorkerFailure(
                "too_few_ranks", "gradients are exchanged by two ranks or more, this run has one"
            )
        self._place = place
        self._inside = measure.build(place)
        self._parameters = [one for one in self._inside.trainer.model.parameters() if one.requires_grad]
        elements = sum(one.numel() for one in self._parameters)
        self._flat = torch.zeros(elements, device=place.accelerator.device)
        of_bucket = max(1, int(place.run.parameters["bucket"]) // _ELEMENT)
        self._buckets: List[Tensor] = list(torch.split(self._flat, of_bucket))
        self._bytes = elements * _ELEMENT
        bus = self._bytes * bus_factor("all_reduce", place.group.world)
        rates = (
            Rate("allreduce_bandwidth", "B/s", float(self._bytes), together=True, tolerance=TOLERANCE),
            Rate("allreduce_bus_bandwidth", "B/s", bus, together=True, tolerance=TOLERANCE),
        )
        self.operations: Tuple[TimedOperation, ...] = (
            TimedOperation("allreduce", (), rates, ("allreduce_time",)),
            TimedOperation("wait", (), (), ("allreduce_wait_time",)),
            TimedOperation("compute", (), (), ("gradient_time",)),
        )

    def verify(self) -> None:
        """Exchange known numbers once and compare each.

        Raises:
            WorkerFailure: ``wrong_result``, names rank and the first wrong element.
        """
        group = self._place.group
        ramp = torch.arange(len(self._flat), device=self._flat.device).remainder_(_PERIOD).float()
        self._flat.copy_(ramp).add_(group.rank + 1)
        self._exchange()
        self._place.accelerator.synchronize()
        wanted = ramp.mul_(group.world).add_(group.world * (group.world + 1) // 2)
        if not torch.equal(self._flat, wanted):
            place = int(torch.nonzero(self._flat != wanted)[0])
            text = (
                f"all_reduce of {self._bytes} bytes of gradients between {group.world} ranks: element {place} is "
                f"{float(self._flat[place])} instead of {float(wanted[place])} on rank {group.rank}"
            )
            raise WorkerFailure("wrong_result", text)

    def repeat(self) -> Mapping[str, float]:
        """Compute gradients, wait for all ranks, exchange."""
        accelerator = self._place.accelerator
        start = time.perf_counter()
        self._inside.gradients()
        self._pack()
        accelerator.synchronize()
        ready = time.perf_counter()
        self._place.barrier()
        met = time.perf_counter()
        took = self._place.timed(1, self._exchange)
        return {"allreduce": took, "wait": met - ready, "compute": ready - start}

    def _pack(self) -> None:
        """Lay gradients one behind the other; one that the loss does not reach stays zero."""
        first = 0
        for one in self._parameters:
            part = self._flat[first : first + one.numel()]
            if one.grad is None:
                part.zero_()
            else:
                part.copy_(one.grad.reshape(-1))
            first += one.numel()

    def _exchange(self) -> None:
        under_way = [dist.all_reduce(bucket, async_op=True) for bucket in self._buckets]
        for one in under_way:
            one.wait()

    def figures(self) -> Tuple[Figure, ...]:
        """Return how much is exchanged, and in how many messages."""
        return (
            Figure("gradient_bytes", float(self._bytes), "B", "none", "first"),
            Figure("gradient_messages", float(len(self._buckets)), "1", "none", "first"),
        )

    def cache(self) -> str:
        """Return unknown: nothing is read."""
        return "unknown"

    def environment(self) -> Mapping[str, str]:
        """Return how torch does it."""
        return {"backend": str(dist.get_backend()), "samples_of_a_step": str(self._inside.batch)}

    def close(self) -> None:
        """Leave the buffers to the end of the process."""


#: A rank's part, by its ProbePlace.
probe = Gradients
