"""What a batch writes: worker lines to the controller or to a shared folder, logs of ranks, and requests in a file."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Protocol, Sequence, Tuple

from pytest_mlhpc.node.batch.ranks import ERRORS, ERRORS_RANKS, LAUNCHER, OUTPUT_RANKS, PODRUN, RankBook
from pytest_mlhpc.node.files import NO_ROOM, open_private, read_json, unwritten
from pytest_mlhpc.node.processes import ERRORS_CAP, CappedLog, say
from pytest_mlhpc.node.protocol.lines import Message, encode
from pytest_mlhpc.node.protocol.plan import RunPlan

#: Version of ``.up`` and ``.over``.
SCHEMA = 1

#: Time between two signs of life, in seconds.
BEAT_S = 5.0

#: What file systems without hard links answer to link(2), and those that cannot fsync(2) to that.
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
_NO_FSYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})


class AlreadyStarted(Exception):  # noqa: N818 - named for what happened
    """A batch of this allocation has already said that it runs; nothing was written."""


class LinesFolder:
    """The three files of one allocation.

    Args:
        folder: made by the controller, visible to it and to this node.
        allocation_id: first part of the files' names.

    Raises:
        OSError: a file cannot be written; ``filename`` says which.
    """

    def __init__(self, folder: Path, allocation_id: str) -> None:
        if Path(allocation_id).name != allocation_id or allocation_id in ("", ".", ".."):
            raise ValueError(f"the allocation id {allocation_id!r} is no name of a file")
        self._folder = folder
        self._id = allocation_id
        self._stop = threading.Event()
        self._descriptor: Optional[int] = None
        self._ours = False  #: we said that the batch runs

    @property
    def holder(self) -> Optional[str]:
        """The id of the job whose batch has said that it runs, empty if it does not say so; None: no such file is visible."""
        try:
            found = read_json((self._folder / f"{self._id}.up").read_text(encoding="ascii"))
            return str(found["job_id"])
        except OSError:
            return None  # to be sure, `open` makes a new one
        except (ValueError, TypeError, KeyError):
            return ""

    def open(self, nodes: Sequence[str], job_id: str) -> int:
        """Say that the batch of this job runs, begin with the signs of life, and return the descriptor for worker lines.

        Raises:
            Begun: another batch of this allocation was first.
        """
        up = {
            "job_id": job_id,
            "nodes": list(nodes),
            "host": socket.gethostname(),
            "started_ns": time.time_ns(),
        }
        self._put("up", up, first=True)
        self._ours = True
        path = self._folder / f"{self._id}.jsonl"
        descriptor = os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._descriptor = descriptor
        threading.Thread(target=self._beat, args=(path,), name="mlhpc-beat", daemon=True).start()
        return descriptor

    def close(self, code: int, unsaved: int) -> int:
        """Say that the batch has ended, and return with what code: *code*, or *unsaved* if lines were lost on their way.

        Nothing more may be written. The lines go first: whoever sees that the batch is over, on any node, must see them.
        """
        self._stop.set()
        if not self._ours and self.holder is not None:
            return code  # another batch has the word
        if not self._saved() and code == 0:
            code = unsaved
        self._put("over", {"exit": code, "ended_ns": time.time_ns()})
        return code

    def _saved(self) -> bool:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return True
        try:
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)  # network file systems send what is left only here
        except OSError as error:
            if error.errno in _NO_FSYNC:
                return True
            say(f"worker lines of the allocation {self._id} were lost: {error.strerror}")
            return False
        return True

    def _beat(self, path: Path) -> None:
        while not self._stop.wait(BEAT_S):
            with contextlib.suppress(OSError):  # a line that cannot be written tells of it
                os.utime(str(path))

    def _put(self, suffix: str, content: Dict[str, Any], *, first: bool = False) -> None:
        """Write a file that is there whole or not at all; *first*: raise AlreadyStarted if there is one."""
        target = self._folder / f"{self._id}.{suffix}"
        descriptor, name = tempfile.mkstemp(dir=str(self._folder), prefix=f".{self._id}.{suffix}-")
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                json.dump({"schema": SCHEMA, **content}, file)
                file.flush()
                os.fsync(file.fileno())  # on some network disks the lack of room shows only here
            if first:
                _link(name, target, {"schema": SCHEMA, **content})
            else:
                os.replace(name, str(target))  # noqa: PTH105 - both names are strings already
        except AlreadyStarted:
            os.unlink(name)  # noqa: PTH108 - as above
            raise
        except OSError as error:
            error.filename = error.filename or str(target)
            with contextlib.suppress(OSError):
                os.unlink(name)  # noqa: PTH108 - as above
            raise


def _link(name: str, target: Path, content: Mapping[str, Any]) -> None:
    """Rename *name*, whose content is *content*, unless *target* exists; of several that try it one succeeds.

    Raises:
        AlreadyStarted: *target* exists.
    """
    try:
        os.link(name, str(target))
    except FileExistsError as error:
        # NFS repeats requests whose answer was lost: the first may have done it.
        if os.stat(name).st_nlink < 2:  # noqa: PTH116 - the name is a string already
            raise AlreadyStarted from error
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        try:
            descriptor = os.open(str(target), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError as exists:
            raise AlreadyStarted from exists
        with os.fdopen(descriptor, "w", encoding="ascii") as file:  # whoever reads half of it reads again
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
    os.unlink(name)  # noqa: PTH108 - as above


#: Most bytes of output that are stored of one rank.
LOG_CAP = 16 * 1024 * 1024

#: Logs that are no rank's; ``provision/local_process.py`` and ``session/run.py`` use these names, too.
_LOG_NAMES = {
    LAUNCHER: "launcher.log",
    ERRORS: "errors.log",
    OUTPUT_RANKS: "output-ranks.log",
    ERRORS_RANKS: "errors-ranks.log",
}


class RankIndex:
    """Which rank printed what of a log: runs of bytes, in the order of the log, as lines ``RANK BYTES``."""

    def __init__(self) -> None:
        self._runs: List[Tuple[int, int]] = []

    def add(self, rank: int, size: int) -> None:
        """Note *size* more bytes of a *rank*."""
        if self._runs and self._runs[-1][0] == rank:
            size += self._runs.pop()[1]
        self._runs.append((rank, size))

    def of(self, rank: int, log: bytes) -> bytes:
        """Return what *rank* printed of *log*."""
        found, at = b"", 0
        for number, size in self._runs:
            found += log[at : at + size] if number == rank else b""
            at += size
        return found

    def content(self) -> bytes:
        """Return the file's content."""
        return b"".join(b"%d %d\n" % one for one in self._runs)


