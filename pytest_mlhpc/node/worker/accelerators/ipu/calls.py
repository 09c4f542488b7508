"""PAYLOAD. Calls of a compiled model: what goes in, how long each took, what poptorch tells of it."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any, Callable, Iterator, List, Sequence, Tuple

import torch
from torch import Tensor

from pytest_mlhpc.node.protocol.schema import Figure
from pytest_mlhpc.node.worker.accelerators.ipu.options import Settings
from pytest_mlhpc.node.worker.failure import WorkerFailure
from pytest_mlhpc.node.worker.loop import PROGRESS_NS, Batch, resolve_losses

#: Types that the IPU's exchange lacks, and the one in which they travel (poptorch narrows 64 bits to 32 itself).
_TRAVELS = {torch.int16: torch.int32, torch.int64: torch.int32}

#: Methods of a compiled model, and the figures that they become.
_LATENCIES = (
    ("getLatency", "ipu_latency"),
    ("getHostIpuLatency", "host_ipu_latency"),
    ("getComputeLatency", "ipu_compute_latency"),
    ("getIpuHostLatency", "ipu_host_latency"),
)


@dataclass(frozen=True)
class Compiled:
    """A compiled model with its steps of one call, and the seconds that compiling took."""

    model: Any  #: poptorch.PoplarExecutor
    iterations: int
    seconds: float


@dataclass(frozen=True)
class Call:
    """One call: nanoseconds of the host's clock before the batch was asked for, when it was there, and when the call was over.

    ``latencies`` are seconds, means over the call's iterations, in the order of ``_LATENCIES``.
    """

    stamps: Tuple[int, int, int]
    latencies: Tuple[float, ...]
    losses: Tuple[Tensor, ...]  #: of each step
    samples: int
    read_s: float

    @property
    def seconds(self) -> float:
        """Return how long the call itself took."""
        return (self.stamps[2] - self.stamps[1]) / 1e9

    @property
    def wait_s(self) -> float:
        """Return how long the host waited for the batch."""
        return (self.stamps[1] - self.stamps[0]) / 1e9

    @property
    def copy_s(self) -> float:
        """Return the call's share that transfers have in a round trip; nothing where poptorch tells no latency."""
        whole, up, _, down = self.latencies
        return self.seconds * min(1.0, (up + down) / whole) if whole > 0 else 0.0


def stored(batch: Batch) -> Tuple[Tensor, Tensor]:
    """Return inputs and targets of a batch in types that can travel to an IPU."""
    inputs, targets = (tensor.to(_TRAVELS.get(tensor.dtype, tensor.dtype)) for tensor in batch[:2])
    return inputs, targets


def next_batch(batches: Iterator[Batch], done: int) -> Batch:
    """Return the next batch, of which *done* steps were made before.

    Raises:
        WorkerFailure: ``data_exhausted``.
    """
    batch = next(batches, None)
    if batch is None:
        text = (
            f"the loader ended after {done} steps of this rank; use more data, fewer steps or a smaller batch"
        )
        raise WorkerFailure("data_exhausted", text)
    return batch


def train(
    compiled: Compiled, batches: Iterator[Batch], steps: int, tell: Callable[[int, int], None]
) -> List[Call]:
    """Train *steps* steps. ``tell(steps done, samples done)`` is called at most once a second."""
    now, calls, told = time.perf_counter_ns, [], time.perf_counter_ns()
    samples = 0
    for done in range(0, steps, compiled.iterations):
        before = now()
        batch = next_batch(batches, done)
        there = now()
        output: Tensor = compiled.model(*stored(batch))
        over = now()
        latencies = tuple(float(getattr(compiled.model, name)()[2]) for name, _ in _LATENCIES)
        # All losses of a call: iterations are the outermost, micro-batches and replicas of each step within.
        losses = tuple(output.reshape(compiled.iterations, -1).float().mean(dim=1).unbind())
        calls.append(Call((before, there, over), latencies, losses, len(batch[0]), batch[2]))
        samples += len(batch[0])
        if over - told >= PROGRESS_NS:
            told = over
            tell(done + compiled.iterations, samples)
    return calls


def step_times(start_ns: int, calls: Sequence[Call], iterations: int) -> Tuple[float, ...]:
    """Return the seconds of each step: its share of the time from the end of the call before to the end of its own."""
    ends = [start_ns, *(call.stamps[2] for call in calls)]
    return tuple(
        (end - begin) / 1e9 / iterations for begin, end in zip(ends, ends[1:]) for _ in range(iterations)
    )


def losses_of(calls: Sequence[Call], first_step: int = 0) -> Tuple[float, ...]:
    """Return the loss of each step.

    Raises:
        WorkerFailure: ``loss_nan``.
    """
    return resolve_losses([loss for call in calls for loss in call.losses], first_step)


def figures(compiled: Compiled, calls: Sequence[Call], settings: Settings) -> Tuple[Figure, ...]:
    """Return what compiling took, how many IPUs this rank had, and the median of each latency in the window."""
    ipus = settings.replicas * settings.ipus_per_replica
    found = [
        Figure("compile_time", compiled.seconds, "s", "lower"),
        Figure("ipus", float(ipus), "1", "none", over="sum"),
    ]
    for place, (_, name) in enumerate(_LATENCIES):
        told = [call.latencies[place] for call in calls]
        found.append(Figure(name, statistics.median(told), "s", "lower", samples=tuple(told)))
    return tuple(found)
