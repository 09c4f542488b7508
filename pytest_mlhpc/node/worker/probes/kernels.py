"""PAYLOAD. A training step by classes of kernels: time (torch.profiler), operations, bytes moved.

What is timed is the bare step, on a batch that lies on the device; a counter of memory traffic is read around it where
there is one. The profiler and the model of bytes run behind the window, so that they slow nothing that is reported.
"""

from __future__ import annotations

import math
import statistics
from typing import List, Mapping, Tuple

import torch

from pytest_mlhpc.node.protocol.schema import Figure, Rate, Timed
from pytest_mlhpc.node.worker import flops
from pytest_mlhpc.node.worker.failure import WorkerFailure
from pytest_mlhpc.node.worker.probes import counters, inside, profiled, traffic
from pytest_mlhpc.node.worker.probes.base import Place
from pytest_mlhpc.node.worker.workloads.characterising import CLASSES

#: How far equal runs differ where cores are shared.
TOLERANCE = 0.10


class Kernels:
    """One training on this rank alone; ranks exchange nothing, but step at the same time."""

    kernel_works = False

    def __init__(self, place: Place) -> None:
        self._place = place
        self._inside = inside.build(place)
        self._flop = float(flops.count(self._inside.task).train * self._inside.batch)
        self._counter, self._why = counters.find()
        self._seconds: List[float] = []
        self._counted: List[float] = []
        rates = (Rate("achieved_flops", "FLOP/s", self._flop, tolerance=TOLERANCE),)
        self.operations: Tuple[Timed, ...] = (Timed("step", (), rates, ("step_time",), (), TOLERANCE),)

    def verify(self) -> None:
        """Look at the loss.

        Raises:
            WorkerFailure: ``loss_nan``.
        """
        with torch.no_grad():
            loss = float(self._inside.trainer.loss(self._inside.inputs, self._inside.targets))
        if not math.isfinite(loss):
            raise WorkerFailure(
                "loss_nan", f"the loss is {loss}; look at precision, learning rate and fields"
            )

    def repeat(self) -> Mapping[str, float]:
        """Do one training step. A counter sees all ranks of the node: it is read once they are done with the step before."""
        self._place.barrier()
        before = self._counter.read() if self._counter is not None else None
        took = self._place.timed(1, self._inside.step)
        after = self._counter.read() if self._counter is not None else None
        self._seconds.append(took)
        if before is not None and after is not None and after > before:
            self._counted.append((after - before) / took)
        return {"step": took}

    def figures(self) -> Tuple[Figure, ...]:
        """Profile a few more steps, and count one."""
        one = self._inside
        times, wall = profiled.times(self._place.accelerator, one.gradients, one.trainer.update)
        found = traffic.count(one.task, one.inputs, one.targets, one.trainer.precision)
        moved = {name: size for name, (_, size) in found.items()}
        # Warm-up's repetitions are not those that count.
        usual = statistics.median(self._seconds[-self._place.run.steps :])
        figures = [
            Figure("step_flop", self._flop, "FLOP", "none", "first"),
            Figure("step_bytes_modelled", float(sum(moved.values())), "B", "none", "first"),
            Figure("memory_bandwidth_modelled", sum(moved.values()) / usual, "B/s", "none", "sum"),
            Figure("profiled_step_time", wall, "s", "none", "max"),
        ]
        if self._counted and self._place.group.local_rank == 0:  # a socket's counter is every rank's
            counted = statistics.median(self._counted[-self._place.run.steps :])
            figures.append(Figure("memory_bandwidth_counted", counted, "B/s", "none", "sum"))
        return (*figures, *_by_class(times, moved))

    def cache(self) -> str:
        """Return unknown: nothing is read."""
        return "unknown"

    def environment(self) -> Mapping[str, str]:
        """Return the samples of a step, and what counted memory traffic."""
        counter = self._counter.name if self._counter is not None else f"none: {self._why}"
        return {"samples_of_a_step": str(self._inside.batch), "memory_counter": counter[:300]}

    def close(self) -> None:
        """Leave the memory to the end of the process."""
        if self._counter is not None:
            self._counter.close()


def _by_class(times: Mapping[str, float], moved: Mapping[str, int]) -> List[Figure]:
    """Return the share of each class in a step's time, and for those that are there their time and bytes."""
    total = sum(times.values())
    found = []
    for name in CLASSES:
        seconds, size = times.get(name, 0.0), float(moved.get(name, 0))
        share = seconds / total if total > 0 else 0.0
        found.append(Figure(f"kernel_share_{name}", share, "1", "none", "mean"))
        if seconds > 0:
            found.append(Figure(f"kernel_time_{name}", seconds, "s", "none", "mean"))
        if size > 0:
            found.append(Figure(f"bytes_modelled_{name}", size, "B", "none", "first"))
    return found


def probe(place: Place) -> Kernels:
    """Return this rank's part."""
    return Kernels(place)
