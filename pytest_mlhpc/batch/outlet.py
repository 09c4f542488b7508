"""PAYLOAD. Where a batch leaves its worker lines when nobody holds its pipes: three files in a shared folder.

``ID.up`` when the batch runs, ``ID.jsonl`` with the worker lines, ``ID.over`` when it has ended. The time of the last
change of ``ID.jsonl`` is the sign of life.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Dict, Mapping, Sequence

#: Version of ``.up`` and ``.over``.
SCHEMA = 1

#: Time between two signs of life, in seconds.
BEAT_S = 5.0


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

    @property
    def begun(self) -> bool:
        """Whether a batch of this allocation has said that it runs."""
        return (self._folder / f"{self._id}.up").exists()

    def open(self, nodes: Sequence[str], environ: Mapping[str, str]) -> int:
        """Say that the batch runs, begin with the signs of life, and return the descriptor for worker lines."""
        up = {
            "job_id": environ.get("SLURM_JOB_ID", ""),
            "nodes": list(nodes),
            "host": socket.gethostname(),
            "started_ns": time.time_ns(),
        }
        self._put("up", up)
        path = self._folder / f"{self._id}.jsonl"
        descriptor = os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        threading.Thread(target=self._beat, args=(path,), name="mlhpc-beat", daemon=True).start()
        return descriptor

    def close(self, code: int) -> None:
        """Say that the batch has ended with *code*; nothing more will be written."""
        self._stop.set()
        self._put("over", {"exit": code, "ended_ns": time.time_ns()})

    def _beat(self, path: Path) -> None:
        while not self._stop.wait(BEAT_S):
            with contextlib.suppress(OSError):  # a line that cannot be written tells of it
                os.utime(str(path))

    def _put(self, suffix: str, content: Dict[str, Any]) -> None:
        target = self._folder / f"{self._id}.{suffix}"
        descriptor, name = tempfile.mkstemp(dir=str(self._folder), prefix=f".{self._id}.{suffix}-")
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                json.dump({"schema": SCHEMA, **content}, file)
                file.flush()
                os.fsync(file.fileno())  # on some network disks the lack of room shows only here
            os.replace(name, str(target))  # noqa: PTH105 - both names are strings already
        except OSError as error:
            error.filename = error.filename or str(target)
            with contextlib.suppress(OSError):
                os.unlink(name)  # noqa: PTH108 - as above
            raise


def say(text: str) -> None:
    """Write one line to the batch's own log, whatever state that is in."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)  # noqa: T201 - standard error is the batch's log
