"""PAYLOAD. Lines of JSON in a file that one side appends to and the other reads: the way into a job that holds nodes.

What is asked is obeyed, so each look also makes sure whose the file is (``node/private.py``). The file is there before anybody looks for it, and each look opens it anew: a network file system then asks the server for
its present size (close-to-open), while the absence of a file, or an old listing of a folder, may be remembered for a minute.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Dict, List, Mapping

from pytest_mlhpc.node.foreign import read_json
from pytest_mlhpc.node.private import open_private

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
