"""PAYLOAD. The one error that reading and writing data sets raises, and what a full disk looks like."""

from __future__ import annotations

import os
from typing import Union

from pytest_mlhpc.node.files import NO_ROOM
from pytest_mlhpc.node.worker.failure import WorkerFailure


class DataError(WorkerFailure):
    """A data set is damaged, missing, of another shape than asked, or cannot be written. Names the file.

    ``outcome`` is ``data_unusable``, ``disk_full`` or ``import_failed`` (a library for the format is missing).
    torch raises an error of a loader process again as ``type(text)``, with the traceback in the text: hence the default.
    """

    def __init__(
        self, path: Union[str, os.PathLike[str]], message: str = "", outcome: str = "data_unusable"
    ) -> None:
        self.path = os.fspath(path)
        self.message = message
        super().__init__(outcome, f"{self.path}: {message}" if message else self.path)
        self.args = (path, message, outcome)  # what pickling calls the class with

    def __str__(self) -> str:
        return self.text


def write_error(path: Union[str, os.PathLike[str]], error: OSError) -> DataError:
    """Return what to raise when writing *path* failed with *error*."""
    if error.errno in NO_ROOM:
        text = f"no room to write it ({error.strerror}): free space, raise the quota, or use fewer samples"
        return DataError(path, text, "disk_full")
    return DataError(path, f"cannot be written ({error.strerror or error})")


def read_error(path: Union[str, os.PathLike[str]], error: OSError, expected: str) -> DataError:
    """Return what to raise when reading *path* failed with *error*; *expected* says what should have been there."""
    return DataError(path, f"cannot be read ({error.strerror or error}), expected {expected}")
