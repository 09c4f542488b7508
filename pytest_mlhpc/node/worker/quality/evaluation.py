"""PAYLOAD. The quality of the model on samples that it never trained on, each counted once, over all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Iterable, Iterator, List, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Sampler

from pytest_mlhpc.node.worker.distributed import Group
from pytest_mlhpc.node.worker.failure import WorkerFailure
from pytest_mlhpc.node.worker.loop import AHEAD, Batch, Trainer, autocast
from pytest_mlhpc.node.worker.quality.metrics import Metric


class InOrder(Sampler[int]):
    """The same indices every time. They are padded to *length* with the first one, so that ranks do equally many batches."""

    def __init__(self, indices: Sequence[int], length: int) -> None:
        self.own = len(indices)
        self.indices = (*indices, *([indices[0]] * (length - len(indices))))

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[int]:
        """Yield them."""
        return iter(self.indices)


@dataclass(frozen=True)
class Evaluated:
    """The mean quality of all ranks' samples, and how many those were."""

    quality: float
    samples: int


def evaluate(trainer: Trainer, batches: Iterable[Batch], own: int, metric: Metric, group: Group) -> Evaluated:
    """Evaluate the first *own* samples of *batches*, and combine what all ranks found.

    Raises:
        WorkerFailure: ``loss_nan``, the model's answers are no numbers.
    """
    model = trainer.model
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module  # the wrapper would send buffers before each batch
    _have_one_model(model, group)
    model.eval()
    try:
        sums = _sums(trainer, model, batches, own, metric)
    finally:
        model.train()
    total = torch.stack(
        [torch.stack(sums).double().sum(), torch.tensor(float(own)).double().to(sums[0].device)]
    )
    if group.world > 1:
        dist.all_reduce(total)
    found, samples = total.tolist()
    quality = found / samples
    if not math.isfinite(quality):
        raise WorkerFailure(
            "loss_nan", f"the evaluation gives {quality}: look at precision, learning rate and data"
        )
    return Evaluated(quality, int(samples))


@torch.no_grad()
def _have_one_model(model: nn.Module, group: Group) -> None:
    """Give every rank the first one's buffers, as training does before each step.

    After its last step each rank has its own share of the batch in the statistics of its normalisations; the quality
    would be that of as many models.
    """
    if group.world > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)


@torch.no_grad()
def _sums(
    trainer: Trainer, model: nn.Module, batches: Iterable[Batch], own: int, metric: Metric
) -> List[Tensor]:
    accelerator = trainer.accelerator
    sums: List[Tensor] = []
    marks: List[Any] = []
    left = own
    for inputs, targets, _ in batches:
        if accelerator.asynchronous and len(marks) >= AHEAD:
            accelerator.wait(marks[-AHEAD])
        copied = accelerator.copy((inputs, targets))
        accelerator.await_copy(copied)
        with autocast(accelerator.device.type, trainer.precision):
            ready, wanted = trainer.task.prepare(copied.tensors[0], copied.tensors[1])
            found = metric(model(ready), wanted)
        counted = min(left, len(inputs))
        sums.append(found[:counted].float().sum())
        left -= counted
        if accelerator.asynchronous:
            marks.append(accelerator.mark())
    return sums
