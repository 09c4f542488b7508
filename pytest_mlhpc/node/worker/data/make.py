"""Make a synthetic set on disk, in a site's own format, whole or not at all.

Targets can be learnt from inputs, so that a loss falls. Every sample has its own generator, seeded by (seed, index):
equal seeds make equal sets, whoever makes which sample. The constants of noise are tuned to sizes and ratios measured on
the real sets; ``tests/node/worker/data`` proves them.

Usual samples pack like real ones and hide their targets below as much noise. Learnable samples show their targets plainly, so
that a small model reaches the targets of MLPerf HPC within a minute; what that took says nothing of how fast the real sets train.
"""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Mapping, Optional, Tuple

from pytest_mlhpc.node.worker.data import formats, tfrecord
from pytest_mlhpc.node.worker.data.dataset_files import (
    DataError,
    Manifest,
    SetLayout,
    building,
    check_manifest,
    describe,
    read_manifest,
    write_manifest,
)

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


def make_volume(seed: int, index: int, edge: int, redshifts: int = 4) -> Tuple[Any, Any]:
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


def make_climate(seed: int, index: int, height: int, width: int) -> Tuple[Any, Any]:
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


def make_picture(seed: int, index: int, height: int, width: int, label: int) -> Any:
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


#: Mean particles per voxel, and how far a target of 1 or -1 shifts its logarithm.
LEARNABLE_PARTICLES, REACH = 2.0, 1.5
#: Cells along each edge of a label map. Regions end where cells do, so that a coarse map can be a good one.
CELLS = 4
#: Shares of background, cyclones and rivers among cells; of the real set the last two are 1.4 %, too few to learn from a few samples.
SHARES = (0.5, 0.25, 0.25)
#: Shift of a class's channel and standard deviation of the noise, in standard units.
SHIFT, NOISE = 2.5, 0.3
#: Grey levels between a class's colours and the middle one, and standard deviation of the noise of pixels and of whole pictures.
TINT, LEARNABLE_GRAIN, LIGHT = 60.0, 15.0, 10.0


def make_learnable_volume(seed: int, index: int, edge: int, redshifts: int = 4) -> Tuple[Any, Any]:
    """Return (int16 counts edge^3 x redshifts, float32[4] in 0..1): each target is the level of one redshift."""
    import numpy as np

    rng = generator(seed, index)
    y = rng.uniform(-1, 1, 4).astype(np.float32)
    counts = rng.standard_exponential((edge, edge, edge, redshifts), dtype=np.float32)
    counts *= LEARNABLE_PARTICLES * np.exp(REACH * y[np.arange(redshifts) % 4])
    return np.minimum(counts, 32767).astype(np.int16), (y + 1) / 2


def make_learnable_climate(seed: int, index: int, height: int, width: int) -> Tuple[Any, Any]:
    """Return (float32 height x width x 16, int64 labels height x width), not normalised, in the bounds of real ones.

    Labels are cells of a coarse grid; classes 1 and 2 each raise a channel of their own.
    """
    import numpy as np

    rng = generator(seed, index)
    cells = rng.choice(len(SHARES), (CELLS, CELLS), p=SHARES)
    rows, columns = np.arange(height) * CELLS // height, np.arange(width) * CELLS // width
    labels = cells[rows[:, None], columns[None, :]].astype(np.int64)
    data = rng.standard_normal((height, width, CHANNELS), dtype=np.float32) * np.float32(NOISE)
    for label in (1, 2):
        data[..., label - 1] += np.float32(SHIFT) * (labels == label)
    np.clip(data, -CLIMATE_RANGE, CLIMATE_RANGE, out=data)
    low, high = climate_bounds()
    share = (data + np.float32(CLIMATE_RANGE)) / np.float32(2 * CLIMATE_RANGE)
    return low + share * (high - low), labels


def make_learnable_picture(seed: int, index: int, height: int, width: int, label: int) -> Any:
    """Return a uint8 height x width x 3 image whose colour tells the class *label*, whatever crop or mirror shows of it."""
    import numpy as np

    rng = generator(seed, index)
    turn = label * 2.399963229728653  # the golden angle, as in ``make_picture``
    colour = np.array([np.cos(turn), np.cos(turn + 2.1), np.cos(turn + 4.2)], dtype=np.float32)
    image = (
        128
        + TINT * colour
        + LIGHT * rng.standard_normal()
        + LEARNABLE_GRAIN * rng.standard_normal((height, width, 3))
    )
    return np.clip(image, 0, 255).astype(np.uint8)


