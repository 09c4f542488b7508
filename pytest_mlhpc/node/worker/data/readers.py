"""A set on disk as something that gives sample i: which files, which format, which shape.

Readers are frozen and hold only names and numbers, so that they travel to loader processes; files are opened there, one
at a time, for one sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, List, Mapping, Sequence, Tuple

from pytest_mlhpc.node.worker.data import hdf5, images, tfrecord
from pytest_mlhpc.node.worker.data.files import DataError, list_files

#: Names of the folder with training samples, where a set has one.
TRAIN = ("train", "training")
#: Keeps the seeds of random crops of neighbouring runs apart.
_STRIDE = 1_000_003
_RECORDS = (tfrecord.SUFFIX, ".tfrecord.gz", ".tfrecords", ".tfrecords.gz")


@dataclass(frozen=True)
class ExpectedSample:
    """What the workload takes: shape of input and target without batch dimension, number of classes, its fields."""

    shape: Tuple[int, ...]
    target: Tuple[int, ...]
    classes: int
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class VolumeReader:
    """CosmoFlow, TFRecord or HDF5."""

    paths: Tuple[Path, ...]
    shape: Tuple[int, ...]
    targets: int

    def __call__(self, index: int) -> Tuple[Any, Any]:
        """Return (int16 array, float32 array) of sample *index*."""
        path = self.paths[index]
        read = hdf5.read_cosmoflow if path.suffix in hdf5.SUFFIXES else tfrecord.read_sample
        return read(path, self.shape, self.targets)


@dataclass(frozen=True)
class ClimateReader:
    """DeepCAM. ``shift`` and ``scale`` come from stats.h5."""

    paths: Tuple[Path, ...]
    shape: Tuple[int, ...]
    classes: int
    shift: Any
    scale: Any

    def __call__(self, index: int) -> Tuple[Any, Any]:
        """Return (float32 array, int64 labels) of sample *index*."""
        return hdf5.read_deepcam(self.paths[index], self.shape, self.shift, self.scale, self.classes)


@dataclass(frozen=True)
class ImageReader:
    """Image folders. ``labels[i]`` is the class of ``paths[i]``."""

    paths: Tuple[Path, ...]
    labels: Tuple[int, ...]
    shape: Tuple[int, ...]
    crop: str
    seed: int

    def __call__(self, index: int) -> Tuple[Any, Any]:
        """Return (uint8 array, class) of sample *index*."""
        import numpy as np

        pixels = images.read_sample(self.paths[index], self.shape, self.crop, self.seed * _STRIDE + index)
        return pixels, np.int64(self.labels[index])


Reader = Callable[[int], Tuple[Any, Any]]


def training_folder(root: Path) -> Path:
    """Return the folder of training samples of a set: ``root/train`` where there is one, else *root*."""
    return next((root / name for name in TRAIN if (root / name).is_dir()), root)


def _chosen(root: Path, files: Sequence[Path], suffixes: Sequence[str], what: str) -> List[Path]:
    """Return the files with one of *suffixes*, at least one."""
    found = [file for file in files if file.name.lower().endswith(tuple(suffixes))]
    if not found:
        raise DataError(root, f"holds no {what} ({', '.join(suffixes)}) among its {len(files)} files")
    return found


def _volumes(root: Path, wanted: ExpectedSample, _seed: int) -> VolumeReader:
    folder = training_folder(root)
    paths = _chosen(folder, list_files(folder), (*_RECORDS, *hdf5.SUFFIXES), "CosmoFlow samples")
    return VolumeReader(tuple(paths), wanted.shape, wanted.target[0])


def _climate(root: Path, wanted: ExpectedSample, _seed: int) -> ClimateReader:
    folder = training_folder(root)
    files = _chosen(folder, list_files(folder), hdf5.SUFFIXES, "DeepCAM samples")
    stats = next(
        (place / hdf5.STATS for place in (root, folder, root.parent) if (place / hdf5.STATS).is_file()),
        None,
    )
    if stats is None:
        raise DataError(root, f"has no {hdf5.STATS} (minval and maxval of every channel)")
    paths = tuple(file for file in files if file.name != hdf5.STATS)
    if not paths:
        raise DataError(folder, "holds no DeepCAM samples beside stats.h5")
    shift, scale = hdf5.read_stats(stats, wanted.shape[-1])
    return ClimateReader(paths, wanted.shape, wanted.classes or 3, shift, scale)


def _images(root: Path, wanted: ExpectedSample, seed: int) -> ImageReader:
    folder = training_folder(root)
    paths = _chosen(folder, list_files(folder), images.SUFFIXES, "pictures")
    labels = images.classes_of(folder, paths, wanted.classes)
    # EPCC trains on middle cuts, without augmentation; everybody else on random ones.
    default = "center" if wanted.parameters.get("stem") == "epcc" else "random"
    crop = str(wanted.parameters.get("crop", default))
    if crop not in images.CROPS:
        raise DataError(root, f"crop {crop!r} is unknown, choose one of {', '.join(images.CROPS)}")
    return ImageReader(tuple(paths), tuple(labels), wanted.shape, crop, seed)


#: workload -> what opens a set of it.
FORMATS: Mapping[str, Callable[[Path, ExpectedSample, int], Any]] = {
    "cosmoflow": _volumes,
    "deepcam": _climate,
    "resnet50": _images,
}


def open_files(workload: str, root: Path, wanted: ExpectedSample, seed: int) -> Any:
    """Return the reader of the set at *root*; it has ``paths`` and gives sample i when called.

    Raises:
        DataError: no such set, or no format is known for this workload.
    """
    if workload not in FORMATS:
        raise DataError(root, f"no file format is known for workload {workload}, use data='memory'")
    if not root.is_dir():
        raise DataError(root, "is not there" if not root.exists() else "is no folder, expected a data set")
    return FORMATS[workload](root, wanted, seed)
