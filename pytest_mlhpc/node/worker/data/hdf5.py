"""PAYLOAD. What both HDF5 formats share: open, look, read whole arrays, and say clearly what is wrong."""

from __future__ import annotations

import functools
import inspect
import io
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, Sequence, TypeVar

from pytest_mlhpc.node.worker.data.errors import DataError, read_error
from pytest_mlhpc.node.worker.data.files import replace_file

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
