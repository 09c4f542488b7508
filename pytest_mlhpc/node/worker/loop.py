"""PAYLOAD. The training loop: steps without a single synchronisation, leaving stamps and marks behind."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import (
    Any,
    Callable,
    ContextManager,
    Iterator,
    List,
    NamedTuple,
    NoReturn,
    Optional,
    Sequence,
    Tuple,
)

import torch
from torch import Tensor, nn

from pytest_mlhpc.node.worker.accelerators.base import Accelerator, Copied, Mark
from pytest_mlhpc.node.worker.accelerators.graphs import CapturedStep
from pytest_mlhpc.node.worker.failure import WorkerFailure
from pytest_mlhpc.node.worker.timing import DeviceMarks, Recorder
from pytest_mlhpc.node.worker.workloads.base import Task

#: A batch as the loader gives it: inputs, targets, seconds that reading it took.
Batch = Tuple[Tensor, Tensor, float]

#: Steps that the host may be ahead of the device: one is copied while one is computed. More would only hold memory.
AHEAD = 2

#: Shortest time between two progress lines, in nanoseconds.
PROGRESS_NS = 1_000_000_000


@dataclass(frozen=True)
class Trainer:
    """All that a step needs. ``model`` may be wrapped for several ranks; ``accumulate`` micro-batches make one step."""

    task: Task
    model: nn.Module
    optimizer: torch.optim.Optimizer
    accelerator: Accelerator
    precision: str = "fp32"
    accumulate: int = 1
    scaler: Optional[Any] = None  #: torch's GradScaler, whose module and signature changed between releases
    captured: Optional[CapturedStep] = None  #: steps run as one graph, whose parts have no times of their own

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of a batch that is on the device; with accumulation, this micro-batch's share of it."""
        with autocast(self.accelerator.device.type, self.precision):
            ready, wanted = self.task.prepare(inputs, targets)
            loss = self.task.loss(self.model(ready), wanted)
        return loss if self.accumulate == 1 else loss / self.accumulate

    def backward(self, loss: Tensor) -> None:
        """Compute gradients."""
        scaled = loss if self.scaler is None else self.scaler.scale(loss)
        scaled.backward()

    def update(self) -> None:
        """Change the weights."""
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def forget(self) -> None:
        """Forget the gradients of the last step.

        On a device before forward, so that they and the activations never lie there together. On a CPU between forward
        and backward, which at once takes the memory again: given back earlier, it went to the system, and page faults
        cost ResNet-50 4 % (glibc's malloc).
        """
        self.optimizer.zero_grad(set_to_none=True)

    def unsynchronised(self, micro: int) -> ContextManager[Any]:
        """Return the context in which micro-batch *micro* runs: only the last one of a step exchanges gradients."""
        no_sync = getattr(self.model, "no_sync", None)
        if micro + 1 == self.accumulate or no_sync is None:
            return contextlib.nullcontext()
        context: ContextManager[Any] = no_sync()
        return context


