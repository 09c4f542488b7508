"""PAYLOAD. Where channels lie: files store them last, convolutions count them second."""

from __future__ import annotations

import torch
from torch import Tensor, nn


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
