"""PAYLOAD. What GPUs of all makers share: a compute stream, a stream of copies beside it, and events on both.

``torch.cuda`` (NVIDIA, and AMD through HIP) and ``torch.xpu`` (Intel) have the same names for it.
"""

from __future__ import annotations

import inspect
from typing import Any, Callable, Optional, Tuple, TypeVar

import torch
from torch import Tensor

from pytest_mlhpc.node.worker.accelerators.base import Copied, Mark
from pytest_mlhpc.node.worker.failure import WorkerFailure

T = TypeVar("T")


class Queued:
    """One GPU of one rank. Nothing here waits for the device but ``synchronize`` and ``wait``.

    Args:
        api: ``torch.cuda`` or ``torch.xpu``.
        device: where tensors of this rank lie; it becomes the current device.
    """

    asynchronous = True

    def __init__(self, api: Any, device: torch.device) -> None:
        self.device = device
        self._api = api
        api.set_device(device)
        self._copies = api.Stream(device)

    def synchronize(self) -> None:
        """Wait until all queued work of all streams is done."""
        self._api.synchronize(self.device)

    def mark(self) -> Mark:
        """Record a timing event on the compute stream."""
        event = self._api.Event(enable_timing=True)
        event.record(self._api.current_stream(self.device))
        return event

    def wait(self, mark: Mark) -> None:
        """Block until the device has passed *mark*."""
        mark.synchronize()

    def seconds(self, start: Mark, end: Mark) -> float:
        """Return the seconds between two events; both must have been passed. Events count milliseconds."""
        return float(start.elapsed_time(end)) / 1e3

    def copy(self, tensors: Tuple[Tensor, ...]) -> Copied:
        """Copy pinned host tensors on the copy stream. Tensors already on the device are returned as they are."""
        if all(tensor.device == self.device for tensor in tensors):
            return Copied(tensors)
        start, end = self._api.Event(enable_timing=True), self._api.Event(enable_timing=True)
        with self._api.stream(self._copies):
            start.record(self._copies)
            moved = tuple(tensor.to(self.device, non_blocking=True) for tensor in tensors)
            end.record(self._copies)
        return Copied(moved, start, end)

    def await_copy(self, copied: Copied) -> None:
        """Let the compute stream wait for the copy, and keep the memory until the compute stream is done with it."""
        if copied.end is None:
            return
        compute = self._api.current_stream(self.device)
        compute.wait_event(copied.end)
        for tensor in copied.tensors:
            tensor.record_stream(compute)

    def reset_peak_memory(self) -> None:
        """Let the allocator forget its peak."""
        self._api.reset_peak_memory_stats(self.device)

    def peak_memory_bytes(self) -> Optional[int]:
        """Return the most bytes that tensors held at one time since the reset."""
        return int(self._api.max_memory_allocated(self.device))

    def aside(self, work: Callable[[], T]) -> T:
        """Do *work* on a side stream, between all that is queued before and after it."""
        compute = self._api.current_stream(self.device)
        side = self._api.Stream(self.device)
        side.wait_stream(compute)
        with self._api.stream(side):
            done = work()
        compute.wait_stream(side)
        if isinstance(done, Tensor):
            done.record_stream(compute)
        return done


class Capturing(Queued):
    """A GPU that can repeat what was queued once: CUDA graphs, which HIP has under the same names."""

    def capture(self, work: Callable[[], T]) -> Tuple[T, Callable[[], None]]:
        """Capture what *work* queues as a graph, without running it; return what *work* returned, and what runs it.

        Everything that *work* reads and writes must stay where it is in memory. Other threads may go on with theirs, such as
        the loader's, which asks for pinned memory: that would break a capture in the mode "global" (torch.cuda.graph, its
        ``capture_error_mode``, which torch has since 2.1).
        """
        graph = self._api.CUDAGraph()
        has_mode = "capture_error_mode" in inspect.signature(self._api.graph).parameters
        options = {"capture_error_mode": "thread_local"} if has_mode else {}
        with self._api.graph(graph, **options):
            done = work()
        return done, graph.replay


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
