"""PAYLOAD. DeepCAM as the MLPerf HPC reference stores it: HDF5, one sample per file, and ``stats.h5``.

``climate/data`` is float32 (height, width, 16), ``climate/labels_0`` int64 (height, width), neither compressed (768 x 1152:
63.7 MB = 60.8 MiB). ``stats.h5`` has ``climate/minval`` and ``climate/maxval``, float32[16]; the reader scales by them as
the reference's does (source: ``mlcommons/hpc: deepcam/src/deepCam/data/cam_hdf5_dataset.py``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Tuple

from pytest_mlhpc.node.worker.data import hdf5
from pytest_mlhpc.node.worker.data.errors import DataError

STATS = "stats.h5"
DATA, LABELS = "climate/data", "climate/labels_0"
LOW, HIGH = "climate/minval", "climate/maxval"


def read_stats(path: Path, channels: int) -> Tuple[Any, Any]:
    """Return (shift, scale), float32[channels]: a sample is normalised by ``scale * (data - shift)``."""
    import numpy as np

    def read(file: Any) -> Tuple[Any, Any]:
        low, high = (hdf5.dataset(path, file, name, ((channels,),), "f")[()] for name in (LOW, HIGH))
        return low.astype(np.float32), high.astype(np.float32)

    low, high = hdf5.reading(path, "minval and maxval of every channel", read)
    if not (np.isfinite(low).all() and np.isfinite(high).all() and (high > low).all()):
        raise DataError(path, f"{HIGH} must be finite and above {LOW} in every channel")
    return low, 1 / (high - low)


def read_sample(path: Path, shape: Tuple[int, ...], shift: Any, scale: Any, classes: int) -> Tuple[Any, Any]:
    """Return (float32 array of *shape*, channels last, normalised, int64 labels of ``shape[:2]``)."""
    import numpy as np

    def read(file: Any) -> Tuple[Any, Any]:
        data = hdf5.dataset(path, file, DATA, (shape,), "f")
        labels = hdf5.dataset(path, file, LABELS, (shape[:2],), "iuf")
        return data[()].astype(np.float32, copy=False), labels[()].astype(np.int64, copy=False)

    data, labels = hdf5.reading(path, "a DeepCAM sample", read)
    if labels.min() < 0 or labels.max() >= classes:
        raise DataError(path, f"{LABELS} holds {labels.min()} to {labels.max()}, expected 0 to {classes - 1}")
    with np.errstate(
        all="ignore"
    ):  # NaN in a damaged file ends the run as loss_nan; a check here costs every sample
        data -= shift
        data *= scale
    return data, labels


def write_sample(path: Path, data: Any, labels: Any) -> None:
    """Write one sample: *data* float32 channels last, not normalised, *labels* int64."""
    hdf5.write(path, {DATA: data, LABELS: labels}, {})


def write_stats(path: Path, low: Any, high: Any) -> None:
    """Write ``stats.h5``."""
    hdf5.write(path, {LOW: low, HIGH: high}, {})
