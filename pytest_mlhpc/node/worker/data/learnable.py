"""Synthetic samples (NumPy) from which a small model learns its task within seconds, for training to a quality.

Those of ``fields.py`` are made for input and output: they pack like real ones and hide their targets below as much noise.
These show them plainly, so that a run of a minute reaches the targets of MLPerf HPC; what that took says nothing of how fast
the real sets train. Every sample has its own generator, seeded by (seed, index).
"""

from __future__ import annotations

from typing import Any, Tuple

from pytest_mlhpc.node.worker.data import fields

#: Mean particles per voxel, and how far a target of 1 or -1 shifts its logarithm.
PARTICLES, REACH = 2.0, 1.5
#: Cells along each edge of a label map. Regions end where cells do, so that a coarse map can be a good one.
CELLS = 4
#: Shares of background, cyclones and rivers among cells; of the real set the last two are 1.4 %, too few to learn from a few samples.
SHARES = (0.5, 0.25, 0.25)
#: Shift of a class's channel and standard deviation of the noise, in standard units.
SHIFT, NOISE = 2.5, 0.3
#: Grey levels between a class's colours and the middle one, and standard deviation of the noise of pixels and of whole pictures.
TINT, GRAIN, LIGHT = 60.0, 15.0, 10.0


def volume(seed: int, index: int, edge: int, redshifts: int = 4) -> Tuple[Any, Any]:
    """Return (int16 counts edge^3 x redshifts, float32[4] in 0..1): each target is the level of one redshift."""
    import numpy as np

    rng = fields.generator(seed, index)
    y = rng.uniform(-1, 1, 4).astype(np.float32)
    counts = rng.standard_exponential((edge, edge, edge, redshifts), dtype=np.float32)
    counts *= PARTICLES * np.exp(REACH * y[np.arange(redshifts) % 4])
    return np.minimum(counts, 32767).astype(np.int16), (y + 1) / 2


def climate(seed: int, index: int, height: int, width: int) -> Tuple[Any, Any]:
    """Return (float32 height x width x 16, int64 labels height x width), not normalised, in the bounds of ``fields.py``.

    Labels are cells of a coarse grid; classes 1 and 2 each raise a channel of their own.
    """
    import numpy as np

    rng = fields.generator(seed, index)
    cells = rng.choice(len(SHARES), (CELLS, CELLS), p=SHARES)
    rows, columns = np.arange(height) * CELLS // height, np.arange(width) * CELLS // width
    labels = cells[rows[:, None], columns[None, :]].astype(np.int64)
    data = rng.standard_normal((height, width, fields.CHANNELS), dtype=np.float32) * np.float32(NOISE)
    for label in (1, 2):
        data[..., label - 1] += np.float32(SHIFT) * (labels == label)
    np.clip(data, -fields.CLIMATE_RANGE, fields.CLIMATE_RANGE, out=data)
    low, high = fields.climate_bounds()
    share = (data + np.float32(fields.CLIMATE_RANGE)) / np.float32(2 * fields.CLIMATE_RANGE)
    return low + share * (high - low), labels


def picture(seed: int, index: int, height: int, width: int, label: int) -> Any:
    """Return a uint8 height x width x 3 image whose colour tells the class *label*, whatever crop or mirror shows of it."""
    import numpy as np

    rng = fields.generator(seed, index)
    turn = label * 2.399963229728653  # the golden angle, as in ``fields.picture``
    colour = np.array([np.cos(turn), np.cos(turn + 2.1), np.cos(turn + 4.2)], dtype=np.float32)
    image = (
        128 + TINT * colour + LIGHT * rng.standard_normal() + GRAIN * rng.standard_normal((height, width, 3))
    )
    return np.clip(image, 0, 255).astype(np.uint8)
