"""CosmoFlow and DeepCAM in HDF5, one sample per file."""

from __future__ import annotations

import functools
import inspect
import io
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, Sequence, Tuple, TypeVar

from pytest_mlhpc.node.worker.data.files import DataError, read_error, replace_file
from pytest_mlhpc.node.worker.data.tfrecord import LEVEL

SUFFIXES = (".hdf5", ".h5")
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
    replace_file(path, image.getbuffer())


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
