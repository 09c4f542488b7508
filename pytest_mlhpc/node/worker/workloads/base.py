"""PAYLOAD. What the training loop needs to know of a workload."""

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
