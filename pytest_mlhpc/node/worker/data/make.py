"""Make a synthetic set on disk, in a site's own format, whole or not at all."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Callable, Mapping, Optional, Tuple

from pytest_mlhpc.node.worker.data import fields, hdf5, images, learnable, tfrecord
from pytest_mlhpc.node.worker.data.files import (
    DataError,
    Manifest,
    SetLayout,
    building,
    check_manifest,
    describe,
    read_manifest,
    write_manifest,
)

#: Threads that make samples; NumPy, zlib and Pillow let each other run.
MOST_THREADS = 8
Writer = Callable[[Path, int, SetLayout], None]


def _volume(folder: Path, index: int, layout: SetLayout) -> None:
    """Write CosmoFlow sample *index*."""
    volume = learnable.volume if layout.learnable else fields.volume
    x, y = volume(layout.seed, index, layout.sizes["edge"])
    stem = folder / f"synthetic_{index:08d}"
    if layout.format == "hdf5":
        hdf5.write_cosmoflow(stem.with_suffix(".hdf5"), x, y)
    else:
        tfrecord.write_sample(
            stem.with_suffix(tfrecord.SUFFIX), x, y, compress=layout.format == "tfrecord-gzip"
        )


def _climate(folder: Path, index: int, layout: SetLayout) -> None:
    """Write DeepCAM sample *index*."""
    climate = learnable.climate if layout.learnable else fields.climate
    data, labels = climate(layout.seed, index, layout.sizes["height"], layout.sizes["width"])
    hdf5.write_deepcam(folder / f"data-{index:08d}.h5", data, labels)


def _picture(folder: Path, index: int, layout: SetLayout) -> None:
    """Write picture *index* into the folder of its class."""
    label = index % layout.sizes["classes"]
    picture = learnable.picture if layout.learnable else fields.picture
    pixels = picture(layout.seed, index, layout.sizes["height"], layout.sizes["width"], label)
    inside = folder / images.CLASS.format(label)
    inside.mkdir(exist_ok=True)
    images.write_sample(inside / f"synthetic_{index:08d}.JPEG", pixels)


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
        raise DataError(root, "vanished while it was being looked at")
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
        hdf5.write_stats(folder / hdf5.STATS, *fields.climate_bounds())
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
