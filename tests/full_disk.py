"""A folder on a disk that is really full: a small tmpfs where this process may mount one, else the kernel's limit on files."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

#: Of the tmpfs, in bytes; some tens of records fit.
SIZE = 128 * 1024


class Mounted:
    """A tmpfs: what does not fit is refused with ENOSPC, after as much as fits was taken."""

    words = "No space left on device"

    def __init__(self, folder: Path) -> None:
        self._filler = folder / "filler"

    @contextlib.contextmanager
    def full(self, left: int = 0) -> Iterator[None]:
        """Leave at most *left* bytes, in whole pages; make room again in the end."""
        self._filler.write_bytes(b"x" * max(0, shutil.disk_usage(self._filler.parent).free - left))
        try:
            yield
        finally:
            self._filler.unlink()


class Limited:
    """No file of this process may grow beyond a size: what does not fit is refused with EFBIG, after as much as fits was taken.

    That holds for what pytest writes, too: nothing may be printed meanwhile, unless `capsys` takes it.
    """

    words = "File too large"

    @contextlib.contextmanager
    def full(self, left: int = 0) -> Iterator[None]:
        """Let files have *left* bytes, and grow again in the end; Python ignores the signal that says so."""
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (left, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


Disk = Mounted | Limited


@contextlib.contextmanager
def small_disk(folder: Path, *, mounted: bool) -> Iterator[Disk]:
    """Put a small disk at *folder*, which is made. What cannot be mounted is limited."""
    folder.mkdir(parents=True)
    if mounted and _mounts(folder):
        try:
            yield Mounted(folder)
        finally:
            subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=300)
        return
    yield Limited()


def _mounts(folder: Path) -> bool:
    if os.geteuid() != 0 or shutil.which("mount") is None:
        return False
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE},mode=0700", "mlhpc-test", str(folder)]
    return subprocess.run(command, capture_output=True, check=False, timeout=300).returncode == 0
