"""The spool: points on their way to InfluxDB, in files that survive whatever happens to writer, reader and server.

::

    STATE/influx/open/NAME       a living writer's own; appended to and synced, a record at a time
                 ready/NAME      its writer has ended; removed when all of it was sent
                 sent/NAME       how many bytes of either were sent
                 rejected/...    lines that the server refused, with its reason; `mlhpc records push --retry-rejected` takes them back

NAME is time, host, process and chance, so that no two writers share a file and nothing needs a lock, whatever the file system.

A *frame* is the lines of one record and then ``#N CRC``: N bytes with this checksum. What is torn by a full disk or a death
has no such end and is never sent: half a line could be a whole one with another figure. Frames of open files are sent too, so
that nobody has to find out whether the writer on another machine still lives. Sending twice is harmless (see ``schema.py``),
so that the rest follows: whoever sends notes how far it got *afterwards*.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_mlhpc.errors import StoreError
from pytest_mlhpc.store.files import is_shared, make_directories

#: A file of another machine that nobody wrote to for so long has no writer any more (no session lasts that long).
ABANDONED_S = 14 * 86400.0
#: A longer frame is damage: a record has some dozens of lines, and a node's name is in three of them.
MAX_FRAME_BYTES = 64 << 20
_END = re.compile(rb"#([0-9]{1,9}) ([0-9a-f]{8})\n")
_NAME = re.compile(
    r"[0-9]{1,20}-(?P<host>[A-Za-z0-9._]{0,64})-(?P<pid>[0-9]+)-(?P<start>[0-9]+)-[0-9a-f]{8}\.lp\Z"
)


def spool_of(state_dir: Path) -> Path:
    """Return the folder of the spool."""
    return state_dir / "influx"


class Writer:
    """Appends records' lines to a file of this process. Not for several threads at once."""

    def __init__(self, state_dir: Path) -> None:
        """Name the state directory; nothing is made before there is something to write."""
        self._state_dir = state_dir
        self._descriptor: int | None = None
        self.path: Path | None = None  #: of the file that is open

    def add(self, lines: Sequence[str]) -> None:
        """Store the lines of one record durably: one write, then fsync.

        Raises:
            StoreError: disk full, over quota, not writable; names the path. What was half written is never sent.
        """
        data = frame(lines)
        for _ in range(3):
            try:
                if self._append(data):
                    return
            except OSError as error:
                path = self.path or spool_of(self._state_dir)
                self._give_up_file()
                raise StoreError(f"{path}: points for InfluxDB cannot be stored: {error.strerror}") from error
            self._give_up_file()  # somebody took us for dead: the same again, elsewhere
        raise StoreError(f"{spool_of(self._state_dir)}: another process removes files while they are written")

    def close(self) -> None:
        """Say that no more will come: the file moves to ``ready``. Idempotent; what cannot be moved is sent all the same."""
        path, descriptor = self.path, self._descriptor
        self.path = self._descriptor = None
        if descriptor is None or path is None:
            return
        os.close(descriptor)
        with contextlib.suppress(OSError):
            path.rename(path.parents[1] / "ready" / path.name)

    def _append(self, data: bytes) -> bool:
        """Write a frame; return whether its file still has its place afterwards.

        Whoever adopts a file moves it before reading it to its end, and only removes what it then read: if the file was
        not moved until now, this frame will be seen.
        """
        descriptor = self._open()
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
        return self._has_its_place(descriptor)

    def _has_its_place(self, descriptor: int) -> bool:
        try:
            return self.path is not None and os.path.samestat(self.path.stat(), os.fstat(descriptor))
        except FileNotFoundError:
            return False

    def _open(self) -> int:
        if self._descriptor is None:
            folders = make_folders(self._state_dir)
            path = folders / "open" / new_name()
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            self._descriptor = os.open(path, flags, 0o664 if is_shared(self._state_dir) else 0o600)
            self.path = path
            sync_folder(path.parent)
        return self._descriptor

    def _give_up_file(self) -> None:
        """Go on in another file: behind something torn nothing may follow."""
        with contextlib.suppress(OSError):
            self.close()


def frame(lines: Sequence[str]) -> bytes:
    """Return lines as one frame."""
    data = "".join(f"{line}\n" for line in lines).encode("utf-8", "replace")
    return data + b"#%d %08x\n" % (len(data), zlib.crc32(data))


def make_folders(state_dir: Path) -> Path:
    """Make the folders of the spool; return its own.

    Raises:
        OSError: they cannot be made.
    """
    spool = spool_of(state_dir)
    for name in ("open", "ready", "sent", "rejected"):
        make_directories(spool / name, state_dir)
    return spool


