"""PAYLOAD, standard library only. Writing and reading files as the storage probe does it, with and without the page cache.

Content is random, so that nothing compresses it, and each block begins with a stamp that says whose and which it is: a
reader finds blocks that were lost, mixed up or are of an earlier repetition.
"""

from __future__ import annotations

import mmap
import os
import random
import struct
from pathlib import Path
from typing import List, Sequence

from pytest_mlhpc.node.worker.failure import WorkerFailure

#: Of a block: rank, repetition, number of the block, and a constant that no other file begins with.
_STAMP = struct.Struct("<8sQQQ")
_MAGIC = b"mlhpcblk"

STAMP_BYTES = _STAMP.size

#: Of a small file: as many of its stamp's bytes as it has.
_FLAGS_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class Blocks:
    """Files of one size made of blocks of one size, in memory that direct I/O takes (aligned to a page)."""

    def __init__(self, file_size: int, block_size: int, *, direct: bool) -> None:
        self.size = file_size
        self._count = file_size // block_size
        self._flags = getattr(os, "O_DIRECT", 0) if direct else 0
        self._out = mmap.mmap(-1, block_size)  # anonymous memory begins at a page
        self._out[:] = os.urandom(block_size)
        self._in = mmap.mmap(-1, block_size)

    def write(self, path: Path, rank: int, repetition: int) -> None:
        """Write a new file from its beginning to its end, and wait until the file system has it (fsync).

        Raises:
            OSError: it cannot be written whole.
        """
        descriptor = os.open(path, _FLAGS_NEW | self._flags, 0o600)
        try:
            for number in range(self._count):
                _STAMP.pack_into(self._out, 0, _MAGIC, rank, repetition, number)
                write_all(descriptor, self._out)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def read(self, path: Path, rank: int, repetition: int) -> None:
        """Read a file that *rank* wrote in *repetition*, from its beginning to its end, and look at each block's stamp.

        Raises:
            OSError: it cannot be read.
            WorkerFailure: ``wrong_result``, a block is not what was written.
        """
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | self._flags)
        try:
            for number in range(self._count):
                got = read_all(descriptor, self._in)
                stamp = _STAMP.unpack_from(self._in, 0)
                if got < len(self._in) or stamp != (_MAGIC, rank, repetition, number):
                    text = (
                        f"{path}: block {number} of {self._count} is not what rank {rank} wrote: {got} bytes of "
                        f"{len(self._in)}, stamp {stamp[1:]} instead of {(rank, repetition, number)}"
                    )
                    raise WorkerFailure("wrong_result", text)
        finally:
            os.close(descriptor)


def write_all(descriptor: int, data: mmap.mmap) -> None:
    """Write all of *data*; a file system may take less at a time (a signal, a full disk)."""
    view = memoryview(data)
    try:
        written = os.write(descriptor, view)
        while written < len(view):
            written += os.write(descriptor, view[written:])
    finally:
        view.release()


def read_all(descriptor: int, data: mmap.mmap) -> int:
    """Fill *data* and return how many bytes there were: fewer only at the end of the file."""
    view = memoryview(data)
    try:
        got = os.readv(descriptor, [view])
        while 0 < got < len(view):
            more = os.readv(descriptor, [view[got:]])
            if not more:
                break
            got += more
    finally:
        view.release()
    return got


class SmallFiles:
    """Many small files in one folder of each rank; content tells which of whom each is."""

    def __init__(self, count: int, size: int) -> None:
        self.names = [f"f{number:08d}" for number in range(count)]
        self.size = size
        # The same on all ranks, which look at each other's files; the stamp is what differs.
        self._filling = random.Random(0).randbytes(size)  # noqa: S311 - to be incompressible, not secret

    def content(self, rank: int, repetition: int, number: int) -> bytes:
        """Return what a file holds."""
        return (_STAMP.pack(_MAGIC, rank, repetition, number) + self._filling)[: self.size]

    def paths(self, folder: Path) -> List[str]:
        """Return the files' paths."""
        return [os.path.join(folder, name) for name in self.names]  # noqa: PTH118 - thousands of them

    def create(self, paths: Sequence[str], contents: Sequence[bytes]) -> None:
        """Create, write and close each."""
        for path, content in zip(paths, contents):
            descriptor = os.open(path, _FLAGS_NEW, 0o600)
            try:
                if os.write(descriptor, content) < len(content):
                    os.write(
                        descriptor, content
                    )  # what is short is tried again, so that the reason is raised
                    raise OSError(f"{path} was not written whole")
            finally:
                os.close(descriptor)

    def stat(self, paths: Sequence[str]) -> int:
        """Ask for the attributes of each; return the sum of their sizes."""
        return sum(os.stat(path).st_size for path in paths)  # noqa: PTH116 - a Path for each would be what is measured

    def read(self, paths: Sequence[str]) -> List[bytes]:
        """Open, read and close each."""
        found = []
        for path in paths:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                found.append(os.read(descriptor, self.size + 1))
            finally:
                os.close(descriptor)
        return found

    def unlink(self, paths: Sequence[str]) -> None:
        """Remove each."""
        for path in paths:
            os.unlink(path)  # noqa: PTH108 - as for stat
