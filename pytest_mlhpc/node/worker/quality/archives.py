"""PAYLOAD, standard library only. Sets as archives: few large compressed files instead of many small ones.

An archive holds samples under the paths that they have in the set (``train/x.tfrecord``); each sample lies in one archive.
"""

from __future__ import annotations

import gzip
import os
import shutil
import tarfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import List, Sequence

from pytest_mlhpc.node.worker.data.errors import DataError, read_error, write_error
from pytest_mlhpc.node.worker.data.files import MANIFEST, building, list_files

SUFFIXES = (".tar.gz", ".tgz", ".tar")
#: Archives that a set made for a run is packed into: several for each rank that unpacks, of the few that such runs have.
PARTS = 16
_BLOCK = 1 << 20
#: Bytes of zeros that end a tar file: a block (pax, POSIX.1-2017; it asks for two, which not all programs write).
_END = 512


def is_archive(path: Path) -> bool:
    """Return whether *path* is named as an archive."""
    return path.name.lower().endswith(SUFFIXES)


def pack(root: Path, target: Path, parts: int = PARTS) -> Path:
    """Pack the set at *root* into *parts* archives below *target*, whole or not at all, unless it was done; return *target*.

    Raises:
        DataError: no room, no permission, or *target* holds something else.
    """
    with building(target) as folder:
        if folder is None:
            return target
        files = list_files(root)
        with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as pool:
            chosen = [files[part::parts] for part in range(min(parts, len(files)))]
            names = [folder / f"part-{part:05d}.tar.gz" for part in range(len(chosen))]
            list(pool.map(lambda pair: _pack_one(root, *pair), zip(names, chosen)))
        shutil.copyfile(root / MANIFEST, folder / MANIFEST)
    return target


def _pack_one(root: Path, archive: Path, files: Sequence[Path]) -> None:
    try:
        with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
            for file in files:
                tar.add(file, arcname=file.relative_to(root).as_posix(), recursive=False)
    except OSError as error:
        raise write_error(archive, error) from None


def unpack(archive: Path, folder: Path) -> int:
    """Write the files of *archive* below *folder*, reading it once from its beginning; return the bytes of the archive.

    Raises:
        DataError: it is missing, damaged, or holds a path that leads out of it; or there is no room.
    """
    try:
        size = archive.stat().st_size
        # gzip's own reader, as tarfile's passes over a wrong checksum
        packed = archive.name.lower().endswith("gz")
        with gzip.open(archive) if packed else archive.open("rb") as file:
            with tarfile.open(fileobj=file, mode="r|") as tar:
                for member in tar:
                    if member.isfile():
                        _extract(tar, member, archive, folder)
            if not packed:
                file.seek(-min(size, _END), os.SEEK_END)
            tail = b"".join(iter(lambda: file.read(_BLOCK), b""))
        if not packed and tail.strip(b"\0"):
            raise tarfile.ReadError("its end is missing")
    except (tarfile.TarError, EOFError, zlib.error) as error:
        text = f"is damaged or cut off ({error}): copy it to the source again"
        raise DataError(archive, text) from None
    except OSError as error:  # gzip's own errors (of its format) are of this type too
        raise read_error(archive, error, "an archive of samples") from None
    return size


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, archive: Path, folder: Path) -> None:
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts:
        raise DataError(
            archive, f"holds {member.name!r}, which leads out of the folder that it is unpacked in: refused"
        )
    content = tar.extractfile(member)
    if content is None:
        return
    target = folder / path
    # Reading may fail as writing may: what is read lies in memory before anything is written of it.
    _written(target, b"", "wb")
    for block in iter(lambda: content.read(_BLOCK), b""):
        _written(target, block, "ab")


def _written(target: Path, block: bytes, mode: str) -> None:
    try:
        if mode == "wb":
            target.parent.mkdir(parents=True, exist_ok=True)
        with target.open(mode) as file:
            file.write(block)
    except OSError as error:
        raise write_error(target, error) from None


def of_node(files: Sequence[Path], number: int, count: int, *, share: bool) -> List[Path]:
    """Return the archives that node *number* of *count* unpacks: all, or its share."""
    found = [file for file in files if is_archive(file)]
    return found[number::count] if share else found