class RunLogs:
    """Logs of the run of *book*, made in *directory* when something is written; what cannot be written fails the run.

    *opened* is called with each log that is made. ``own`` is whose log takes the output of the process that the batch starts itself: rank 0's or the launcher's.
    """

    def __init__(
        self, book: RankBook, directory: Path, opened: Optional[Callable[[int, CappedLog], None]] = None
    ) -> None:
        self.own = 0
        self._opened = opened
        self._book = book
        self._directory = directory
        self._logs: Dict[int, CappedLog] = {}

    def open(self, number: int) -> Optional[CappedLog]:
        """Return the log of a rank, of ``LAUNCHER`` or of ``ERRORS``; None if it cannot be made."""
        if number not in self._logs:
            path = self._directory / _LOG_NAMES.get(number, f"rank{number}.log")
            with contextlib.suppress(OSError):  # of a first start; who reads that one goes on reading it
                path.unlink()
            try:
                capped = ERRORS_CAP if number in (ERRORS, OUTPUT_RANKS, ERRORS_RANKS) else LOG_CAP
                log = self._logs[number] = CappedLog(path, capped)
                if self._opened is not None:
                    self._opened(number, log)
            except OSError as error:
                self.no_room(error, path)
                return None
        return self._logs[number]

    def write(self, number: int, data: bytes) -> None:
        """Append what a rank has printed."""
        log = self.open(number)
        try:
            if log is not None:
                log.write(data)
        except OSError as error:
            self.no_room(error, self._directory)

    def path(self, number: Optional[int]) -> str:
        """Return the path of a rank's log, or of the nearest one that there is."""
        log = self._nearest(number)
        return str(log.path) if log else ""

    def last_lines(self, number: Optional[int], lines: int = 5, characters: int = 600) -> str:
        """Return the last lines of a rank's output, or of the nearest log that there is, without what only we read."""
        log = self._nearest(number)
        if log is None:
            return ""
        said = [line for line in log.tail(lines + 2, characters).splitlines() if PODRUN not in line]
        return "\n".join(said[-lines:]).strip()

    def no_room(self, error: OSError, path: Path) -> None:
        """Note that a file could not be written."""
        hint = "; free space, or choose another state directory" if error.errno in NO_ROOM else ""
        self._book.fail(unwritten(error), f"cannot write {error.filename or path}: {error.strerror}{hint}")

    def close(self) -> None:
        """Close all."""
        for log in self._logs.values():
            log.close()

    def _nearest(self, number: Optional[int]) -> Optional[CappedLog]:
        return None if number is None else self._logs.get(number) or self._logs.get(self.own)


