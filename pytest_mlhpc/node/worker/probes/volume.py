"""Files on a volume: a fresh folder of a rank's own with room in it, written and read with and without the page cache. Standard library only."""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import random
import re
import shutil
import socket
import struct
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from pytest_mlhpc.node.files import NO_ROOM, read_json
from pytest_mlhpc.node.worker.environment import WorkerFailure, filled

#: Names of our folders: run id and rank.
_NAME = re.compile(r"mlhpc-storage-[0-9A-Za-z_-]{1,64}-[0-9]{1,9}\Z")
_PREFIX = "mlhpc-storage-"
_MARKER = "owner.json"
_SCHEMA = 1

#: An owner that cannot be looked at is dead this long after its run's time limit, in seconds: an hour for a job script to
#: end, and for clocks.
MARGIN_S = 3600.0

#: Most entries of the volume's folder that are looked at for leftovers: a scratch folder may hold millions.
_MOST_ENTRIES = 10_000

#: Share of the room that a run needs which must be free besides: a file system needs blocks of its own.
_SPARE = 0.05


def volume_error(path: Path, error: OSError, doing: str) -> WorkerFailure:
    """Return what to raise when *doing* something in *path* failed."""
    where = f"{path} on {socket.gethostname()}"
    if error.errno in NO_ROOM:
        what = "the quota is used up" if error.errno == errno.EDQUOT else error.strerror
        text = f"{doing} in {where}: {what}; free space, raise the quota or limit, or use smaller files"
        return WorkerFailure("disk_full", text)
    hint = {
        errno.EROFS: "it is mounted read-only: name a path that may be written to",
        errno.EACCES: "this user may not write there: name another path, or change its permissions",
        errno.EPERM: "this user may not write there: name another path, or change its permissions",
        errno.ENOENT: "there is no such folder: make it, or mount the volume on this node",
        errno.ENOTDIR: "it is no folder: name one",
        errno.EINVAL: "the file system does not take it; with io='direct', use io='buffered'",
        errno.ESTALE: "the file server has forgotten it: mount the volume again",
    }.get(error.errno or 0, "look at the volume")
    return WorkerFailure("volume_unusable", f"{doing} in {where}: {error.strerror or error}; {hint}")


def resolve(path: str, directory: Path, environ: Mapping[str, str]) -> Path:
    """Return the folder that *path* names on this node; the run's own (below *directory*) for an empty one.

    What lies in the run's own is removed by the controller too, should this process be killed.

    Raises:
        WorkerFailure: ``volume_unusable``, a variable is not set, or it is not an absolute path.
    """
    if not path:
        own = directory / "data"
        with contextlib.suppress(OSError):  # reported by what follows
            own.mkdir(exist_ok=True)
        return own
    try:
        found = filled(path, environ)
    except ValueError as error:
        raise WorkerFailure("volume_unusable", f"path={path!r}: {error}") from None
    if not found.is_absolute():
        here = socket.gethostname()
        raise WorkerFailure("volume_unusable", f"path={path!r} is not absolute on {here}: {str(found)!r}")
    return found


@contextlib.contextmanager
def own_folder(volume: Path, run_id: str, rank: int, limit_s: float) -> Iterator[Path]:
    """Make a fresh folder on *volume*, and remove it with all that is in it when the block ends.

    Raises:
        WorkerFailure: ``volume_unusable`` or ``disk_full``, it cannot be made, or at the end not be removed.
    """
    folder = volume / f"{_PREFIX}{run_id}-{rank}"
    try:
        folder.mkdir()
    except OSError as error:
        raise volume_error(volume, error, "making a folder") from error
    try:
        try:
            (folder / _MARKER).write_text(json.dumps(marker(run_id, rank, limit_s)), encoding="utf-8")
        except OSError as error:
            raise volume_error(volume, error, "writing a file") from error
        yield folder
    finally:
        _remove(folder, failing=sys.exc_info()[0] is not None)


def _remove(folder: Path, *, failing: bool) -> None:
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        text = f"{error.filename or folder} cannot be removed: {error.strerror}; please remove {folder}"
        if not failing:  # else the first failure is what counts
            raise WorkerFailure("volume_unusable", text) from error
        sys.stderr.write(f"{text}\n")


def marker(run_id: str, rank: int, limit_s: float) -> Dict[str, Any]:
    """Return what a probe writes into its folder on a volume: whose it is, and when others may remove it."""
    return {"schema": _SCHEMA, "run": run_id, "rank": rank, "limit_s": limit_s, **_identity(os.getpid())}


def remove_leftovers(volume: Path, mine: Path) -> int:
    """Remove folders of ours in *volume* whose run is surely over, and return how many; *mine* is a new one.

    Nothing is removed that is not a folder of this user with our name and marker. What cannot be looked at or removed
    stays.
    """
    removed = 0
    try:
        now = (mine / _MARKER).stat().st_mtime  # by the file server's clock, as those of the others
        with os.scandir(volume) as entries:
            for number, entry in enumerate(entries):
                if number >= _MOST_ENTRIES:
                    break
                if _NAME.match(entry.name) and entry.name != mine.name:
                    removed += _remove_leftover(entry, now)
    except OSError:
        return removed
    return removed


