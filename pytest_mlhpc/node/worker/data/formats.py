"""Formats of samples on disk, and a set as something that gives sample i.

Classes are numbered in the order of their folders' names. Two crops, in the terms of the published recipes:

* ``random``: 8 to 100 % of the area, aspect 3/4 to 4/3, mirrored half of the time (training, ResNet-50 v1.5);
* ``center``: short edge to 8/7 of the size (256 for 224), middle cut out (evaluation; EPCC's runs train with it).

A random crop depends on seed and sample alone, so that equal seeds read equal pixels whatever the number of processes.

The default is the source code of the running interpreter's standard library: real text that is on every machine.

Readers are frozen and hold only names and numbers, so that they travel to loader processes; files are opened there, one
at a time, for one sample.
"""

from __future__ import annotations

import bisect
import functools
import inspect
import io
import itertools
import math
import os
import random
import sysconfig
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, TypeVar

from pytest_mlhpc.node.worker.data import tfrecord
from pytest_mlhpc.node.worker.data.dataset_files import DataError, list_files, read_error, write_file
from pytest_mlhpc.node.worker.data.tfrecord import LEVEL

HDF5_SUFFIXES = (".hdf5", ".h5")
T = TypeVar("T")


@functools.lru_cache(maxsize=1)
def _unlocked() -> Mapping[str, Any]:
    """Return the option that opens without a lock, where this h5py and its HDF5 know it.

    Many ranks read at once, nobody writes, and parallel file systems without locks would refuse to open.
    """
    import h5py

    known = "locking" in inspect.signature(h5py.File.__init__).parameters
    return {"locking": False} if known and h5py.version.hdf5_version_tuple >= (1, 12, 1) else {}


def reading(path: Path, expected: str, read: Callable[[Any], T]) -> T:
    """Return ``read(file)`` for the open file; whatever HDF5 stumbles over becomes a :class:`DataError`.

    The file is opened for this one call: HDF5 handles do not survive a fork into loader processes.
    """
    import h5py

    try:
        if path.stat().st_size == 0:
            raise DataError(path, f"is empty, expected {expected}")
        with h5py.File(path, "r", **_unlocked()) as file:
            return read(file)
    except OSError as error:
        if error.errno:
            raise read_error(path, error, expected) from None
        raise DataError(path, f"is damaged or no HDF5 ({error}), expected {expected}") from None
    except (KeyError, RuntimeError, ValueError, TypeError, MemoryError) as error:
        raise DataError(path, f"is damaged ({type(error).__name__}: {error}), expected {expected}") from None


def dataset(path: Path, file: Any, name: str, shapes: Sequence[Sequence[int]], kinds: str) -> Any:
    """Return the dataset *name*, not yet read, after checking it: one of *shapes*, dtype kind one of *kinds*."""
    found = file.get(name)
    wanted = " or ".join("x".join(map(str, shape)) for shape in shapes)
    if found is None or not hasattr(found, "shape"):
        raise DataError(path, f"has no dataset {name}, expected one of {wanted}; it has {sorted(file)[:8]}")
    if found.shape not in [tuple(shape) for shape in shapes]:
        shape = "x".join(map(str, found.shape or ())) or "scalar"
        raise DataError(path, f"{name} is {shape}, expected {wanted}")
    if found.dtype.kind not in kinds:
        raise DataError(path, f"{name} holds {found.dtype}, expected numbers of kind {' or '.join(kinds)}")
    return found


def write(path: Path, arrays: Mapping[str, Any], options: Mapping[str, Dict[str, Any]]) -> None:
    """Write *arrays* (name -> array) to *path* whole or not at all; ``options[name]`` go to h5py.

    The file is made in memory first: HDF5 itself can crash the process when the disk fills up under it.

    Raises:
        DataError: no room, no permission; nothing is left behind.
    """
    import h5py

    image = io.BytesIO()
    with h5py.File(image, "w", libver="latest", track_order=False) as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array, track_times=False, **options.get(name, {}))
    write_file(path, image.getbuffer())


LAYOUTS = (("x", "y"), ("full", "unitPar"))


