"""No torch. Writing a checkpoint as training does: a large file, synced, and read back.

``path`` is the folder, ``size`` that of the real checkpoint in bytes: there must be room for it, but at most 4 GiB are written. The file
loses its name before its first byte is written, so that no death of this process
leaves it behind; what was read is compared with what was written. It is read after the page cache was asked to forget it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import time
from typing import Iterator, List, Optional, Tuple

from pytest_mlhpc.node.vet.check import Examination
from pytest_mlhpc.node.vet.finding import Origin, Severity
from pytest_mlhpc.node.vet.load.arguments import Arguments, Begun

#: Bytes by level, unless the order says how many.
QUICK_BYTES, DEEP_BYTES = 64 << 20, 1 << 30

#: Most bytes that are written: enough to outlast what storage servers hold in memory for one client.
MOST_WRITTEN = 4 << 30

#: One write; files are whole blocks.
BLOCK = 8 << 20

MOST_BYTES = 1 << 60

#: Errors that are the user's to mend, and what to do.
_USER = {
    errno.ENOSPC: "free space there, or name another path",
    errno.EDQUOT: "your quota is used up: free space, or name another path",
    errno.EACCES: "you may not write there: name another path",
    errno.EPERM: "you may not write there: name another path",
    errno.ENOENT: "there is no such folder on this node: create it, or name another path",
    errno.ENOTDIR: "it is no folder: name another path",
    errno.EROFS: "it is mounted read-only: name another path",
    errno.EFBIG: "files may not be so large: see ulimit -f",
}


def run(_node: object, arguments: Arguments, begun: Begun, exam: Examination) -> None:
    """Write, sync, read back, compare. What goes wrong with the folder is a finding, and no error of the order."""
    path = arguments.text("path", "")
    if not path:
        exam.info(
            "no folder for checkpoints was named: writing them was not measured", rule="checkpoint.path"
        )
        return
    size = arguments.whole("size", QUICK_BYTES if arguments.level == "quick" else DEEP_BYTES, 1, MOST_BYTES)
    blocks = max(1, -(-min(size, MOST_WRITTEN) // BLOCK))
    begun(f"checkpoint below {path}")
    try:
        require_room(path, max(size, blocks * BLOCK))
        write_s, read_s, same = write_and_read(path, blocks)
    except OSError as error:
        advice = _USER.get(error.errno or 0)
        text = f"a checkpoint cannot be written below {path}: {os.strerror(error.errno or 0)}; "
        if advice:
            exam.add(Severity.CRITICAL, text + advice, rule="checkpoint.path", origin=Origin.USER)
        else:
            exam.add(Severity.CRITICAL, f"{text}look at the node's mounts", rule="checkpoint.storage")
        return
    if not same:
        text = f"a file of {blocks * BLOCK >> 20} MiB below {path} does not read back as it was written: the storage corrupts data"
        exam.add(Severity.CRITICAL, text, rule="checkpoint.content")
    for what, seconds in (("write", write_s), ("read", read_s)):
        key, rate = f"checkpoint/{what}/{blocks * BLOCK >> 20}MiB", blocks * BLOCK / max(seconds, 1e-9)
        exam.reading(f"checkpoint_{what}", key, "storage", rate, round=arguments.round)


def require_room(path: str, size: int) -> None:
    """Raise OSError ENOSPC, before anything is written, where the file system says that there is too little room."""
    found = os.statvfs(path)
    if found.f_blocks > 0 and found.f_bavail * found.f_frsize < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


@contextlib.contextmanager
def nameless(path: str) -> Iterator[int]:
    """Open a new file for writing and reading that nobody else finds.

    Some file systems want it to keep its name: then it has one, until the end of the block.
    """
    name = os.path.join(path, f".mlhpc-vet-{os.getpid()}-{os.urandom(6).hex()}")  # noqa: PTH118 - it is text from an order
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
    descriptor = os.open(name, flags, 0o600)
    named: Optional[str] = name
    try:
        try:
            os.unlink(name)  # noqa: PTH108 - as above
            named = None
            os.pwrite(descriptor, b"\0", 0)  # a file system that does not keep what has no name says so here
        except OSError as error:
            if named is None and error.errno not in (errno.ENOENT, errno.ESTALE, errno.EBADF):
                raise
            if named is None:
                os.close(descriptor)
                descriptor, named = os.open(name, flags, 0o600), name
        yield descriptor
    finally:
        os.close(descriptor)
        if named is not None:
            os.unlink(named)  # noqa: PTH108 - as above


def write_and_read(path: str, blocks: int) -> Tuple[float, float, bool]:
    """Return the seconds of writing (with sync) and of reading, and whether the content was the same.

    Raises:
        OSError: the file system refuses something.
    """
    content = os.urandom(BLOCK)  # nothing compresses it, on any layer
    with nameless(path) as descriptor:
        began = time.perf_counter()
        for number in range(blocks):
            _write_all(descriptor, stamped(content, number), number * BLOCK)
        os.fsync(descriptor)
        write_s = time.perf_counter() - began
        with contextlib.suppress(OSError, AttributeError):  # a wish, and not on every file system
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        digests: List[bytes] = []
        began = time.perf_counter()
        hashing = 0.0
        for number in range(blocks):
            data = _read_all(descriptor, number * BLOCK)
            paused = time.perf_counter()
            digests.append(hashlib.blake2b(data).digest())
            hashing += time.perf_counter() - paused
        read_s = time.perf_counter() - began - hashing
    same = all(
        found == hashlib.blake2b(stamped(content, number)).digest() for number, found in enumerate(digests)
    )
    return write_s, read_s, same


def stamped(content: bytes, number: int) -> bytes:
    """Return a block that says which it is: one that lies in another's place is found."""
    return number.to_bytes(8, "little") + content[8:]


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def _read_all(descriptor: int, offset: int) -> bytes:
    parts: List[bytes] = []
    wanted = BLOCK
    while wanted:
        part = os.pread(descriptor, wanted, offset)
        if not part:
            break
        parts.append(part)
        wanted, offset = wanted - len(part), offset + len(part)
    return b"".join(parts)
