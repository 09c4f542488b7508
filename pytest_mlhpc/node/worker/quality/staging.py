"""Staging: samples, or archives of them, on their way to node-local storage, and which node a rank is on."""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import io
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Callable, Iterator, List, Mapping, Sequence, Tuple, TypeVar

import torch.distributed as dist

from pytest_mlhpc.node.worker.data.dataset_files import (
    MANIFEST,
    DataError,
    building,
    list_files,
    read_error,
    write_error,
)
from pytest_mlhpc.node.worker.distributed import Group
from pytest_mlhpc.node.worker.environment import filled


@dataclass(frozen=True)
class RankNode:
    """This rank's node: its number among all, and this rank's place among those on it."""

    number: int = 0
    count: int = 1
    place: int = 0
    ranks: int = 1

    @property
    def leads(self) -> bool:
        """Whether this rank does what is to be done once on each node."""
        return self.place == 0


def gathered(group: Group, value: Any) -> List[Any]:
    """Return what every rank says, in the order of ranks. All ranks must call it; it waits for all."""
    if group.world == 1:
        return [value]
    values: List[Any] = [None] * group.world
    dist.all_gather_object(values, value)
    return values


def find_node(group: Group, environ: Mapping[str, str]) -> RankNode:
    """Ask all ranks for their host (and torchrun's GROUP_RANK, by which several agents may share one) and count."""
    hosts = gathered(group, f"{socket.gethostname()} {environ.get('GROUP_RANK', '')}")
    names = list(dict.fromkeys(hosts))
    mine = [rank for rank, host in enumerate(hosts) if host == hosts[group.rank]]
    return RankNode(names.index(hosts[group.rank]), len(names), mine.index(group.rank), len(mine))


PREFIX = "mlhpc-staged-"
#: Seconds after which a folder that nobody holds is taken for what a killed run left: one being made is younger.
STALE_S = 60.0
_BLOCK = 4 << 20

#: Waits for the end of its standard input, and removes the folder. SIGTERM is what ends the processes around it.
_REMOVER = """
import os, shutil, signal, sys
for name in ("SIGTERM", "SIGINT", "SIGHUP"):
    signal.signal(getattr(signal, name), signal.SIG_IGN)
while os.read(0, 4096):
    pass
shutil.rmtree(sys.argv[1], ignore_errors=True)
"""

T = TypeVar("T")


def base_of(path: str, environ: Mapping[str, str]) -> Path:
    """Return the folder of node-local storage that *path* names on this node; ``$TMPDIR`` is the system's where it is unset.

    Raises:
        DataError: it is no folder here, or has a variable that is not set.
    """
    try:
        base = filled(path, {"TMPDIR": tempfile.gettempdir(), **environ})
    except ValueError as error:
        raise DataError(path, f"staging_path: {error}") from None
    if not base.is_dir():
        text = "is no folder of this node: staging_path must name node-local storage, which every node has"
        raise DataError(base, text)
    return base


def folder_of(base: Path, run_id: str, node: RankNode) -> Path:
    """Return the run's folder for *node* below *base*."""
    return base / f"{PREFIX}{run_id}-{node.number}"


@contextlib.contextmanager
def staging_folder(folder: Path) -> Iterator[Path]:
    """Make *folder* and remove it at the end, also where this process is killed in between. One rank of a node does this.

    Raises:
        DataError: it cannot be made.
    """
    _sweep(folder.parent)
    try:
        folder.mkdir(mode=0o700)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise write_error(folder, error) from None
    with contextlib.suppress(OSError):  # no locks on this file system: then nobody sweeps
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    remover = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _REMOVER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )
    try:
        yield folder
    finally:
        remover.communicate()  # the end of its input is its sign
        os.close(lock)


def _sweep(base: Path) -> None:
    """Remove folders of killed runs of this user. Whoever lives holds a lock on its own."""
    for folder in base.glob(f"{PREFIX}*"):
        try:
            status = folder.stat()
            if status.st_uid != os.geteuid() or time.time() - status.st_mtime < STALE_S:
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            continue  # somebody else was faster
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        else:
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def each(work: Callable[[T], int], items: Sequence[T], workers: int) -> int:
    """Do *work* on all *items*, *workers* at a time, and return the sum of what it says; the first failure stops the rest."""
    total = 0
    with ThreadPoolExecutor(max(1, workers)) as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            for future in futures:
                total += future.result()
        finally:
            pool.shutdown(cancel_futures=True)
    return total


def copy(pair: Tuple[Path, Path]) -> int:
    """Copy one file, and return its bytes.

    Raises:
        DataError: it is missing, empty, becomes shorter meanwhile, or there is no room for it.
    """
    source, target = pair
    try:
        with source.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            found = _poured(file, target)
    except OSError as error:
        raise read_error(source, error, "a sample to stage") from None
    if not found:
        raise DataError(source, "is empty, expected a sample to stage")
    if found != size:
        raise DataError(
            source, f"had {size} bytes when it was opened, {found} could be read: it is being changed"
        )
    return found


def _poured(file: io.FileIO, target: Path) -> int:
    block = bytearray(_BLOCK)
    total = 0
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        out = target.open("wb", buffering=0)
    except OSError as error:
        raise write_error(target, error) from None
    with out:
        while True:
            count = file.readinto(block)
            if not count:
                return total
            total += count
            view = memoryview(block)[:count]
            try:
                while view:
                    view = view[out.write(view) :]
            except OSError as error:
                raise write_error(target, error) from None


SUFFIXES = (".tar.gz", ".tgz", ".tar")
#: Archives that a set made for a run is packed into: several for each rank that unpacks, of the few that such runs have.
PARTS = 16
_ARCHIVE_BLOCK = 1 << 20
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
            tail = b"".join(iter(lambda: file.read(_ARCHIVE_BLOCK), b""))
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
    for block in iter(lambda: content.read(_ARCHIVE_BLOCK), b""):
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
