"""DeepCAM: segmentation of extreme weather, DeepLab v3+ on an Xception-65-like encoder.

Specification: MLPerf HPC (mlcommons/hpc, ``deepcam/src/deepCam/architecture/deeplab_xception.py``, ``utils/losses.py``,
``utils/metric.py``). One thing is done differently: the reference tiles its pooled features to a fixed (48, 72) and so
takes 768x1152 alone; here they are expanded to the map at hand, which is the same at that size.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, List, Mapping, Tuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from pytest_mlhpc.node.worker.base import Task, TensorSpec, channels_first, laid_out
from pytest_mlhpc.node.worker.workloads.optimizers import optimizer_of
from pytest_mlhpc.node.worker.workloads.trainings import deepcam_conflicts, require

CHANNELS = 16  #: climate variables of a sample
CLASSES = 3  #: background, tropical cyclone, atmospheric river
DILATIONS = (6, 12, 18)  #: of the spatial pyramid
FREQUENCIES = (
    0.986267818390377,
    0.0004578708870701058,
    0.01327431072255291,
)  #: of the classes in the data set
WEIGHT_DECAY = 1e-2
EPS = 1e-6  #: of Adam, AdamW and LAMB


def _separable(inner: int, outer: int, stride: int = 1, dilation: int = 1) -> nn.Sequential:
    """Return a 3x3 convolution of each channel by itself, then a 1x1 over all of them."""
    depthwise = nn.Conv2d(
        inner, inner, 3, stride, padding=dilation, dilation=dilation, groups=inner, bias=False
    )
    return nn.Sequential(depthwise, nn.Conv2d(inner, outer, 1, bias=False))


def _normalised(convolution: nn.Module, channels: int) -> List[nn.Module]:
    return [convolution, nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]


def _unit(inner: int, outer: int, kernel: int, **options: Any) -> nn.Sequential:
    return nn.Sequential(*_normalised(nn.Conv2d(inner, outer, kernel, bias=False, **options), outer))


def _deconvolution(inner: int, outer: int) -> nn.ConvTranspose2d:
    """Return what doubles height and width."""
    return nn.ConvTranspose2d(inner, outer, 3, stride=2, padding=1, output_padding=1, bias=False)


class XBlock(nn.Module):
    """Separable convolutions beside a shortcut.

    *widths* are the channels from input to output, one separable convolution between each two. With a stride, or where
    *extra* says so, one more follows, without normalisation.
    """

    def __init__(
        self, *widths: int, stride: int = 1, extra: bool = False, end_with_relu: bool = True
    ) -> None:
        super().__init__()
        units: List[nn.Module] = []
        for inner, outer in zip(widths, widths[1:]):
            units += _normalised(_separable(inner, outer), outer)
        units.pop()  # no ReLU before the sum
        first, last = widths[0], widths[-1]
        if stride != 1 or extra:
            units.append(_separable(last, last, stride))
        self.body = nn.Sequential(*units)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or first != last:
            self.shortcut = nn.Sequential(nn.Conv2d(first, last, 1, stride, bias=False), nn.BatchNorm2d(last))
        self.end_with_relu = end_with_relu

    def forward(self, maps: Tensor) -> Tensor:
        """Add the body to the shortcut."""
        total: Tensor = self.body(maps) + self.shortcut(maps)
        return functional.relu(total, inplace=True) if self.end_with_relu else total


class Pyramid(nn.Module):
    """Looks at the encoder's map through four dilations and as a whole, then mixes the five views."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        wide = [_unit(inner, outer, 3, padding=dilation, dilation=dilation) for dilation in DILATIONS]
        self.views = nn.ModuleList([_unit(inner, outer, 1), *wide])
        self.whole = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(inner, outer, 1, bias=False))
        # A trainable affine map where the other views have batch normalisation: one pixel has no statistics.
        self.scale = nn.Parameter(torch.ones(outer, 1, 1))
        self.shift = nn.Parameter(torch.zeros(outer, 1, 1))
        self.mix = _unit(5 * outer, outer, 1)

    def forward(self, maps: Tensor) -> Tensor:
        """Return the mixed views, as large as *maps*."""
        whole = functional.relu(self.whole(maps) * self.scale + self.shift)
        views = [view(maps) for view in self.views]
        mixed: Tensor = self.mix(torch.cat([*views, whole.expand(-1, -1, *maps.shape[2:])], dim=1))
        return mixed


