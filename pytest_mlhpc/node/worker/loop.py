"""The training loop: steps without a synchronisation, their stamps, and what a window of steps cost."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass, field
from typing import (
    Any,
    Callable,
    ContextManager,
    Iterator,
    List,
    NamedTuple,
    NoReturn,
    Optional,
    Protocol,
    Sequence,
    Tuple,
)

import torch
from torch import Tensor, nn

from pytest_mlhpc.node.protocol.plan import SLOW_READING, SLOW_STEPS, PlantedFault
from pytest_mlhpc.node.worker.base import Accelerator, Copied, Mark, Task
from pytest_mlhpc.node.worker.environment import WorkerFailure

#: Six readings of the host's clock in nanoseconds.
Stamps = Tuple[int, int, int, int, int, int]


@dataclass(frozen=True)
class Clock:
    """Where times come from: ``perf`` for durations, ``wall`` for dates, both integer nanoseconds."""

    perf: Callable[[], int] = time.perf_counter_ns
    wall: Callable[[], int] = time.time_ns


@dataclass(frozen=True)
class DeviceMarks:
    """Marks of one micro-step on the compute stream, and around its copy on the copy stream (None: no copy)."""

    asked: Mark  #: the host has the batch and has issued its copy
    ready: Mark  #: the batch is on the device
    forward: Mark
    backward: Mark
    updated: Mark
    copy_start: Optional[Mark] = None
    copy_end: Optional[Mark] = None


@dataclass
class Recorder:
    """What the loop leaves behind; nothing in it is looked at before the window is over."""

    clock: Clock = field(default_factory=Clock)
    stamps: List[Stamps] = field(default_factory=list)
    marks: List[DeviceMarks] = field(default_factory=list)
    losses: List[Any] = field(default_factory=list)  #: 0-d tensors on the device
    last_batch: Any = None  #: retained for the communication pass, which must not read data
    read_s: float = 0.0
    samples: int = 0
    start_ns: int = 0
    start_mark: Optional[Mark] = None
    planted_ns: int = 0  #: how long a planted fault delayed the last micro-step

    def start(self, accelerator: Accelerator) -> None:
        """Open the window. The device must be idle."""
        self.start_mark = accelerator.mark()
        self.start_ns = self.clock.perf()


@dataclass(frozen=True)
class WindowTimes:
    """Seconds summed over a window; ``step_times_s`` has one entry for each step (all its micro-steps together).

    ``wait_s`` is the time for which training stood still because no batch was there. Without a queue that is the host's
    wait in the loader. With one the host runs ahead, and only the device's idle time between two steps counts.
    ``copy_s`` is all the time that copies took, ``exposed_copy_s`` the part for which computation waited.
    ``first_wait_s`` is the part of ``wait_s`` that belongs to the first batch.
    """

    wait_s: float
    first_wait_s: float
    copy_s: float
    exposed_copy_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    step_times_s: Tuple[float, ...]


def resolve(recorder: Recorder, accelerator: Accelerator, accumulate: int = 1) -> WindowTimes:
    """Turn stamps and marks into times. The device must have passed the last mark.

    A step lasts from the end of the one before to its own end, so that nothing hides between two steps.

    Raises:
        WorkerFailure: ``clock_backwards``.
    """
    _check_order(recorder)
    if accelerator.asynchronous:
        return _from_marks(recorder, accelerator, accumulate)
    return _from_stamps(recorder, accumulate)


def check_wall(started_ns: int, ended_ns: int, elapsed_s: float) -> None:
    """Compare the date's clock with the clock for durations over one window.

    A clock that is being corrected slowly may lag by 500 ppm (adjtimex(2)); half a second or 0.1 % is more than that.

    Raises:
        WorkerFailure: ``clock_backwards``.
    """
    wall_s = (ended_ns - started_ns) / 1e9
    if ended_ns <= started_ns or wall_s < elapsed_s - max(0.5, elapsed_s * 1e-3):
        text = (
            f"the system clock advanced {wall_s:.3f} s while {elapsed_s:.3f} s passed: it was set back during the run; "
            "check the node's time service and run again"
        )
        raise WorkerFailure("clock_backwards", text)


def _check_order(recorder: Recorder) -> None:
    previous = recorder.start_ns
    for number, stamps in enumerate(recorder.stamps):
        for stamp in stamps:
            if stamp < previous:
                text = f"the clock for durations went back by {previous - stamp} ns in step {number} of the window"
                raise WorkerFailure("clock_backwards", text)
            previous = stamp


def _from_stamps(recorder: Recorder, accumulate: int) -> WindowTimes:
    rows = recorder.stamps
    ends = [recorder.start_ns] + [row[5] for row in rows[accumulate - 1 :: accumulate]]
    copy_s = _total(rows, 1, 2)
    return WindowTimes(
        wait_s=_total(rows, 0, 1),
        first_wait_s=_total(rows[:1], 0, 1),
        copy_s=copy_s,
        exposed_copy_s=copy_s,
        forward_s=_total(rows, 2, 3),
        backward_s=_total(rows, 3, 4),
        optimizer_s=_total(rows, 4, 5),
        step_times_s=tuple((end - start) / 1e9 for start, end in zip(ends, ends[1:])),
    )


def _total(rows: Sequence[Stamps], start: int, end: int) -> float:
    return sum(row[end] - row[start] for row in rows) / 1e9


def _from_marks(recorder: Recorder, accelerator: Accelerator, accumulate: int) -> WindowTimes:
    seconds = accelerator.seconds
    rows = recorder.marks
    before = [recorder.start_mark] + [row.updated for row in rows[:-1]]
    waits = [seconds(previous, row.asked) for previous, row in zip(before, rows)]
    ends = [recorder.start_mark] + [row.updated for row in rows[accumulate - 1 :: accumulate]]
    return WindowTimes(
        wait_s=sum(waits),
        first_wait_s=sum(waits[:1]),
        copy_s=sum(seconds(row.copy_start, row.copy_end) for row in rows if row.copy_start is not None),
        exposed_copy_s=sum(seconds(row.asked, row.ready) for row in rows),
        forward_s=sum(seconds(row.ready, row.forward) for row in rows),
        backward_s=sum(seconds(row.forward, row.backward) for row in rows),
        optimizer_s=sum(seconds(row.backward, row.updated) for row in rows),
        step_times_s=tuple(seconds(start, end) for start, end in zip(ends, ends[1:])),
    )


#: A batch as the loader gives it: inputs, targets, seconds that reading it took.
Batch = Tuple[Tensor, Tensor, float]

#: Steps that the host may be ahead of the device: one is copied while one is computed. More would only hold memory.
AHEAD = 2

#: Shortest time between two progress lines, in nanoseconds.
PROGRESS_NS = 1_000_000_000


class WholeStep(Protocol):
    """A training step that runs as one graph (``accelerators/gpu.py``)."""

    def step(self, trainer: Trainer, tensors: Tuple[Tensor, ...]) -> Tensor:
        """Run one step on a batch and return its loss."""


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
    captured: Optional[WholeStep] = None  #: steps run as one graph, whose parts have no times of their own
    fault: Optional[PlantedFault] = None  #: slows this rank down, in a drill

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
    if trainer.fault is not None:
        _delay(trainer, trainer.fault, recorder, SLOW_READING)
    loaded = clock()
    copied = accelerator.copy((inputs, targets))
    issued = clock()
    asked = accelerator.mark() if queued else None
    accelerator.await_copy(copied)
    ready = accelerator.mark() if queued else None
    if trainer.fault is not None:
        _delay(trainer, trainer.fault, recorder, SLOW_STEPS)
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


def _delay(trainer: Trainer, fault: PlantedFault, recorder: Recorder, kind: str) -> None:
    """Wait for the share of the last micro-step's time that a planted fault of this *kind* says; the first one is not slowed.

    The delay of that micro-step is no part of its time. A device with a queue is idle first, or the delay would be hidden.
    """
    if fault.kind != kind or not recorder.stamps:
        return
    if recorder.marks:
        trainer.accelerator.wait(recorder.marks[-1].updated)
    clock = recorder.clock.perf
    begin = recorder.stamps[-2][5] if len(recorder.stamps) > 1 else recorder.start_ns
    recorder.planted_ns = round(fault.size * (recorder.stamps[-1][5] - begin - recorder.planted_ns))
    end = clock() + recorder.planted_ns
    while clock() < end:  # busy, as a slower processor is
        pass


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