class ControllerLost(Exception):  # noqa: N818 - named for what happened
    """Nobody reads our lines any more; the batch must end."""


class CannotWrite(ControllerLost):
    """Lines cannot be written any more: nothing that still runs could be reported. ``error`` says why."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror or str(error))
        self.error = error


class Lines(Protocol):
    """The way to the controller, whatever it is."""

    def send(self, run: RunPlan, kind: str, body: Mapping[str, Any]) -> None:
        """Send one message of *run*.

        Raises:
            ControllerLost: nobody will read it.
        """

    def log(self, run: RunPlan, number: int, log: CappedLog) -> None:
        """Take note of a new log of *run*: of the rank *number*, or of its launcher (-1)."""


class Relay:
    """Numbers the worker lines of one plan and writes them to *fd*. Blocks while the controller is slow to read."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._seq = 0

    def send(self, run: RunPlan, kind: str, body: Mapping[str, Any]) -> None:
        """Send one message of *run*.

        Raises:
            ControllerLost: the channel is closed.
            CannotWrite: a file system is full or read-only. The line may be there in part, which its reader sees.
        """
        for line in encode(Message(run.run_id, run.nonce, kind, body), self._seq):
            try:
                count = os.write(self.fd, line)
            except BrokenPipeError as error:
                raise ControllerLost from error
            except OSError as error:
                raise CannotWrite(error) from error
            if count < len(line):
                raise CannotWrite(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
            self._seq += 1

    def log(self, run: RunPlan, number: int, log: CappedLog) -> None:
        """Do nothing: who reads our lines sees the logs as well."""


#: Files in the folder of a run that holds nodes: what is asked of its batch, and what the batch answers.
REQUESTS, ANSWERS = "requests.jsonl", "answers.jsonl"

#: Most bytes that one look takes.
LOOK_BYTES = 1 << 22


def create(path: Path) -> None:
    """Make an empty file that only this user may read: what is asked may hold secrets.

    Raises:
        OSError: it cannot be made, or another user's lies there.
    """
    os.close(open_private(path, os.O_WRONLY | os.O_CREAT))


def append(path: Path, content: Mapping[str, Any]) -> None:
    """Add one line in one write.

    Raises:
        OSError: it cannot be written whole, or is not this user's alone; ``filename`` is set.
    """
    line = json.dumps(dict(content), separators=(",", ":")).encode("ascii") + b"\n"
    descriptor = open_private(path, os.O_WRONLY | os.O_APPEND)
    try:
        while line:
            line = line[os.write(descriptor, line) :]
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(descriptor)


class Inbox:
    """The reading end: each line once, in order."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""

    def read(self) -> List[Dict[str, Any]]:
        """Return the objects of all lines that are new and whole; what is no JSON object is passed over.

        Raises:
            OSError: the file cannot be read, is gone, or is not this user's alone.
        """
        descriptor = open_private(self._path)
        try:
            data = os.pread(descriptor, LOOK_BYTES, self._offset)
        finally:
            os.close(descriptor)
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [found for line in lines for found in _parsed(line)]


def _parsed(line: bytes) -> List[Dict[str, Any]]:
    try:
        found = read_json(line)
    except (ValueError, RecursionError):
        return []
    return [found] if isinstance(found, dict) else []
