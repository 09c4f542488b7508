"""PAYLOAD. A whole training step captured once and replayed: one launch for the host instead of thousands.

The rules are those of PyTorch's notes "CUDA semantics" (whole-network capture, usage with DistributedDataParallel, usage
with torch.cuda.amp): a few steps on a side stream first, with static tensors for what comes in; gradients are none when
capturing begins, so that they come from the graph's own memory; with fp16 the update stays outside, as it asks the device
whether gradients are finite. Weights, optimizer state and the state of random numbers are what they would be without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Mapping, MutableMapping, Optional, Tuple

import torch
from torch import Tensor

from pytest_mlhpc.node.worker.accelerators.base import Accelerator
from pytest_mlhpc.node.worker.failure import WorkerFailure
from pytest_mlhpc.node.worker.workloads.fields.arithmetic import EAGER_STEPS, EAGER_STEPS_DDP

if TYPE_CHECKING:
    from pytest_mlhpc.node.worker.loop import Trainer

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
