"""PAYLOAD. Where a batch leaves its worker lines when nobody holds its pipes: three files in a shared folder.

``ID.up`` when the batch runs, ``ID.jsonl`` with the worker lines, ``ID.over`` when it has ended. The time of the last
change of ``ID.jsonl`` is the sign of life.
"""

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
from typing import Any, Dict, Mapping, Optional, Sequence

from pytest_mlhpc.node.foreign import read_json
from pytest_mlhpc.node.processes import say

#: Version of ``.up`` and ``.over``.
SCHEMA = 1

#: Time between two signs of life, in seconds.
BEAT_S = 5.0

#: What file systems without hard links answer to link(2), and those that cannot fsync(2) to that.
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
_NO_FSYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})


class Begun(Exception):  # noqa: N818 - what happened, in the words of the flow
    """A batch of this allocation has already said that it runs; nothing was written."""


class LinesFolder:
    """The three files of one allocation.

    Args:
        folder: made by the controller, seen by it and by this node.
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
        """The id of the job whose batch has said that it runs, empty if it is not told; None: no such file is seen."""
        try:
            found = read_json((self._folder / f"{self._id}.up").read_text(encoding="ascii"))
            return str(found["job_id"])
        except OSError:
            return None  # to be sure, `open` makes a new one
        except (ValueError, TypeError, KeyError):
            return ""

    def open(self, nodes: Sequence[str], environ: Mapping[str, str]) -> int:
        """Say that the batch runs, begin with the signs of life, and return the descriptor for worker lines.

        Raises:
            Begun: another batch of this allocation was first.
        """
        up = {
            "job_id": environ.get("SLURM_JOB_ID", ""),
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
        """Write a file that is there whole or not at all; *first*: raise Begun if there is one."""
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
        except Begun:
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
        Begun: *target* exists.
    """
    try:
        os.link(name, str(target))
    except FileExistsError as error:
        # NFS repeats requests whose answer was lost: the first may have done it.
        if os.stat(name).st_nlink < 2:  # noqa: PTH116 - the name is a string already
            raise Begun from error
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        try:
            descriptor = os.open(str(target), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError as exists:
            raise Begun from exists
        with os.fdopen(descriptor, "w", encoding="ascii") as file:  # whoever reads half of it looks again
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
    os.unlink(name)  # noqa: PTH108 - as above
