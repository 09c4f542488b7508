"""PAYLOAD, torch alone. Synthetic sets in memory: no file, no NumPy, made in a moment, and still to be learnt from."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pytest_mlhpc.node.worker.data.datasets import MemoryDataset
from pytest_mlhpc.node.worker.workloads.base import Task, TensorSpec

#: Distinct samples, as long as they fit into this many bytes; at least MINIMUM of them.
BUDGET = 256 << 20
MOST, MINIMUM = 64, 4


def _bytes(spec: TensorSpec) -> int:
    """Return the bytes of one sample."""
    return math.prod(spec.shape) * torch.empty((), dtype=spec.dtype).element_size()


def _noise(task: Task, count: int, generator: torch.Generator) -> Tensor:
    """Return float32 (count, *input shape) between the task's bounds' first and third quarter."""
    noise = torch.rand((count, *task.input.shape), generator=generator)
    return noise.mul_(0.5 * (task.high - task.low)).add_(task.low + 0.25 * (task.high - task.low))


def _labels(task: Task, count: int, generator: torch.Generator) -> Tensor:
    """Return class numbers (count, *target shape). Maps get a horizontal band per class, class 0 around them."""
    if not task.target.shape:
        return torch.randint(task.classes, (count,), generator=generator)
    labels = torch.zeros((count, *task.target.shape), dtype=torch.int64)
    height = task.target.shape[0]
    for sample in range(count):
        for label in range(1, task.classes):
            start = int(torch.randint(max(height, 1), (1,), generator=generator))
            labels[sample, start : start + max(height // 16, 1)] = label
    return labels


def _mark(inputs: Tensor, labels: Tensor, classes: int, span: float) -> None:
    """Shift inputs by what their class says, in place: a level per class, over the whole sample or pixel by pixel."""
    level = (labels.float() / max(classes - 1, 1) - 0.5) * (0.5 * span)
    while level.dim() < inputs.dim():
        level = level.unsqueeze(-1)
    inputs += level


def dataset(task: Task, *, count: int, seed: int) -> MemoryDataset:
    """Return *count* samples for *task*, of which up to 64 are distinct; equal seeds give equal samples.

    With ``task.classes`` targets are classes and shift their inputs' level; without, targets are numbers in 0..1, and
    the first of them scales its input. Their mean is not zero, so that the first steps already have something to learn.
    """
    size = max(1, _bytes(task.input) + _bytes(task.target))
    distinct = min(count, max(MINIMUM, min(MOST, BUDGET // size)))
    generator = torch.Generator().manual_seed(seed)
    inputs = _noise(task, distinct, generator)
    if task.classes:
        targets = _labels(task, distinct, generator)
        _mark(inputs, targets, task.classes, task.high - task.low)
    else:
        targets = torch.rand((distinct, *task.target.shape), generator=generator)
        factor = targets.reshape(distinct, -1)[:, 0] + 0.5
        inputs *= factor.reshape(distinct, *[1] * (inputs.dim() - 1))
    # int types are cut to whole numbers below `high`, which is exclusive there
    top = task.high if task.input.dtype.is_floating_point else math.ceil(task.high) - 1
    inputs.clamp_(task.low, top)
    return MemoryDataset(inputs.to(task.input.dtype), targets.to(task.target.dtype), count)