def read_cosmoflow(path: Path, shape: Tuple[int, ...], targets: int) -> Tuple[Any, Any]:
    """Return (int16 array of *shape*, channels last, float32 array of *targets* values)."""
    import numpy as np

    first = (shape[-1], *shape[:-1])

    def read(file: Any) -> Tuple[Any, Any]:
        names = next((names for names in LAYOUTS if names[0] in file), None)
        if names is None:
            raise DataError(path, f"has neither x nor full, expected one of them; it has {sorted(file)[:8]}")
        voxels = dataset(path, file, names[0], (shape, first), "iuf")
        labels = dataset(path, file, names[1], ((targets,),), "f")
        return voxels[()], labels[()].astype(np.float32)

    x, y = reading(path, "a CosmoFlow sample", read)
    if x.shape != tuple(shape):
        x = np.ascontiguousarray(np.moveaxis(x, 0, -1))
    if x.dtype.kind == "f" and not (np.isfinite(x).all() and (x == np.rint(x)).all()):
        raise DataError(
            path, "holds fractions, expected whole numbers (particle counts, not normalised values)"
        )
    if x.dtype != np.int16:
        if x.size and (x.min() < -32768 or x.max() > 32767):
            raise DataError(path, "holds counts beyond 32767, expected numbers that fit into int16")
        x = x.astype(np.int16)
    return x, y


def write_cosmoflow(path: Path, voxels: Any, labels: Any) -> None:
    """Write one sample in the ``x``, ``y`` layout, channels last, ``x`` as a single gzip chunk."""
    packed = {"x": {"compression": "gzip", "compression_opts": LEVEL, "chunks": voxels.shape}}
    write(path, {"x": voxels, "y": labels}, packed)


STATS = "stats.h5"
DATA, LABELS = "climate/data", "climate/labels_0"
LOW, HIGH = "climate/minval", "climate/maxval"


def read_stats(path: Path, channels: int) -> Tuple[Any, Any]:
    """Return (shift, scale), float32[channels]: a sample is normalised by ``scale * (data - shift)``."""
    import numpy as np

    def read(file: Any) -> Tuple[Any, Any]:
        low, high = (dataset(path, file, name, ((channels,),), "f")[()] for name in (LOW, HIGH))
        return low.astype(np.float32), high.astype(np.float32)

    low, high = reading(path, "minval and maxval of every channel", read)
    if not (np.isfinite(low).all() and np.isfinite(high).all() and (high > low).all()):
        raise DataError(path, f"{HIGH} must be finite and above {LOW} in every channel")
    return low, 1 / (high - low)


def read_deepcam(path: Path, shape: Tuple[int, ...], shift: Any, scale: Any, classes: int) -> Tuple[Any, Any]:
    """Return (float32 array of *shape*, channels last, normalised, int64 labels of ``shape[:2]``)."""
    import numpy as np

    def read(file: Any) -> Tuple[Any, Any]:
        data = dataset(path, file, DATA, (shape,), "f")
        labels = dataset(path, file, LABELS, (shape[:2],), "iuf")
        return data[()].astype(np.float32, copy=False), labels[()].astype(np.int64, copy=False)

    data, labels = reading(path, "a DeepCAM sample", read)
    if labels.min() < 0 or labels.max() >= classes:
        raise DataError(path, f"{LABELS} holds {labels.min()} to {labels.max()}, expected 0 to {classes - 1}")
    with np.errstate(
        all="ignore"
    ):  # NaN in a damaged file ends the run as loss_nan; a check here costs every sample
        data -= shift
        data *= scale
    return data, labels


def write_deepcam(path: Path, data: Any, labels: Any) -> None:
    """Write one sample: *data* float32 channels last, not normalised, *labels* int64."""
    write(path, {DATA: data, LABELS: labels}, {})


def write_stats(path: Path, low: Any, high: Any) -> None:
    """Write ``stats.h5``."""
    write(path, {LOW: low, HIGH: high}, {})


IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png")
CROPS = ("random", "center")
#: Pixels that a picture may have. ImageNet's largest has 36 million; more is no photograph but a trap.
MAX_PIXELS = 1 << 26
MAX_BYTES = 1 << 28
#: JPEG quality of synthetic sets, see ``fields.GRAIN``.
JPEG_QUALITY = 95
#: Written beside the folders' names: class 7 is class_00007.
CLASS = "class_{:05d}"


