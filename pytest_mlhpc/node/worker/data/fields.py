"""Synthetic samples (NumPy) that pack like the real ones, for the writers.

Targets can be learnt from inputs, so that a loss falls. Every sample has its own generator, seeded by (seed, index):
equal seeds make equal sets, whoever makes which sample. The constants of noise are tuned to sizes and ratios measured on
the real sets; ``tests/node/worker/data`` proves them.
"""

from __future__ import annotations

from typing import Any, Tuple

#: Mean particles per voxel. Tuned: a 128x128x128x4 sample gzips to 2.67 MB, between the 2.8 MB of the published sets
#: (HPDC'24, and 1.7 TB / 589,824 of MLPerf HPC v2) and the 88 % saved of 16.8 MB = 2.0 MB of the SC'21 draft.
PARTICLES = 1.0
#: Noise of climate data, in standard units. Tuned: gzip saves 23 % of a whole DeepCAM file (SC'21 draft).
WEATHER = 0.15
#: Standard deviation of image noise, in grey levels. Tuned with images.QUALITY: 124 KB at 500 x 375 pixels (HPDC'24).
GRAIN = 20.0
CHANNELS = 16
#: Half the range of every climate channel, in standard units; values are clipped to it, so stats.h5 is known beforehand.
CLIMATE_RANGE = 4.0
#: Shares of the DeepCAM classes cyclone and atmospheric river (MLPerf HPC reference: class frequencies).
CYCLONES, RIVERS = 0.0004578708870701058, 0.01327431072255291


def generator(seed: int, index: int) -> Any:
    """Return the random generator of sample *index*."""
    import numpy as np

    return np.random.default_rng([seed, index])


def _enlarge(coarse: Any, shape: Tuple[int, ...]) -> Any:
    """Return *coarse* stretched to *shape* by linear interpolation along each axis."""
    import numpy as np

    for axis, extent in enumerate(shape):
        places = np.linspace(0, coarse.shape[axis] - 1, extent)
        low = np.minimum(places.astype(int), max(coarse.shape[axis] - 2, 0))
        high = np.minimum(low + 1, coarse.shape[axis] - 1)
        part = (places - low).astype(np.float32)
        part = part.reshape([-1 if other == axis else 1 for other in range(coarse.ndim)])
        coarse = np.take(coarse, low, axis) * (1 - part) + np.take(coarse, high, axis) * part
    return coarse


def volume(seed: int, index: int, edge: int, redshifts: int = 4) -> Tuple[Any, Any]:
    """Return (int16 counts edge^3 x redshifts, float32[4] in 0..1) like a CosmoFlow sample.

    Real targets lie in -1..1; with a mean that is not zero, a few steps already have something to learn.

    The four parameters set mean, clustering, growth between redshifts and a gradient; all but the last by a few percent
    only, so that every sample packs like the next.
    """
    import numpy as np

    rng = generator(seed, index)
    y = rng.uniform(-1, 1, 4).astype(np.float32)
    coarse = rng.standard_normal((max(edge // 8, 2),) * 3, dtype=np.float32)
    smooth = _enlarge(coarse, (edge,) * 3) + y[3] * np.linspace(-0.5, 0.5, edge, dtype=np.float32)
    x = np.empty((edge, edge, edge, redshifts), dtype=np.int16)
    for channel in range(redshifts):
        width = (0.8 + 0.05 * y[1]) * (0.5 + (0.5 + 0.05 * y[2]) * channel / max(redshifts - 1, 1))
        density = np.exp(width * smooth) * (PARTICLES * (1 + 0.05 * y[0]))
        counts = rng.standard_exponential(density.shape, dtype=np.float32) * density
        x[..., channel] = np.minimum(counts, 32767)
    return x, (y + 1) / 2


def climate(seed: int, index: int, height: int, width: int) -> Tuple[Any, Any]:
    """Return (float32 height x width x 16, int64 labels height x width) like a DeepCAM sample, not normalised.

    Labels: 0 background, 1 cyclone (discs), 2 atmospheric river (slanted bands), in about the real shares.
    """
    import numpy as np

    rng = generator(seed, index)
    labels = _events(rng, height, width)
    coarse = rng.standard_normal((max(height // 32, 2), max(width // 32, 2), CHANNELS), dtype=np.float32)
    data = _enlarge(coarse, (height, width))
    data += rng.standard_normal(data.shape, dtype=np.float32) * np.float32(WEATHER)
    data[..., 0] += np.float32(1.5) * (labels == 1)
    data[..., 1] += np.float32(1.5) * (labels == 2)
    np.clip(data, -CLIMATE_RANGE, CLIMATE_RANGE, out=data)
    low, high = climate_bounds()
    return low + (data + np.float32(CLIMATE_RANGE)) / np.float32(2 * CLIMATE_RANGE) * (high - low), labels


def climate_bounds() -> Tuple[Any, Any]:
    """Return (minval, maxval) of the channels, float32[16]: what stats.h5 of a set of ours holds."""
    import numpy as np

    channel = np.arange(CHANNELS, dtype=np.float32)
    low = np.float32(200.0) * channel
    return low, low + np.float32(50.0)


def _events(rng: Any, height: int, width: int) -> Any:
    """Return a label map with one band of rivers and one disc of a cyclone, at least a pixel each."""
    import numpy as np

    rows, columns = np.ogrid[:height, :width]
    labels = np.zeros((height, width), dtype=np.int64)
    slope, offset = rng.uniform(-0.5, 0.5), rng.uniform(0.2, 0.8) * height
    half = max(RIVERS * height / 2, 0.5)
    labels[np.abs(rows - offset - slope * (columns - width / 2)) <= half] = 2
    radius = max((CYCLONES * height * width / np.pi) ** 0.5, 1.0)
    row, column = rng.uniform(0, height), rng.uniform(0, width)
    labels[(rows - row) ** 2 + (columns - column) ** 2 <= radius**2] = 1
    return labels


def picture(seed: int, index: int, height: int, width: int, label: int) -> Any:
    """Return a uint8 height x width x 3 image: its hue and the direction of its stripes tell the class *label*."""
    import numpy as np

    rng = generator(seed, index)
    turn = label * 2.399963229728653  # the golden angle: neighbouring classes look different
    rows = np.linspace(-1, 1, height, dtype=np.float32)[:, None]
    columns = np.linspace(-1, 1, width, dtype=np.float32)[None, :]
    wave = np.sin(8 * (rows * np.cos(turn) + columns * np.sin(turn)) + rng.uniform(0, 6))
    hue = np.array([np.cos(turn), np.cos(turn + 2.1), np.cos(turn + 4.2)], dtype=np.float32)
    image = 128 + 50 * wave[..., None] * hue + 20 * hue
    grain = rng.standard_normal((height, width, 1), dtype=np.float32) * GRAIN
    return np.clip(image + grain, 0, 255).astype(np.uint8)
