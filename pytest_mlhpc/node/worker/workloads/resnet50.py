"""ResNet-50 v1.5: image classification.

Specification: MLPerf Training until v4.0 (mlcommons/training, ``retired_benchmarks/resnet-tf2``); He et al., arXiv
1512.03385, with the stride in the 3x3 convolution of a bottleneck, which is what "v1.5" means.
"""

from __future__ import annotations

import functools
from typing import Any, List, Mapping, Tuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from pytest_mlhpc.node.worker.base import Task, TensorSpec, channels_first, laid_out
from pytest_mlhpc.node.worker.workloads.optimizers import optimizer_of
from pytest_mlhpc.node.worker.workloads.trainings import require, training_conflicts

STAGES = (3, 4, 6, 3)  #: bottlenecks of each stage
EXPANSION = 4  #: output channels of a bottleneck over its inner ones
WEIGHT_DECAY = 1e-4  #: MLPerf rules: 1e-4 times a power of two
#: Mean and standard deviation of ImageNet's red, green, blue on the scale 0 to 255 (the values all recipes use).
MEAN, SPREAD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)


def _conv(inner: int, outer: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inner, outer, kernel, stride, padding=kernel // 2, bias=False)


class Bottleneck(nn.Module):
    """1x1, 3x3 (with the stride), 1x1 convolutions beside a shortcut."""

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        outer = inner * EXPANSION
        self.body = nn.Sequential(
            _conv(channels, inner, 1),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            _conv(inner, inner, 3, stride),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            _conv(inner, outer, 1),
            nn.BatchNorm2d(outer),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != outer:
            self.shortcut = nn.Sequential(_conv(channels, outer, 1, stride), nn.BatchNorm2d(outer))

    def forward(self, images: Tensor) -> Tensor:
        """Add the body to the shortcut."""
        return functional.relu(self.body(images) + self.shortcut(images), inplace=True)


class ResNet50(nn.Module):
    """Takes (N, 3, height, width), returns logits (N, classes).

    ``stem="epcc"``: a 3x3 stem without stride, as EPCC's published benchmark runs it (EPCCed/reframe-mlperf-epcc,
    ``ML/ResNet50/Torch/model/ResNet.py``): every later map has four times the pixels.
    """

    def __init__(self, *, stem: str, classes: int) -> None:
        super().__init__()
        first = _conv(3, 64, 7, 2) if stem == "v1.5" else _conv(3, 64, 3, 1)
        self.stem = nn.Sequential(
            first, nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2, padding=1)
        )
        blocks: List[nn.Module] = []
        channels = 64
        for stage, repeats in enumerate(STAGES):
            inner = 64 * 2**stage
            for block in range(repeats):
                blocks.append(Bottleneck(channels, inner, stride=2 if stage > 0 and block == 0 else 1))
                channels = inner * EXPANSION
        self.stages = nn.Sequential(*blocks)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Score each class."""
        scores: Tensor = self.head(self.stages(self.stem(images)))
        return scores


def task(parameters: Mapping[str, Any]) -> Task:
    """Return ResNet-50 with these fields.

    Stored samples: uint8 (size, size, 3), decoded, cropped and resized by the reader; int64 class ().

    Raises:
        ValueError: the smoothing is no probability.
    """
    require(training_conflicts, parameters)
    size, classes = int(parameters["image_size"]), int(parameters["classes"])
    channels_last, smoothing = bool(parameters["channels_last"]), float(parameters["label_smoothing"])

    @functools.cache  # once per device: a copy in every step would wait for the device
    def constants(device: torch.device) -> Tuple[Tensor, Tensor]:
        mean, spread = torch.tensor(MEAN, device=device), torch.tensor(SPREAD, device=device)
        return mean.view(3, 1, 1), spread.view(3, 1, 1).reciprocal()

    def model() -> nn.Module:
        network = ResNet50(stem=str(parameters["stem"]), classes=classes)
        return laid_out(network, channels_last=channels_last, dimensions=4)

    def prepare(images: Tensor, labels: Tensor) -> Tuple[Tensor, Tensor]:
        pixels = channels_first(images, channels_last=channels_last).float()
        mean, factor = constants(pixels.device)
        return (pixels - mean) * factor, labels.long()

    def loss(scores: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(scores, labels, label_smoothing=smoothing)

    return Task(
        name="resnet50",
        model=model,
        prepare=prepare,
        loss=loss,
        optimizer=optimizer_of(parameters, weight_decay=WEIGHT_DECAY),
        input=TensorSpec((size, size, 3), torch.uint8),
        target=TensorSpec((), torch.int64),
        low=0.0,
        high=256.0,
        classes=classes,
    )