def classes_of(root: Path, files: Sequence[Path], limit: int) -> List[int]:
    """Return the class of each file: the place of its top folder's name among all of them."""
    names = [file.relative_to(root).parts for file in files]
    loose = next((file for file, parts in zip(files, names) if len(parts) < 2), None)
    if loose is not None:
        raise DataError(loose, f"lies in no class folder, expected {root}/CLASS/NAME.JPEG")
    numbers: Dict[str, int] = {
        name: number for number, name in enumerate(sorted({parts[0] for parts in names}))
    }
    if len(numbers) > limit:
        raise DataError(root, f"has {len(numbers)} class folders, the model tells {limit} classes apart")
    return [numbers[parts[0]] for parts in names]


def _random_box(rng: random.Random, width: int, height: int) -> Tuple[int, int, int, int]:
    """Return a box of 8 to 100 % of the area and aspect 3/4 to 4/3; the whole picture's middle if ten tries miss."""
    for _ in range(10):
        area = width * height * rng.uniform(0.08, 1.0)
        aspect = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        wide, high = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < wide <= width and 0 < high <= height:
            left, top = rng.randint(0, width - wide), rng.randint(0, height - high)
            return left, top, left + wide, top + high
    return _middle_box(width, height, 1.0)


def _middle_box(width: int, height: int, share: float) -> Tuple[int, int, int, int]:
    """Return the square in the middle whose edge is *share* of the short edge."""
    edge = max(1, round(min(width, height) * share))
    left, top = (width - edge) // 2, (height - edge) // 2
    return left, top, left + edge, top + edge


def _decode(path: Path, raw: bytes, shape: Tuple[int, ...], rng: Optional[random.Random]) -> Any:
    """Return the cut of a picture as an array of *shape*: a random one, or without *rng* the middle."""
    import numpy as np
    from PIL import Image

    with warnings.catch_warnings():
        # Pillow warns of large pictures; our own limit is stricter, and it is an error.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        with Image.open(io.BytesIO(raw), formats=("JPEG", "PNG")) as picture:
            width, height = picture.size
            if width * height > MAX_PIXELS:
                raise DataError(path, f"has {width} x {height} pixels, more than {MAX_PIXELS}: refused")
            box = _random_box(rng, width, height) if rng else _middle_box(width, height, 7 / 8)
            cut = picture.convert("RGB").resize((shape[1], shape[0]), Image.Resampling.BILINEAR, box=box)
            return np.array(cut)


def read_image(path: Path, shape: Tuple[int, ...], crop: str, seed: int) -> Any:
    """Return a uint8 array of *shape* (size, size, 3); *seed* decides a random crop."""
    import numpy as np

    expected = "a JPEG picture"
    try:
        if path.stat().st_size > MAX_BYTES:
            raise DataError(path, f"is larger than {MAX_BYTES} bytes, expected {expected}")
        raw = path.read_bytes()
    except OSError as error:
        raise read_error(path, error, expected) from None
    if not raw:
        raise DataError(path, f"is empty, expected {expected}")
    rng = random.Random(seed)  # noqa: S311 - crops are no secrets
    try:
        pixels = _decode(path, raw, shape, rng if crop == "random" else None)
    except DataError:
        raise
    except Exception as error:  # noqa: BLE001 - Pillow's decoders raise anything on damaged files
        text = f"cannot be decoded ({type(error).__name__}: {error}), expected {expected}"
        raise DataError(path, text) from None
    if crop == "random" and rng.random() < 0.5:
        pixels = np.ascontiguousarray(pixels[:, ::-1])
    return pixels


def write_image(path: Path, pixels: Any) -> None:
    """Write one uint8 (height, width, 3) array as a JPEG."""
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG", quality=JPEG_QUALITY)
    write_file(path, out.getvalue())


#: Tokens are bytes.
VOCABULARY = 256
#: Left out of the standard library: what is installed on top of it, and what no release needs.
_NOT_OURS = ("site-packages", "dist-packages", "__pycache__")


