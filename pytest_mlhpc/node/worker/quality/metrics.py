"""PAYLOAD. How good an answer is, sample by sample, as the benchmarks define it."""

from __future__ import annotations

from typing import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

#: ``metric(outputs, targets) -> (N,)``: the quality of each sample; that of a set is the mean.
Metric = Callable[[Tensor, Tensor], Tensor]


def absolute_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """CosmoFlow: mean absolute error of the four parameters (mlcommons/hpc, ``cosmoflow/train.py``)."""
    return (outputs.float() - targets).abs().flatten(1).mean(dim=1)


def intersection_over_union(outputs: Tensor, labels: Tensor) -> Tensor:
    """DeepCAM: mean over classes (mlcommons/hpc, ``deepcam/src/deepCam/utils/metric.py``)."""
    from pytest_mlhpc.node.worker.workloads.deepcam import mean_iou

    pairs = zip(torch.split(outputs, 1), torch.split(labels, 1))
    return torch.stack([mean_iou(scores, truth) for scores, truth in pairs])


def top_1(outputs: Tensor, labels: Tensor) -> Tensor:
    """ResNet-50: 1 where the highest score is the right class's."""
    return (outputs.argmax(dim=1) == labels).float()


def log_perplexity(outputs: Tensor, tokens: Tensor) -> Tensor:
    """Language model: mean negative logarithm of the right token's probability."""
    losses = functional.cross_entropy(outputs.flatten(0, 1).float(), tokens.flatten(), reduction="none")
    return losses.view(len(tokens), -1).mean(dim=1)


#: Workload -> what measures it.
METRICS: Mapping[str, Metric] = {
    "cosmoflow": absolute_error,
    "deepcam": intersection_over_union,
    "resnet50": top_1,
    "language_model": log_perplexity,
}