#: Threads that make samples; NumPy, zlib and Pillow let each other run.
MOST_THREADS = 8
Writer = Callable[[Path, int, SetLayout], None]


def _volume(folder: Path, index: int, layout: SetLayout) -> None:
    """Write CosmoFlow sample *index*."""
    volume = make_learnable_volume if layout.learnable else make_volume
    x, y = volume(layout.seed, index, layout.sizes["edge"])
    stem = folder / f"synthetic_{index:08d}"
    if layout.format == "hdf5":
        formats.write_cosmoflow(stem.with_suffix(".hdf5"), x, y)
    else:
        tfrecord.write_sample(
            stem.with_suffix(tfrecord.SUFFIX), x, y, compress=layout.format == "tfrecord-gzip"
        )


def _climate(folder: Path, index: int, layout: SetLayout) -> None:
    """Write DeepCAM sample *index*."""
    climate = make_learnable_climate if layout.learnable else make_climate
    data, labels = climate(layout.seed, index, layout.sizes["height"], layout.sizes["width"])
    formats.write_deepcam(folder / f"data-{index:08d}.h5", data, labels)


def _picture(folder: Path, index: int, layout: SetLayout) -> None:
    """Write picture *index* into the folder of its class."""
    label = index % layout.sizes["classes"]
    picture = make_learnable_picture if layout.learnable else make_picture
    pixels = picture(layout.seed, index, layout.sizes["height"], layout.sizes["width"], label)
    inside = folder / formats.CLASS.format(label)
    inside.mkdir(exist_ok=True)
    formats.write_image(inside / f"synthetic_{index:08d}.JPEG", pixels)


_WRITERS: Mapping[str, Writer] = {"cosmoflow": _volume, "deepcam": _climate, "resnet50": _picture}
_FOLDERS: Mapping[str, Tuple[str, str]] = {"resnet50": ("train", "val")}


def make_set(
    layout: SetLayout, root: Path, tell: Optional[Callable[[int, int], None]] = None
) -> Tuple[Manifest, bool]:
    """Make the set at *root* unless it is there already; return (its manifest, whether it was made now).

    *tell* is called with (samples done, samples) from the calling thread.

    Raises:
        DataError: *root* holds something else, another set, or an incomplete one; no room; no permission.
    """
    with building(root) as folder:
        if folder is not None:
            _room(layout, folder)
            _fill(layout, folder, tell)
            manifest = describe(folder, layout.as_json())
            write_manifest(folder, manifest)
            return manifest, True
    return _existing(layout, root), False


def _existing(layout: SetLayout, root: Path) -> Manifest:
    """Return the manifest of the set at *root* if it is the one asked for and no file of it is missing."""
    manifest = read_manifest(root)
    if manifest is None:
        raise DataError(root, "vanished while it was read")
    if manifest.layout != layout.as_json():
        other = sorted(key for key, value in layout.as_json().items() if manifest.layout.get(key) != value)
        raise DataError(root, f"holds another set of ours (other {', '.join(other)}): name another folder")
    problems = check_manifest(root, manifest)
    if problems:
        raise DataError(
            root, f"holds this set, but damaged: {'; '.join(problems)}. Remove it and make it again"
        )
    return manifest


def _room(layout: SetLayout, folder: Path) -> None:
    """Refuse to begin what cannot fit."""
    needed = layout.sample_bytes * (layout.samples + layout.validation)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DataError(
            folder.parent, f"has {free / 1e9:.1f} GB free, the set needs about {needed / 1e9:.1f} GB"
        )


def _fill(layout: SetLayout, folder: Path, tell: Optional[Callable[[int, int], None]]) -> None:
    """Write all samples, several at a time; the first error stops the rest."""
    write = _WRITERS[layout.workload]
    total = layout.samples + layout.validation
    train, validation = _FOLDERS.get(layout.workload, ("train", "validation"))
    (folder / train).mkdir()
    if layout.validation:
        (folder / validation).mkdir()
    if layout.workload == "deepcam":
        formats.write_stats(folder / formats.STATS, *climate_bounds())
    with ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0)))) as pool:
        try:  # numbers go on from training to validation, so that no sample is in both
            futures = [
                pool.submit(write, folder / (train if index < layout.samples else validation), index, layout)
                for index in range(total)
            ]
            for done, future in enumerate(futures, 1):
                future.result()
                if tell is not None:
                    tell(done, total)
        finally:
            pool.shutdown(cancel_futures=True)