def _remove_leftover(entry: os.DirEntry[str], now: float) -> int:
    try:
        status = entry.stat(follow_symlinks=False)
        if not entry.is_dir(follow_symlinks=False) or status.st_uid != os.geteuid():
            return 0
        path = Path(entry.path)
        found, written = _read_marker(path / _MARKER)
        if found is None:
            # Killed before it could write its marker: empty, or else not ours.
            if now - status.st_mtime > MARGIN_S:
                path.rmdir()
                return 1
            return 0
        if _dead(found) or now - written > float(found["limit_s"]) + MARGIN_S:
            shutil.rmtree(path)
            return 1
    except (OSError, ValueError, TypeError, KeyError):
        return 0
    return 0


def _read_marker(path: Path) -> Tuple[Optional[Dict[str, Any]], float]:
    """Return a marker and when it was written; None where there is none.

    Raises:
        ValueError: it is none of ours.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None, 0.0
    with os.fdopen(descriptor, "rb") as file:
        written = os.fstat(file.fileno()).st_mtime
        text = file.read(4096)
    if not text:
        return None, written
    found = read_json(text)
    if not isinstance(found, dict) or found.get("schema") != _SCHEMA:
        raise ValueError(f"{path} is no marker of this version")
    return found, written


def _dead(found: Mapping[str, Any]) -> bool:
    """Whether the owner is known to be dead: it was a process that we would see if it lived."""
    here = _identity(int(found["pid"]))
    if not here["boot"] or not here["namespace"]:
        return False
    visible = all(here[name] == found[name] for name in ("host", "boot", "namespace"))
    return visible and here["started"] != found["started"]


def _identity(pid: int) -> Dict[str, Any]:
    """Return what tells a process from every other: node, boot, PID namespace, number, and when it started (empty: gone)."""
    return {
        "host": socket.gethostname(),
        "boot": _read(Path("/proc/sys/kernel/random/boot_id")),
        "namespace": _namespace(),
        "pid": pid,
        "started": _started(pid),
    }


def _started(pid: int) -> str:
    """Return field 22 of /proc/PID/stat (proc(5)), the start in ticks since boot; the name before may hold brackets."""
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 else ""


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - the text of the link, which is no path
    except OSError:
        return ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def require_room(folder: Path, wanted: int, files: int) -> None:
    """Refuse to start where *wanted* bytes in *files* files have no room.

    Raises:
        WorkerFailure: ``disk_full``, names what is free and what is needed.
    """
    try:
        free = os.statvfs(folder)
    except OSError as error:
        raise volume_error(folder, error, "asking for free space") from error
    room = free.f_bavail * free.f_frsize
    if wanted * (1.0 + _SPARE) > room:
        text = (
            f"{folder.parent} on {socket.gethostname()} has {room / 1e9:.3g} GB free for this user, the run needs "
            f"{wanted / 1e9:.3g} GB and {_SPARE:.0%} besides: free space, or use smaller or fewer files"
        )
        raise WorkerFailure("disk_full", text)
    if free.f_files and files > free.f_favail:  # some file systems do not count files
        text = (
            f"{folder.parent} on {socket.gethostname()} has room for {free.f_favail} more files, the run needs {files}: "
            "remove files, or use fewer"
        )
        raise WorkerFailure("disk_full", text)


def describe(folder: Path) -> Mapping[str, str]:
    """Return type and source of the file system that *folder* lies on, from the mount table; empty where it does not tell."""
    try:
        device = folder.stat().st_dev
        table = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    return parse_mounts(table, f"{os.major(device)}:{os.minor(device)}", str(folder))


def parse_mounts(table: str, device: str, folder: str) -> Mapping[str, str]:
    """Return ``filesystem`` and ``mount_source`` of *folder* from the text of /proc/PID/mountinfo (proc(5)).

    The mount is that with the longest mount point above the folder, of those with its device number if there are any (btrfs
    and overlays give files other numbers).
    """
    found = []
    for line in table.splitlines():
        left, _, right = line.partition(" - ")
        fields, tail = left.split(" "), right.split(" ")
        if len(fields) < 5 or len(tail) < 2:
            continue
        point = fields[4].replace("\\040", " ")
        if folder == point or folder.startswith(point.rstrip("/") + "/"):
            found.append((fields[2] == device, len(point), tail[0], tail[1]))
    if not found:
        return {}
    _, _, kind, source = max(found)
    return {"filesystem": kind, "mount_source": source}


#: Of a block: rank, repetition, number of the block, and a constant that no other file begins with.
_STAMP = struct.Struct("<8sQQQ")
_MAGIC = b"mlhpcblk"


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
