"""What GPUs of all makers share: streams, events, and a training step captured once and replayed."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Callable, Mapping, MutableMapping, Optional, Tuple, TypeVar

import torch
from torch import Tensor

from pytest_mlhpc.node.worker.accelerators.base import Accelerator, Copied, Mark
from pytest_mlhpc.node.worker.environment import WorkerFailure
from pytest_mlhpc.node.worker.workloads.fields.arithmetic import EAGER_STEPS, EAGER_STEPS_DDP

if TYPE_CHECKING:
    from pytest_mlhpc.node.worker.loop import Trainer


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


#: What watches for errors of collectives asks events for their state, which must not happen while a graph is captured.
#: The first name is that of torch 2.2 and newer.
WATCHDOGS = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")


class CapturedStep:
    """Steps of one trainer: the first *eager* ones are ordinary ones, the next is captured, the others are replayed.

    All batches must have one shape. ``accelerator`` has, beside the protocol's, ``aside(work)``, which runs work on a
    side stream, and ``capture(work)``, which returns what work returned and what runs it again.
    """

    def __init__(self, accelerator: Accelerator, eager: int) -> None:
        self._device: Any = accelerator
        self._eager = eager
        self._replay: Optional[Callable[[], None]] = None
        self._inputs: Tuple[Tensor, ...] = ()
        self._loss: Optional[Tensor] = None

    @property
    def captured(self) -> bool:
        """Whether steps are replayed by now."""
        return self._replay is not None

    def step(self, trainer: Trainer, tensors: Tuple[Tensor, ...]) -> Tensor:
        """Train one step on a batch that is on the device; return its loss.

        Raises:
            WorkerFailure: ``worker_exit``, the batch has another shape than the first.
        """
        if self._eager > 0:
            self._eager -= 1
            loss: Tensor = self._device.aside(lambda: _whole_step(trainer, tensors))
            return loss
        if self._replay is None or self._loss is None:
            self._inputs = tuple(tensor.clone() for tensor in tensors)
            trainer.forget()
            self._loss, self._replay = self._device.capture(lambda: _captured_part(trainer, self._inputs))
        else:
            self._take(tensors)
        assert self._replay is not None  # noqa: S101 - set just above
        self._replay()
        if trainer.scaler is not None:
            trainer.update()
        return self._loss.detach().clone()  # the next replay writes to the same place

    def _take(self, tensors: Tuple[Tensor, ...]) -> None:
        for own, new in zip(self._inputs, tensors):
            if own.shape != new.shape:
                text = f"cuda_graphs: a batch of {tuple(new.shape)} came after one of {tuple(own.shape)}"
                raise WorkerFailure("worker_exit", text)
            own.copy_(new, non_blocking=True)


def _captured_part(trainer: Trainer, tensors: Tuple[Tensor, ...]) -> Tensor:
    """Do the part of a step that a graph can hold; its loss."""
    loss = trainer.loss(tensors[0], tensors[1])
    trainer.backward(loss)
    if trainer.scaler is None:
        trainer.update()
    return loss


def _whole_step(trainer: Trainer, tensors: Tuple[Tensor, ...]) -> Tensor:
    trainer.forget()
    loss = trainer.loss(tensors[0], tensors[1])
    trainer.backward(loss)
    trainer.update()
    return loss.detach()


def captured_step(
    parameters: Mapping[str, Any], accelerator: Accelerator, world: int
) -> Optional[CapturedStep]:
    """Return what captures steps, if the run asks for it.

    Raises:
        WorkerFailure: ``wrong_device``, this device has no graphs.
    """
    if not parameters.get("cuda_graphs"):
        return None
    if not hasattr(accelerator, "capture"):
        raise WorkerFailure(
            "wrong_device", f"cuda_graphs: {accelerator.type} has no graphs; set cuda_graphs=False"
        )
    return CapturedStep(accelerator, EAGER_STEPS if world == 1 else EAGER_STEPS_DDP)


def calm_watchdog(parameters: Mapping[str, Any], world: int, environ: MutableMapping[str, str]) -> None:
    """Prepare the process group of a run whose steps are captured; to be called before the ranks meet.

    What hangs then is ended by the run's time limit alone. A value that the environment has stays.
    """
    if parameters.get("cuda_graphs") and world > 1:
        for name in WATCHDOGS:
            environ.setdefault(name, "0")


def on_side_stream(
    accelerator: Accelerator, work: Callable[[], torch.nn.Module], *, wanted: bool
) -> torch.nn.Module:
    """Return what *work* makes; on a side stream where its steps will be captured, as DDP must be built on one."""
    device: Any = accelerator
    built: torch.nn.Module = device.aside(work) if wanted else work()
    return built