def autocast(device_type: str, precision: str) -> ContextManager[Any]:
    """Return the context for bf16 and fp16; fp32 and tf32 need none."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(device_type, dtype=dtype)


def grad_scaler(device_type: str, precision: str, scale: Optional[float] = None) -> Optional[Any]:
    """Return a gradient scaler for fp16, else None (bf16 has the range of fp32); on CPUs only if *scale* says so.

    Raises:
        WorkerFailure: ``not_supported``, this torch scales gradients on CUDA devices alone.
    """
    if precision != "fp16" or (device_type == "cpu" and scale is None):
        return None
    options = {} if scale is None else {"init_scale": float(scale)}
    modern = getattr(torch.amp, "GradScaler", None)  # since torch 2.3
    if modern is not None:
        return modern(device_type, **options)
    if device_type != "cuda":
        text = f"precision=fp16: torch {torch.__version__} scales gradients on CUDA devices alone, torch 2.3 on others"
        raise WorkerFailure("not_supported", text)
    older: Any = torch.cuda.amp.GradScaler
    return older(**options)


def run_steps(
    trainer: Trainer,
    batches: Iterator[Batch],
    steps: int,
    recorder: Recorder,
    progress: Callable[[int, int], None],
) -> None:
    """Train *steps* steps and record them. ``progress(steps done, samples done)`` is called at most once a second.

    Raises:
        WorkerFailure: ``data_exhausted``, the loader ended early.
    """
    clock = recorder.clock.perf
    reported = recorder.start_ns
    for step in range(steps):
        loss_of_step: Optional[Tensor] = None
        for micro in range(trainer.accumulate):
            loss = _micro_step(trainer, batches, micro, recorder, clock)
            loss_of_step = loss if loss_of_step is None else loss_of_step + loss
        recorder.losses.append(loss_of_step)
        now = recorder.stamps[-1][5]
        if now - reported >= PROGRESS_NS:
            reported = now
            progress(step + 1, recorder.samples)


def _micro_step(
    trainer: Trainer, batches: Iterator[Batch], micro: int, recorder: Recorder, clock: Callable[[], int]
) -> Tensor:
    accelerator = trainer.accelerator
    queued = accelerator.asynchronous
    if queued and len(recorder.marks) >= AHEAD:
        accelerator.wait(recorder.marks[-AHEAD].updated)
    before = clock()
    batch = next(batches, None)
    if batch is None:
        _exhausted(recorder, trainer.accumulate)
    recorder.last_batch = batch
    inputs, targets, read_s = batch
    loaded = clock()
    copied = accelerator.copy((inputs, targets))
    issued = clock()
    asked = accelerator.mark() if queued else None
    accelerator.await_copy(copied)
    ready = accelerator.mark() if queued else None
    done = _computed(trainer, copied, micro, clock)
    recorder.stamps.append((before, loaded, issued, done.forward_end, done.backward_end, clock()))
    if queued:
        marks = DeviceMarks(
            asked, ready, done.forward, done.backward, accelerator.mark(), copied.start, copied.end
        )
        recorder.marks.append(marks)
    recorder.read_s += read_s
    recorder.samples += len(inputs)
    return done.loss


class _Computed(NamedTuple):
    """What a micro-step left: its loss without graph, and when its parts ended by the host's and by the device's clock."""

    loss: Tensor
    forward_end: int
    backward_end: int
    forward: Optional[Mark]
    backward: Optional[Mark]


def _computed(trainer: Trainer, copied: Copied, micro: int, clock: Callable[[], int]) -> _Computed:
    accelerator = trainer.accelerator
    queued = accelerator.asynchronous
    if trainer.captured is not None:
        loss = trainer.captured.step(trainer, copied.tensors)
        end, mark = clock(), accelerator.mark() if queued else None
        return _Computed(loss, end, end, mark, mark)
    if micro == 0 and queued:
        trainer.forget()
    with trainer.unsynchronised(micro):
        loss = trainer.loss(copied.tensors[0], copied.tensors[1])
        forward_end = clock()
        forward = accelerator.mark() if queued else None
        if micro == 0 and not queued:
            trainer.forget()
        trainer.backward(loss)
    backward_end = clock()
    backward = accelerator.mark() if queued else None
    if micro + 1 == trainer.accumulate:
        trainer.update()
    return _Computed(loss.detach(), forward_end, backward_end, forward, backward)


def _exhausted(recorder: Recorder, accumulate: int) -> NoReturn:
    done = len(recorder.stamps) // accumulate
    text = f"the loader ended after {done} steps and {recorder.samples} samples of this rank"
    raise WorkerFailure("data_exhausted", text)


def resolve_losses(losses: Sequence[Any], first_step: int = 0) -> Tuple[float, ...]:
    """Bring losses to the host, in one transfer.

    Raises:
        WorkerFailure: ``loss_nan``, names the first step whose loss is not finite.
    """
    if not losses:
        return ()
    values: List[float] = torch.stack(list(losses)).float().cpu().tolist()
    for step, value in enumerate(values):
        if not math.isfinite(value):
            text = (
                f"the loss of step {first_step + step} is {value}; look at precision, learning rate and data"
            )
            raise WorkerFailure("loss_nan", text)
    return tuple(values)