def new_name(now_ns: int | None = None) -> str:
    """Return a name that no other file of any process has."""
    host = re.sub(r"[^A-Za-z0-9._]", "_", os.uname().nodename)[:64]
    when = time.time_ns() if now_ns is None else now_ns
    return f"{when}-{host}-{os.getpid()}-{_start_of(os.getpid())}-{secrets.token_hex(4)}.lp"


def sync_folder(folder: Path) -> None:
    """Make names in a folder durable, where the file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# --- reading


@dataclass(frozen=True)
class Frame:
    """Lines of one record, where they end in their file, and whether they are what was written."""

    lines: bytes
    end: int
    whole: bool = True


def frames(path: Path, start: int = 0) -> Iterator[Frame]:
    """Yield the frames of a file from byte *start* on, which is the end of one. What is torn at the end is left out.

    Damage in the middle (a bad disk) is yielded as a frame that is not ``whole``, up to the next end that can be found.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        file.seek(start)
        lines: list[bytes] = []
        size = 0
        while line := file.readline(MAX_FRAME_BYTES):
            if not line.startswith(b"#") or not (end := _END.fullmatch(line)):
                lines.append(line)
                size += len(line)
                if size > MAX_FRAME_BYTES:
                    yield Frame(b"", start + size, whole=False)
                    start, size, lines = start + size, 0, []
                continue
            data = b"".join(lines)
            start += len(data) + len(line)
            whole = len(data) == int(end[1]) and zlib.crc32(data) == int(end[2], 16)
            yield Frame(data, start, whole)
            lines, size = [], 0


def waiting(spool: Path) -> list[Path]:
    """Return the files that may hold something to send, oldest first. One that moves meanwhile is found at least once.

    Raises:
        OSError: a folder cannot be listed.
    """
    found: dict[str, Path] = {}
    for folder in ("open", "ready"):  # in the direction in which they move
        if (spool / folder).is_dir():
            found |= {entry.name: entry for entry in (spool / folder).iterdir() if _NAME.match(entry.name)}
    return [found[name] for name in sorted(found, key=lambda name: (int(name.partition("-")[0]), name))]


def adopt(spool: Path) -> list[str]:
    """Move the files of dead writers to ``ready``; return their names.

    On this machine a writer is known by process and start time; another machine's file is left alone until nobody has
    written to it for :data:`ABANDONED_S`. Were a writer alive all the same, it would lose nothing (:meth:`Writer.add`).
    """
    moved = []
    folder = spool / "open"
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        found = _NAME.match(path.name)
        if found is None or not _is_dead(path, found):
            continue
        with contextlib.suppress(OSError):  # somebody else adopted it
            path.rename(spool / "ready" / path.name)
            moved.append(path.name)
    return moved


def _is_dead(path: Path, name: re.Match[str]) -> bool:
    if name["host"] == re.sub(r"[^A-Za-z0-9._]", "_", os.uname().nodename)[:64]:
        return _start_of(int(name["pid"])) != int(name["start"])
    try:
        return time.time() - path.stat().st_mtime > ABANDONED_S
    except OSError:
        return False


def _start_of(pid: int) -> int:
    """Return when a process started, in ticks since the machine did; -1 if there is none (a zombie writes no more)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        fields = text.rpartition(")")[2].split()
        return -1 if fields[0] in {"Z", "X"} else int(fields[19])
    except (OSError, IndexError, ValueError):
        return -1


# --- how far it was sent


def sent(spool: Path, name: str) -> int:
    """Return how many bytes of a file were sent; 0 where nobody knows."""
    try:
        return int((spool / "sent" / name).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


def note_sent(spool: Path, name: str, count: int) -> None:
    """Note how many bytes of a file were sent, all at once or not at all.

    Raises:
        OSError: it cannot be noted; the same will be sent again, which is harmless.
    """
    replace_file(spool / "sent" / name, str(count).encode("ascii"))


def replace_file(path: Path, content: bytes) -> None:
    """Write a file so that there is always the old one or the new one, durably.

    Raises:
        OSError: it cannot be written; nothing is left.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def remove_sent(spool: Path, name: str) -> None:
    """Forget a file that was read in ``ready`` to its end and sent, then the note how far it was sent."""
    with contextlib.suppress(OSError):
        (spool / "ready" / name).unlink(missing_ok=True)
        (spool / "sent" / name).unlink(missing_ok=True)


def forget_marks(spool: Path) -> None:
    """Remove notes about files that are gone: a sender was killed between the two steps of :func:`remove_sent`."""
    folder = spool / "sent"
    marks = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    left = {path.name for path in waiting(spool)}
    for name in marks:
        if name not in left and (_NAME.match(name) or name.startswith(".")):
            with contextlib.suppress(OSError):
                (folder / name).unlink(missing_ok=True)