class DeepCam(nn.Module):
    """Takes (N, 16, height, width), both divisible by 16, returns logits (N, 3, height, width)."""

    def __init__(self, *, width_multiplier: float = 1.0, middle_blocks: int = 16) -> None:
        super().__init__()

        def wide(channels: int) -> int:
            return max(1, round(channels * width_multiplier))

        c32, c48, c64, c128, c256, c728 = (wide(channels) for channels in (32, 48, 64, 128, 256, 728))
        c1024, c1536, c2048 = wide(1024), wide(1536), wide(2048)
        self.entry = nn.Sequential(
            _unit(CHANNELS, c32, 3, stride=2, padding=1),
            _unit(c32, c64, 3, padding=1),
            # The specification takes the low-level features before the ReLU that follows this block; the reference does
            # that ReLU in place, so what its decoder sees are the features behind it. Same here.
            XBlock(c64, c128, c128, stride=2),
        )
        self.encoder = nn.Sequential(
            XBlock(c128, c256, c256, stride=2),
            XBlock(c256, c728, c728, stride=2),
            *(XBlock(c728, c728, c728, c728) for _ in range(middle_blocks)),
            XBlock(c728, c728, c1024, extra=True, end_with_relu=False),
            *_normalised(_separable(c1024, c1536, dilation=2), c1536),
            *_normalised(_separable(c1536, c1536, dilation=2), c1536),
            *_normalised(_separable(c1536, c2048, dilation=2), c2048),
        )
        self.pyramid = Pyramid(c2048, c256)
        for module in self.modules():  # what follows keeps torch's own initial weights, as in the reference
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
        self.low_level = _unit(c128, c48, 1)
        self.upsample = nn.Sequential(
            *_normalised(_deconvolution(c256, c256), c256), *_normalised(_deconvolution(c256, c256), c256)
        )
        self.decoder = nn.Sequential(
            _unit(c256 + c48, c256, 3, padding=1),
            _unit(c256, c256, 3, padding=1),
            nn.Conv2d(c256, c256, 1),
            *_normalised(_deconvolution(c256, c256), c256),
            _deconvolution(c256, CLASSES),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Score each class at each pixel."""
        low = self.entry(images)
        high = self.upsample(self.pyramid(self.encoder(low)))
        scores: Tensor = self.decoder(torch.cat([high, self.low_level(low)], dim=1))
        return scores


def weighted_loss() -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss: cross-entropy with class weights f ** -0.125, the plain mean over pixels.

    torch's own weighted mean divides by the sum of weights instead of the number of pixels.
    """

    @functools.cache  # once per device: a copy in every step would wait for the device
    def weights(device: torch.device) -> Tensor:
        return torch.tensor([frequency**-0.125 for frequency in FREQUENCIES], device=device)

    def loss(scores: Tensor, labels: Tensor) -> Tensor:
        # In float32: half precision cannot sum nearly a million pixels.
        pixels = functional.cross_entropy(
            scores.float(), labels, weight=weights(scores.device), reduction="none"
        )
        return pixels.mean()

    return loss


def mean_iou(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the quality: intersection over union, mean of the classes of a sample, then of the samples.

    A class that is neither in a sample's labels nor predicted counts as 1 in that sample's mean.

    Args:
        scores: (N, 3, height, width) logits.
        labels: (N, height, width) classes.
    """
    predicted = scores.argmax(dim=1)
    ratios = []
    for number in range(CLASSES):
        guess, truth = (predicted == number).flatten(1), (labels == number).flatten(1)
        both, either = (guess & truth).sum(dim=1), (guess | truth).sum(dim=1)
        ratios.append(
            torch.where(either > 0, both / either.clamp(min=1), torch.ones_like(both, dtype=torch.float32))
        )
    return torch.stack(ratios).mean()


def task(parameters: Mapping[str, Any]) -> Task:
    """Return DeepCAM with these fields.

    Stored samples: float32 (height, width, 16), channels last as in the HDF5 files and already scaled by the reader with
    the data set's ``stats.h5``; int64 labels (height, width).

    Raises:
        ValueError: height or width is not a multiple of 16.
    """
    require(deepcam_conflicts, parameters)
    height, width = int(parameters["height"]), int(parameters["width"])
    channels_last = bool(parameters["channels_last"])

    def model() -> nn.Module:
        network = DeepCam(
            width_multiplier=float(parameters["width_multiplier"]),
            middle_blocks=int(parameters["middle_blocks"]),
        )
        return laid_out(network, channels_last=channels_last, dimensions=4)

    def prepare(images: Tensor, labels: Tensor) -> Tuple[Tensor, Tensor]:
        return channels_first(images, channels_last=channels_last).float(), labels.long()

    return Task(
        name="deepcam",
        model=model,
        prepare=prepare,
        loss=weighted_loss(),
        optimizer=optimizer_of(parameters, weight_decay=WEIGHT_DECAY, eps=EPS),
        input=TensorSpec((height, width, CHANNELS), torch.float32),
        target=TensorSpec((height, width), torch.int64),
        low=0.0,
        high=1.0,
        classes=CLASSES,
    )