@dataclass(frozen=True)
class Corpus:
    """Files as one string of bytes. ``starts[i]`` is the offset of ``files[i]``, the last entry is the total length."""

    files: Tuple[Path, ...]
    starts: Tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes in all files."""
        return self.starts[-1]

    def read(self, offset: int, length: int) -> bytes:
        """Return *length* bytes from *offset*, across files where need be."""
        parts: List[bytes] = []
        index = bisect.bisect_right(self.starts, offset) - 1
        while length > 0 and index < len(self.files):
            path, within = self.files[index], offset - self.starts[index]
            wanted = min(length, self.starts[index + 1] - offset)
            part = _read_part(path, within, wanted)
            parts.append(part)
            length -= wanted
            offset += wanted
            index += 1
        return b"".join(parts)


def _read_part(path: Path, offset: int, length: int) -> bytes:
    """Return bytes of one file, all of them or an error."""
    try:
        with path.open("rb", buffering=0) as file:
            part = os.pread(file.fileno(), length, offset)
    except OSError as error:
        raise read_error(path, error, "text") from None
    if len(part) != length:
        raise DataError(path, f"is shorter than when the run began ({length} bytes at {offset} expected)")
    return part


def open_corpus(path: Optional[Path]) -> Corpus:
    """Return the text below *path* (or the file *path*); None: the standard library's ``.py`` files.

    Raises:
        DataError: there is nothing to read.
    """
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        files = [file for file in list_files(root, _NOT_OURS) if file.suffix == ".py"]
    else:
        root = path
        files = [path] if path.is_file() else list_files(path)
    try:
        sizes = [file.stat().st_size for file in files]
    except OSError as error:
        raise read_error(error.filename or root, error, "text") from None
    filled = [(file, size) for file, size in zip(files, sizes) if size]
    if not filled:
        raise DataError(root, "holds no text: no file, or only empty ones")
    starts = tuple(itertools.accumulate((size for _, size in filled), initial=0))
    return Corpus(tuple(file for file, _ in filled), starts)


def windows(text: Corpus, context: int) -> int:
    """Return how many samples of *context* tokens and their successors the text gives."""
    count = (text.size - 1) // context
    if count < 1:
        raise DataError(
            text.files[0].parent,
            f"holds {text.size} bytes of text, one sample needs {context + 1}: use more text",
        )
    return count


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
        read = read_cosmoflow if path.suffix in HDF5_SUFFIXES else tfrecord.read_sample
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
        return read_deepcam(self.paths[index], self.shape, self.shift, self.scale, self.classes)


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

        pixels = read_image(self.paths[index], self.shape, self.crop, self.seed * _STRIDE + index)
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
    paths = _chosen(folder, list_files(folder), (*_RECORDS, *HDF5_SUFFIXES), "CosmoFlow samples")
    return VolumeReader(tuple(paths), wanted.shape, wanted.target[0])


def _climate(root: Path, wanted: ExpectedSample, _seed: int) -> ClimateReader:
    folder = training_folder(root)
    files = _chosen(folder, list_files(folder), HDF5_SUFFIXES, "DeepCAM samples")
    stats = next(
        (place / STATS for place in (root, folder, root.parent) if (place / STATS).is_file()),
        None,
    )
    if stats is None:
        raise DataError(root, f"has no {STATS} (minval and maxval of every channel)")
    paths = tuple(file for file in files if file.name != STATS)
    if not paths:
        raise DataError(folder, "holds no DeepCAM samples beside stats.h5")
    shift, scale = read_stats(stats, wanted.shape[-1])
    return ClimateReader(paths, wanted.shape, wanted.classes or 3, shift, scale)


def _images(root: Path, wanted: ExpectedSample, seed: int) -> ImageReader:
    folder = training_folder(root)
    paths = _chosen(folder, list_files(folder), IMAGE_SUFFIXES, "pictures")
    labels = classes_of(folder, paths, wanted.classes)
    # EPCC trains on middle cuts, without augmentation; everybody else on random ones.
    default = "center" if wanted.parameters.get("stem") == "epcc" else "random"
    crop = str(wanted.parameters.get("crop", default))
    if crop not in CROPS:
        raise DataError(root, f"crop {crop!r} is unknown, choose one of {', '.join(CROPS)}")
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
