"""PAYLOAD. Samples on their way to node-local storage: many at a time, and nothing is left there whatever happens.

The folder on a node belongs to the run. A small process of its own waits for the end of the rank that made it, however that
ends, and then removes it. Should that process be killed as well, the next run that stages there removes what is left.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Callable, Iterator, Mapping, Sequence, Tuple, TypeVar

from pytest_mlhpc.node.worker.data.errors import DataError, read_error, write_error
from pytest_mlhpc.node.worker.named_paths import filled
from pytest_mlhpc.node.worker.quality.place import Node

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


def folder_of(base: Path, run_id: str, node: Node) -> Path:
    """Return the run's folder for *node* below *base*."""
    return base / f"{PREFIX}{run_id}-{node.number}"


@contextlib.contextmanager
def held(folder: Path) -> Iterator[Path]:
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
