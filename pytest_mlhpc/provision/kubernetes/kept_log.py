"""The text of one container's log in a file of ours, up to a size."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO


class KeptLog:
    """A file that is made when the first line comes. ``trouble``: why the rest is not kept, empty if nothing is wrong.

    Args:
        path: the file; an older one is overwritten, as a log is always read from its beginning. None: keep nothing.
        cap: its most bytes; what comes later is only counted.
    """

    def __init__(self, path: Path | None, cap: int) -> None:
        self.trouble = ""
        self._path = path
        self._cap = cap
        self._size = 0
        self._dropped = 0
        self._file: BinaryIO | None = None

    def write(self, line: bytes) -> None:
        """Add one line; at once in the file, for whoever looks into it."""
        if self._path is None:
            return
        if self._dropped or self.trouble or self._size + len(line) + 1 > self._cap:
            self._dropped += len(line) + 1
            return
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(
                    self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
                )
                self._file = os.fdopen(descriptor, "wb")
            self._file.write(line + b"\n")
            self._file.flush()
            self._size += len(line) + 1
        except OSError as error:
            self.trouble = f"{self._path} cannot be written: {error.strerror}"

    def close(self) -> None:
        """Say in the file what is missing, and close it."""
        if self._file is None:
            return
        file, self._file = self._file, None
        try:
            if self._dropped:
                file.write(b"[%d bytes more were not kept]\n" % self._dropped)
            file.close()
        except OSError as error:
            self.trouble = self.trouble or f"{self._path} cannot be written: {error.strerror}"
