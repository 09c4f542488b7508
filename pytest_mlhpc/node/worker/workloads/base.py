"""What the training loop needs to know of a workload, and where channels lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Tuple

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one sample (no batch dimension), as stored in files and moved to the device."""

    shape: Tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Task:
    """One workload with its parameters filled in.

    ``prepare`` runs on the device and turns stored samples (with batch dimension) into what model and loss take, so
    that samples travel in the small type they are stored in. ``model`` builds with the seed that the caller has set.
    ``low`` and ``high`` bound synthetic inputs, ``classes`` bounds integer targets.
    """

    name: str
    model: Callable[[], nn.Module]
    prepare: Callable[[Tensor, Tensor], Tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    input: TensorSpec
    target: TensorSpec
    low: float = 0.0
    high: float = 1.0
    classes: int = 0
    tokens_per_sample: int = 0  #: language model only


def _format(dimensions: int, channels_last: bool) -> torch.memory_format:
    if not channels_last:
        return torch.contiguous_format
    return torch.channels_last_3d if dimensions == 5 else torch.channels_last


def channels_first(batch: Tensor, *, channels_last: bool) -> Tensor:
    """Turn (N, *space, C) into (N, C, *space), laid out in memory as asked. Copies only where the layout differs."""
    moved = batch.movedim(-1, 1)
    return moved.contiguous(memory_format=_format(moved.ndim, channels_last))


def laid_out(model: nn.Module, *, channels_last: bool, dimensions: int) -> nn.Module:
    """Return *model* with the weights of its convolutions laid out as its inputs of so many dimensions will be."""
    # mypy: torch's overloads of `to` do not know memory_format alone in every release
    return model.to(memory_format=_format(dimensions, True)) if channels_last else model  # type: ignore[call-overload]
