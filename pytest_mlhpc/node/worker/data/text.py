"""Text, byte by byte: all files below a path, one after the other, cut into windows of context + 1 tokens.

The default is the source code of the running interpreter's standard library: real text that is on every machine.
"""

from __future__ import annotations

import bisect
import itertools
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import List, Optional, Tuple

from pytest_mlhpc.node.worker.data.files import DataError, list_files, read_error

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


def corpus(path: Optional[Path]) -> Corpus:
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
