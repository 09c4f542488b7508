"""PAYLOAD. CosmoFlow in HDF5, one sample per file, as PyTorch ports of the benchmark use it.

Two layouts are read, told by their names:

* ``x`` and ``y``: the arrays of the TFRecord files (EPCC's port and others); this is what we write, gzip inside;
* ``full`` and ``unitPar``: names of the simulation files, cut to one sample per file.

``x`` and ``full`` may have their four redshifts last (D, D, D, 4) or first (4, D, D, D), as int16 or as floats that hold
whole numbers. Uncut simulation files (512^3) and files of normalised values are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Tuple

from pytest_mlhpc.node.worker.data import hdf5
from pytest_mlhpc.node.worker.data.errors import DataError
from pytest_mlhpc.node.worker.data.tfrecord import LEVEL

LAYOUTS = (("x", "y"), ("full", "unitPar"))


def read_sample(path: Path, shape: Tuple[int, ...], targets: int) -> Tuple[Any, Any]:
    """Return (int16 array of *shape*, channels last, float32 array of *targets* values)."""
    import numpy as np

    first = (shape[-1], *shape[:-1])

    def read(file: Any) -> Tuple[Any, Any]:
        names = next((names for names in LAYOUTS if names[0] in file), None)
        if names is None:
            raise DataError(path, f"has neither x nor full, expected one of them; it has {sorted(file)[:8]}")
        voxels = hdf5.dataset(path, file, names[0], (shape, first), "iuf")
        labels = hdf5.dataset(path, file, names[1], ((targets,),), "f")
        return voxels[()], labels[()].astype(np.float32)

    x, y = hdf5.reading(path, "a CosmoFlow sample", read)
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


def write_sample(path: Path, voxels: Any, labels: Any) -> None:
    """Write one sample in the ``x``, ``y`` layout, channels last, ``x`` as a single gzip chunk."""
    packed = {"x": {"compression": "gzip", "compression_opts": LEVEL, "chunks": voxels.shape}}
    hdf5.write(path, {"x": voxels, "y": labels}, packed)
