"""Whether a data set is what its entry declares, and whether it is in the page cache. Standard library only."""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Iterable, List, Optional, Sequence, Tuple

from pytest_mlhpc.node.worker.data.dataset_files import (
    DataError,
    check_manifest,
    digest,
    list_files,
    read_error,
    read_manifest,
    total_bytes,
)

_PREFIX = "sha256:"


@dataclass(frozen=True)
class FoundFiles:
    """What lies there, and what is wrong with it."""

    files: int
    bytes: int
    sample: str
    digest: str
    problems: Tuple[str, ...]


def check_set(
    path: str,
    kind: str,
    *,
    files: Optional[int] = None,
    size: Optional[int] = None,
    sha256: Optional[str] = None,
) -> FoundFiles:
    """Compare the set at *path* with what is claimed of it; None: no claim.

    Raises:
        DataError: there is no set, or it cannot be read.
    """
    root = Path(path)
    there = list_files(root)
    if not there:
        raise DataError(root, "holds no files")
    found = digest(there[0])
    total = total_bytes(there)
    problems = []
    if files is not None and len(there) != files:
        problems.append(f"{len(there)} files, systems.yaml says {files}")
    if size is not None and total != size:
        problems.append(f"{total} bytes, systems.yaml says {size}")
    if sha256 is not None and found != sha256.lower().removeprefix(_PREFIX):
        problems.append(f"{there[0]} has SHA-256 {found}, systems.yaml says {sha256}")
    empty = next((file for file in there if file.stat().st_size == 0), None)
    if empty is not None:
        problems.append(f"{empty} is empty")
    manifest = read_manifest(root)
    if manifest is not None:
        problems += check_manifest(root, manifest)
        if manifest.kind != kind:
            problems.append(f"it is {manifest.kind} (its manifest says), systems.yaml says {kind}")
    return FoundFiles(len(there), total, there[0].relative_to(root).as_posix(), found, tuple(problems))


#: At most this share of pages may be resident for a set to be called cold; at least 1 - this for warm.
TOLERANCE = 0.01
_PROT_READ = 1
_MAP_SHARED = 1
_BLOCK = 1 << 22


def _libc() -> ctypes.CDLL:
    """Return the C library with the prototypes that keep 64-bit addresses whole."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    )  # fmt: skip
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    return libc


def resident_pages(path: Path) -> Tuple[int, int]:
    """Return (resident pages, all pages) of a file. The mapping itself touches no page.

    Raises:
        DataError: the file cannot be opened.
        OSError: the kernel refuses to tell.
    """
    libc = _libc()
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise read_error(path, error, "a sample") from None
    try:
        size = os.fstat(descriptor).st_size
        if size == 0:
            return 0, 0
        pages = -(-size // mmap.PAGESIZE)
        address = libc.mmap(None, size, _PROT_READ, _MAP_SHARED, descriptor, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), "mmap failed", str(path))
        try:
            flags = (ctypes.c_ubyte * pages)()
            if libc.mincore(address, size, flags):
                raise OSError(ctypes.get_errno(), "mincore failed", str(path))
            return sum(flag & 1 for flag in flags), pages
        finally:
            libc.munmap(address, size)
    finally:
        os.close(descriptor)


def residency(paths: Iterable[Path]) -> float:
    """Return the resident share of all pages of *paths*, 0 to 1 (0 when there are none)."""
    counts: List[Tuple[int, int]] = [resident_pages(path) for path in paths]
    total = sum(pages for _, pages in counts)
    return sum(resident for resident, _ in counts) / total if total else 0.0


def evict(paths: Iterable[Path]) -> None:
    """Ask the kernel to drop the pages of *paths*; dirty pages cannot be dropped, so they are written out first.

    Raises:
        DataError: a file cannot be opened.
        OSError: the file system cannot do it.
    """
    for path in paths:
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise read_error(path, error, "a sample") from None
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def read_through(paths: Iterable[Path]) -> None:
    """Read all of *paths* once."""
    block = bytearray(_BLOCK)
    for path in paths:
        try:
            with path.open("rb", buffering=0) as file:
                while file.readinto(block):
                    continue
        except OSError as error:
            raise read_error(path, error, "a sample") from None


def prepare(paths: Sequence[Path], wanted: str) -> str:
    """Bring *paths* into the state *wanted* ("cold", "warm", "unknown"), and return the state that was verified.

    All ranks of a node call this for the same set at about the same time, each right after it read the first file to see
    that it fits. So that file does not count: another rank may be reading it now, and will evict it a moment later.
    """
    if wanted not in ("cold", "warm") or not paths:
        return "unknown"
    judged = paths[1:] or paths
    try:
        if wanted == "cold":
            evict(paths)
            return "cold" if residency(judged) <= TOLERANCE else "unknown"
        read_through(paths)
        return "warm" if residency(judged) >= 1 - TOLERANCE else "unknown"
    except OSError:  # a kernel or a file system that does not tell: then nobody knows
        return "unknown"
